"""Grouped matrix kernels for JAX on Hopper GPUs, with a pure JAX reference for other devices.

Ragged matmuls, in which rows belong to groups, and each group has its own matrix (mixture of
experts):

- `ragged_dot`, `ragged_dot_general`: drop-in replacements for the functions of `jax.lax`.
- `ragged_dot_accumulate`: adds a weight gradient to the sum over earlier microbatches.
- `ragged_mlp`, `gated_ragged_dot` (`MlpPlan`): compute the MLPs of experts, with activation.

FP8:

- `fp8_ragged_dot` with a `Recipe`: quantises and multiplies, and is differentiable. MLPs of experts
  take a recipe too. `quantize_mlp` quantises their weights once for several calls.
- `quantize_blockwise`, `quantize_weights`, `quantize_ragged`: return values and scales.
- `scaled_ragged_dot`, `scaled_ragged_dot_contracting`: multiply quantised operands.

Weights in 4 and 8 bits, which products take in place of arrays:

- `quantize`, `dequantize`, `from_codes`: make and unpack a `QuantizedArray` in a `Format`.
- `checkpoints`: reads published files.

Lists of unequal problems:

- `grouped_gemm`: computes general products, alpha A B + beta C.
- `grouped_syrk`, `grouped_syr2k`, `grouped_herk`, `grouped_her2k`: BLAS's symmetric updates.
- `grouped_symm_product`: multiplies symmetric matrices that commute.

Choice of kernels:

- `explain` (`Explanation`, `Plan`, `GroupedGemmPlan`, `Transfer`): says which kernels would run.
- `is_available`, `unavailable_reason`: say whether kernels can run here.
- `use_tiles` (`TileConfig`): overrides the choice of a compiled kernel.
- `batch_invariant`: makes the bits of a row's result independent of other rows.
- `check_groups`: checks group sizes and offsets when a program runs.
- `EXPORT_DISABLED_CHECKS`: an argument of `jax.export`.

Modules: `adapters` (for code that calls `jax.lax` or tokamax), `moe` (mixture-of-experts layers as
functions), `flax.linen` and `flax.nnx` (Flax layers), `optim` (Muon, and optimisers that write FP8
weights), `checkpoint_policies` (for `jax.checkpoint`).
"""

import importlib as _importlib
import warnings as _warnings
from pkgutil import extend_path as _extend_path
from typing import TYPE_CHECKING as _TYPE_CHECKING

# Search the installed package for modules too: in a checkout, `python -m` finds these sources
# first, but only the installed package has the compiled extension.
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

# The public modules. The layers in `flax` need the extra `flax`, so they are not imported here.
from jax_grouped_gemm import checkpoint_policies  # isort: skip

if _TYPE_CHECKING:
    from jax_grouped_gemm import adapters, moe, optim
    from jax_grouped_gemm._src.fp8.quantize.api import QuantizedRows as QuantizedRows
    from jax_grouped_gemm._src.fp8.quantize.api import QuantizedWeights as QuantizedWeights
    from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp as QuantizedMlp

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "Explanation",
    "Format",
    "GroupedGemmPlan",
    "MlpPlan",
    "Plan",
    "QuantizedArray",
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
"""Checks to pass as `disabled_checks` to `jax.export.export`, for programs that call the kernels.

The name of a custom call ends in the version of its operands and attributes, so an exported program
runs wherever this version of the custom call is registered.
"""


_DEPRECATED = {
    "QuantizedMlp": "_src.mlp.fp8.weights",
    "QuantizedRows": "_src.fp8.quantize.api",
    "QuantizedWeights": "_src.fp8.quantize.api",
}
"""The module of each deprecated name. Exported programs know the classes by `serialized_name`."""


def __getattr__(name: str):
    """Imports the slowest modules on first use, and deprecated names with a warning."""
    if module := _DEPRECATED.get(name):
        _warnings.warn(
            f"jax_grouped_gemm.{name} is deprecated and will be removed in 0.4: pass "
            "QuantizedArrays, or the results of quantize_weights, quantize_ragged and quantize_mlp "
            "unchanged",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(_importlib.import_module(f"{__name__}.{module}"), name)
    if name in ("adapters", "moe", "optim"):
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Register now, so that the import raises an error if jaxlib is too old, and not the first call.
_register_targets()
