"""The MLP of experts whose matrices are packed, as one operation."""
