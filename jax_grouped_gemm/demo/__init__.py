"""What ``python -m jax_grouped_gemm`` runs: a byte-level MoE language model and its training."""
