"""Measures FP8 products, quantisers and training steps: `python -m benchmarks.fp8`."""
