"""The ragged product of rows and packed weights, as one operation."""
