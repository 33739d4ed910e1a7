"""Steps of optimisers that write FP8 weights."""
