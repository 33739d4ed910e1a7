"""Ragged products of FP8 operands with scales."""
