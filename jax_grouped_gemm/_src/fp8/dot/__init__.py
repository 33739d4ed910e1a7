"""A ragged matmul that quantises its operands to FP8."""
