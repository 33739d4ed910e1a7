"""Random shapes against what ours replaces: `python -m benchmarks.never_slower`."""
