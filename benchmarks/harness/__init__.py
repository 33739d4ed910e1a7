"""The parts of all benchmarks: cases, inputs, checks, clocks, sessions and results."""
