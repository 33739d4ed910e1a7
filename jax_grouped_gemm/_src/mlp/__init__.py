"""The MLPs of experts: ragged products with an activation between them, as one operation."""
