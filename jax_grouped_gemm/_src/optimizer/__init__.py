"""Steps of an optimiser that write the FP8 weights of the next forward pass."""
