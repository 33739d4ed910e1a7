"""Grouped matrix kernels for JAX on Hopper GPUs, with a pure JAX reference for everything else.

Ragged matmuls. Rows belong to groups, and each group has its own matrix (mixture of experts):

- `ragged_dot`, `ragged_dot_general`: drop-in replacements for `jax.lax`'s functions.
- `ragged_dot_accumulate`: adds a weight gradient to the sum over earlier microbatches.
- `ragged_mlp`, `gated_ragged_dot` (`MlpPlan`): the MLPs of experts, activation included.

In FP8:

- `fp8_ragged_dot` with a `Recipe`: quantises and multiplies, and is differentiable. MLPs of experts
  take a recipe too. `quantize_mlp` quantises their weights once for several calls.
- `quantize_blockwise`, `quantize_weights`, `quantize_ragged`: values and scales.
- `scaled_ragged_dot`, `scaled_ragged_dot_contracting`: products of quantised operands.

Weights in 4 and 8 bits. Products take them in place of arrays:

- `quantize`, `dequantize`, `from_codes`: a `QuantizedArray` in a `Format`.
- `checkpoints`: readers of published files.

Lists of unequal problems:

- `grouped_gemm`: general products, alpha A B + beta C.
- `grouped_syrk`, `grouped_syr2k`, `grouped_herk`, `grouped_her2k`: BLAS's symmetric updates.
- `grouped_symm_product`: products of symmetric matrices that commute.

Which kernel runs, and where:

- `explain` (`Explanation`, `Plan`, `GroupedGemmPlan`, `Transfer`), `is_available`,
  `unavailable_reason`.
- `use_tiles` (`TileConfig`): overrides the choice of a compiled kernel.
- `batch_invariant`: the bits of a row's result depend on no other row.
- `check_groups`: checks group sizes and offsets when a program runs.
- `EXPORT_DISABLED_CHECKS`: for `jax.export`.

Modules: `adapters` (for code that calls `jax.lax` or tokamax), `moe` (mixture-of-experts layers as
functions), `flax.linen` and `flax.nnx` (as layers), `optim` (Muon, and FP8 weights out of the
optimiser), `checkpoint_policies` (for `jax.checkpoint`).
"""

import importlib as _importlib
import warnings as _warnings
from pkgutil import extend_path as _extend_path
from typing import TYPE_CHECKING as _TYPE_CHECKING

# In a checkout, `python -m` finds these sources before the installed package, and the compiled
# extension only there.
__path__ = _extend_path(__path__, __name__)

from jax_grouped_gemm._src.arguments import check_groups
from jax_grouped_gemm._src.explain import Explanation, explain
from jax_grouped_gemm._src.extension import is_available, unavailable_reason
from jax_grouped_gemm._src.extension import register_targets as _register_targets
from jax_grouped_gemm._src.fp8.dot.api import fp8_ragged_dot
from jax_grouped_gemm._src.fp8.quantize.api import (
    quantize_blockwise,
    quantize_ragged,
    quantize_weights,
)
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.fp8.scaled.api import scaled_ragged_dot, scaled_ragged_dot_contracting
from jax_grouped_gemm._src.invariance import batch_invariant
from jax_grouped_gemm._src.lists.grouped_gemm.api import grouped_gemm
from jax_grouped_gemm._src.lists.grouped_gemm.plan import GroupedGemmPlan
from jax_grouped_gemm._src.lists.rank_k.api import (
    grouped_her2k,
    grouped_herk,
    grouped_symm_product,
    grouped_syr2k,
    grouped_syrk,
)
from jax_grouped_gemm._src.mlp.api import gated_ragged_dot, ragged_mlp
from jax_grouped_gemm._src.mlp.fp8.weights import quantize_mlp
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.op import export_disabled_checks as _export_disabled_checks
from jax_grouped_gemm._src.optimizer import primitive as _optimizer  # noqa: F401 - exported
from jax_grouped_gemm._src.plan import Plan, TileConfig
from jax_grouped_gemm._src.quantized import checkpoints
from jax_grouped_gemm._src.quantized.api import dequantize, from_codes, quantize
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import Format
from jax_grouped_gemm._src.ragged.api import ragged_dot, ragged_dot_accumulate, ragged_dot_general
from jax_grouped_gemm._src.tile_choices import use_tiles
from jax_grouped_gemm._src.transfers import Transfer
from jax_grouped_gemm._src.version import __version__

# The public modules; the layers in `flax` need the extra of that name.
from jax_grouped_gemm import checkpoint_policies  # isort: skip

if _TYPE_CHECKING:
    from jax_grouped_gemm import adapters, moe, optim
    from jax_grouped_gemm._src.fp8.quantize.api import QuantizedRows, QuantizedWeights
    from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "Explanation",
    "Format",
    "GroupedGemmPlan",
    "MlpPlan",
    "Plan",
    "QuantizedArray",
    "QuantizedMlp",
    "QuantizedRows",
    "QuantizedWeights",
    "Recipe",
    "TileConfig",
    "Transfer",
    "__version__",
    "adapters",
    "batch_invariant",
    "check_groups",
    "checkpoint_policies",
    "checkpoints",
    "dequantize",
    "explain",
    "fp8_ragged_dot",
    "from_codes",
    "gated_ragged_dot",
    "grouped_gemm",
    "grouped_her2k",
    "grouped_herk",
    "grouped_symm_product",
    "grouped_syr2k",
    "grouped_syrk",
    "is_available",
    "moe",
    "optim",
    "quantize",
    "quantize_blockwise",
    "quantize_mlp",
    "quantize_ragged",
    "quantize_weights",
    "ragged_dot",
    "ragged_dot_accumulate",
    "ragged_dot_general",
    "ragged_mlp",
    "scaled_ragged_dot",
    "scaled_ragged_dot_contracting",
    "unavailable_reason",
    "use_tiles",
]

EXPORT_DISABLED_CHECKS = _export_disabled_checks()
"""Pass to `jax.export.export(..., disabled_checks=)` to export programs that call the kernels.

The name of a custom call ends in the version of its operands and attributes, so an exported program
runs wherever that version of the custom call is registered.
"""


_DEPRECATED = {
    "QuantizedMlp": "_src.mlp.fp8.weights",
    "QuantizedRows": "_src.fp8.quantize.api",
    "QuantizedWeights": "_src.fp8.quantize.api",
}
"""The module of each name that goes. Exported programs know the classes by names of their own."""


def __getattr__(name: str):
    """Imports the modules that take longest when asked for, and names that are deprecated."""
    if module := _DEPRECATED.get(name):
        _warnings.warn(
            f"jax_grouped_gemm.{name} is deprecated and will be removed in 0.4: functions take "
            "QuantizedArrays in its place, or what quantize_weights, quantize_ragged and "
            "quantize_mlp return as it is",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(_importlib.import_module(f"{__name__}.{module}"), name)
    if name in ("adapters", "moe", "optim"):
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Now rather than at the first use: raises ImportError if the installed jaxlib cannot run it.
_register_targets()
