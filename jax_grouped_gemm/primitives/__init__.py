"""The JAX primitives: abstract evaluation, differentiation, batching and lowering."""

from jax_grouped_gemm import (
    grouped_gemm_plan,
    kernel_calls,
    plan_fp8,
    plan_ragged,
    rank_k_plan,
    reference,
    reference_fp8,
)
from jax_grouped_gemm.primitives import quantize as _quantize
from jax_grouped_gemm.primitives import scaled as _scaled
from jax_grouped_gemm.primitives import transposes as _transposes  # noqa: F401
from jax_grouped_gemm.primitives.grouped_gemm import Problems as Problems
from jax_grouped_gemm.primitives.grouped_gemm import grouped_gemm as grouped_gemm
from jax_grouped_gemm.primitives.grouped_gemm import grouped_gemm_p as grouped_gemm_p
from jax_grouped_gemm.primitives.grouped_gemm import reference_products as _grouped_gemm_reference
from jax_grouped_gemm.primitives.lowering import register_lowering as _register_lowering
from jax_grouped_gemm.primitives.quantize import quantize_blocks as quantize_blocks
from jax_grouped_gemm.primitives.quantize import quantize_ragged as quantize_ragged
from jax_grouped_gemm.primitives.quantize import quantize_rows as quantize_rows
from jax_grouped_gemm.primitives.ragged_accumulate import ragged_accumulate as ragged_accumulate
from jax_grouped_gemm.primitives.ragged_accumulate import (
    ragged_accumulate_p as ragged_accumulate_p,
)
from jax_grouped_gemm.primitives.ragged_contracting import ragged_contracting as ragged_contracting
from jax_grouped_gemm.primitives.ragged_contracting import (
    ragged_contracting_p as ragged_contracting_p,
)
from jax_grouped_gemm.primitives.ragged_noncontracting import (
    ragged_noncontracting as ragged_noncontracting,
)
from jax_grouped_gemm.primitives.ragged_noncontracting import (
    ragged_noncontracting_p as ragged_noncontracting_p,
)
from jax_grouped_gemm.primitives.rank_k import Stacks as Stacks
from jax_grouped_gemm.primitives.rank_k import rank_k as rank_k
from jax_grouped_gemm.primitives.rank_k import rank_k_p as rank_k_p
from jax_grouped_gemm.primitives.rank_k import reference_updates as _rank_k_reference
from jax_grouped_gemm.primitives.scaled import (
    scaled_ragged_contracting as scaled_ragged_contracting,
)
from jax_grouped_gemm.primitives.scaled import (
    scaled_ragged_noncontracting as scaled_ragged_noncontracting,
)

_register_lowering(
    ragged_noncontracting_p,
    planner=plan_ragged.plan_noncontracting,
    kernel=kernel_calls.ragged,
    reference=reference.ragged_noncontracting,
)
_register_lowering(
    ragged_contracting_p,
    planner=plan_ragged.plan_contracting,
    kernel=kernel_calls.ragged,
    reference=reference.ragged_contracting,
)
_register_lowering(
    ragged_accumulate_p,
    planner=plan_ragged.plan_accumulate,
    kernel=kernel_calls.accumulate,
    reference=reference.ragged_accumulate,
)
_register_lowering(
    grouped_gemm_p,
    planner=grouped_gemm_plan.plan_grouped_gemm,
    kernel=kernel_calls.grouped_gemm,
    reference=_grouped_gemm_reference,
)
_register_lowering(
    rank_k_p,
    planner=rank_k_plan.plan_rank_k,
    kernel=kernel_calls.rank_k,
    reference=_rank_k_reference,
)
_register_lowering(
    _scaled.scaled_ragged_noncontracting_p,
    planner=plan_fp8.plan_scaled_noncontracting,
    kernel=kernel_calls.scaled_noncontracting,
    reference=reference_fp8.scaled_ragged_noncontracting,
)
_register_lowering(
    _scaled.scaled_ragged_contracting_p,
    planner=plan_fp8.plan_scaled_contracting,
    kernel=kernel_calls.scaled_contracting,
    reference=reference_fp8.scaled_ragged_contracting,
)
for _primitive, _planner, _reference in (
    (_quantize.quantize_rows_p, plan_fp8.plan_quantize_rows, reference_fp8.quantize_rows),
    (_quantize.quantize_blocks_p, plan_fp8.plan_quantize_blocks, reference_fp8.quantize_blocks),
    (_quantize.quantize_ragged_p, plan_fp8.plan_quantize_ragged, reference_fp8.quantize_ragged),
):
    _register_lowering(
        _primitive,
        planner=_planner,
        kernel=kernel_calls.quantize,
        reference=_reference,
        is_matmul=False,
    )
