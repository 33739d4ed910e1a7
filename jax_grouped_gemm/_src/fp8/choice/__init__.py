"""bf16 in place of a recipe where that is faster."""
