"""Products of lists of matrices."""
