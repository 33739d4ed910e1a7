"""Measures our functions and those they replace: `python -m benchmarks.never_slower`."""
