"""The ragged product by packed weights, as one operation."""
