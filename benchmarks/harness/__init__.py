"""Cases, inputs, checks, clocks, sessions and results: what all benchmarks are made of."""
