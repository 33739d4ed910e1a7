"""The program ``python -m jax_grouped_gemm``: trains a byte-level MoE language model."""
