"""Interleaved benchmarks of ragged matrix multiplications: `python -m benchmarks.run --help`."""
