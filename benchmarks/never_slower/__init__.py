"""Measures our functions and what they replace: `python -m benchmarks.never_slower`."""
