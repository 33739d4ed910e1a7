"""Quantised weights: formats, packing, checkpoints, and what operations need to take them."""
