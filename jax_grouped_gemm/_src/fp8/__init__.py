"""Quantisers, ragged products of FP8 operands with scales, and training with them."""
