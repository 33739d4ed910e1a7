"""A program that runs the kernels without JAX, and a comparison of two of its builds."""
