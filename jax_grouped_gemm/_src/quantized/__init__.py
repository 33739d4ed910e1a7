"""Quantised weights: formats, packing, checkpoints, and how operations take them."""
