"""What `jax_grouped_gemm.moe` is made of."""
