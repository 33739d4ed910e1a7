"""Peers by library. Each suite's `peers` function returns the peers that the suite measures."""
