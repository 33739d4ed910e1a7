"""The JAX primitives: abstract evaluation, differentiation, batching and lowering."""

from jax_grouped_gemm import _ffi, plan, reference
from jax_grouped_gemm.primitives import transposes as _transposes  # noqa: F401
from jax_grouped_gemm.primitives.lowering import register_lowering as _register_lowering
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

_register_lowering(
    ragged_noncontracting_p,
    planner=plan.plan_noncontracting,
    kernel=_ffi.ragged_call,
    reference=reference.ragged_noncontracting,
)
_register_lowering(
    ragged_contracting_p,
    planner=plan.plan_contracting,
    kernel=_ffi.ragged_call,
    reference=reference.ragged_contracting,
)
