"""Operations on lists of stacks of unequal matrices, and what they share."""
