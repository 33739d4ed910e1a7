"""Grouped matrix kernels for JAX on Hopper GPUs, with a pure JAX reference for everything else."""

from pkgutil import extend_path

# In a checkout, `python -m` finds these sources before the installed package, and the compiled
# extension only there.
__path__ = extend_path(__path__, __name__)

from jax_grouped_gemm import _ffi
from jax_grouped_gemm import checkpoint_policies as checkpoint_policies
from jax_grouped_gemm._ffi import EXPORT_DISABLED_CHECKS as EXPORT_DISABLED_CHECKS
from jax_grouped_gemm.autotune import autotune as autotune
from jax_grouped_gemm.availability import is_available as is_available
from jax_grouped_gemm.availability import unavailable_reason as unavailable_reason
from jax_grouped_gemm.explain import Explanation as Explanation
from jax_grouped_gemm.explain import explain as explain
from jax_grouped_gemm.fp8_ragged_dot import Recipe as Recipe
from jax_grouped_gemm.fp8_ragged_dot import fp8_ragged_dot as fp8_ragged_dot
from jax_grouped_gemm.grouped_gemm import grouped_gemm as grouped_gemm
from jax_grouped_gemm.grouped_gemm_plan import GroupedGemmPlan as GroupedGemmPlan
from jax_grouped_gemm.plan import Plan as Plan
from jax_grouped_gemm.quantize import QuantizedRows as QuantizedRows
from jax_grouped_gemm.quantize import QuantizedWeights as QuantizedWeights
from jax_grouped_gemm.quantize import quantize_blockwise as quantize_blockwise
from jax_grouped_gemm.quantize import quantize_ragged as quantize_ragged
from jax_grouped_gemm.quantize import quantize_weights as quantize_weights
from jax_grouped_gemm.ragged_dot import ragged_dot as ragged_dot
from jax_grouped_gemm.ragged_dot import ragged_dot_general as ragged_dot_general
from jax_grouped_gemm.ragged_dot_accumulate import ragged_dot_accumulate as ragged_dot_accumulate
from jax_grouped_gemm.rank_k import grouped_her2k as grouped_her2k
from jax_grouped_gemm.rank_k import grouped_herk as grouped_herk
from jax_grouped_gemm.rank_k import grouped_syr2k as grouped_syr2k
from jax_grouped_gemm.rank_k import grouped_syrk as grouped_syrk
from jax_grouped_gemm.scaled_ragged_dot import scaled_ragged_dot as scaled_ragged_dot
from jax_grouped_gemm.scaled_ragged_dot import (
    scaled_ragged_dot_contracting as scaled_ragged_dot_contracting,
)
from jax_grouped_gemm.tile_choice import use_tiles as use_tiles
from jax_grouped_gemm.tile_config import TileConfig as TileConfig
from jax_grouped_gemm.tuning_table import TuningTable as TuningTable
from jax_grouped_gemm.tuning_table import load_tuning as load_tuning

__version__ = "0.1.0"

# Now rather than at the first use: raises ImportError if the installed jaxlib cannot run it.
_ffi.missing_extension_reason()
