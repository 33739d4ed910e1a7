"""Flax modules: `jax_grouped_gemm.flax.linen.MoE` and `jax_grouped_gemm.flax.nnx.MoE`."""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "jax_grouped_gemm.flax needs Flax; install it with: pip install 'jax-grouped-gemm[flax]'"
    ) from error

from jax_grouped_gemm.flax import linen as linen
from jax_grouped_gemm.flax import nnx as nnx
