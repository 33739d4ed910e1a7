"""Quantisers to FP8."""
