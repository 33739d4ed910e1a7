"""A driver of the kernels without JAX, and the comparison of two builds with it."""
