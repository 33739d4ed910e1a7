"""The ragged matmul of operands that it quantises."""
