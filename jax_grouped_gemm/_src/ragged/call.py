"""Custom calls of ragged products. They pad operands and slice the result where TMA needs it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import pad_to
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.ragged import whole
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.ragged.tiles import ALL_ROWS

NONCONTRACTING_TARGET = "jax_grouped_gemm.ragged_noncontracting.v4"
CONTRACTING_TARGET = "jax_grouped_gemm.ragged_contracting.v4"
ACCUMULATE_TARGET = "jax_grouped_gemm.ragged_accumulate.v1"


def ragged(
    plan: Plan[RaggedProblem],
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, which must not be `XLA`, on the operands of `plan.problem`."""
    problem = plan.problem
    if plan.kernel == ALL_ROWS:
        return whole.product(plan, lhs, rhs, group_sizes, group_offset)
    if plan.kernel_problem is None:
        return zeros(problem)
    _, kernel = plan.launched
    options: dict[str, Any] = limit(problem.max_sms)
    if not problem.contracts_rows:
        options["zeroes_unowned"] = problem.zeroes_unowned
    return call_kernel(
        CONTRACTING_TARGET if problem.contracts_rows else NONCONTRACTING_TARGET,
        plan,
        *_addressable(plan, lhs, rhs),
        group_sizes,
        group_offset,
        **_majors(plan),
        **options,
        kind=kernel.schedule,
        terms=np.int32(plan.terms),
    )


def limit(max_sms: int | None) -> dict[str, np.int32]:
    """Returns the attribute that limits a product to `max_sms` multiprocessors, if any."""
    return {} if max_sms is None else {"max_sms": np.int32(max_sms)}


def accumulate(
    plan: Plan[RaggedProblem],
    accumulator: jax.Array,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Returns `accumulator` plus the product that `ragged` returns, in place if the kernel can."""
    if plan.kernel_problem is None:
        return accumulator
    if not plan.kernel_problem.accumulates:
        return accumulator + ragged(plan, lhs, rhs, group_sizes, group_offset)
    return call_kernel(
        ACCUMULATE_TARGET,
        plan,
        accumulator,
        *_addressable(plan, lhs, rhs),
        group_sizes,
        group_offset,
        # XLA copies the accumulator first if it is needed later.
        input_output_aliases={0: 0},
        **_majors(plan),
    )


def _addressable(
    plan: Plan[RaggedProblem], lhs: jax.Array, rhs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the operands in the kernel's layouts, padded so that TMA can address their rows."""
    form, _ = plan.launched
    lhs = lhs if plan.problem.lhs == form.lhs else lhs.mT
    rhs = rhs if plan.problem.rhs == form.rhs else rhs.mT
    return pad_to(lhs, form.shape(form.lhs)), pad_to(rhs, form.shape(form.rhs))


def _majors(plan: Plan[RaggedProblem]) -> dict[str, Any]:
    """Returns the attributes for the layouts of the kernel's operands."""
    form, _ = plan.launched
    return {"transpose_lhs": False, "transpose_rhs": form.rhs == "gnk"}


def call_kernel(
    target: str,
    plan: Plan[RaggedProblem],
    *operands: jax.Array,
    input_output_aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> jax.Array:
    """Calls `target`, and slices and converts its result as the problem requires."""
    problem, (addressable, kernel) = plan.problem, plan.launched
    result_shape = (*addressable.batch, *addressable.shape(addressable.out))
    results = (
        jax.ShapeDtypeStruct(result_shape, addressable.out_dtype),
        jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8),
    )
    sizes = {name: np.int32(size) for name, size in kernel.tile.sizes().items()}
    call = jax.ffi.ffi_call(target, results, input_output_aliases=input_output_aliases)
    out, _ = call(*operands, **attributes, **sizes)
    valid = tuple(slice(size) for size in problem.shape(problem.out))
    return out[..., *valid].astype(problem.out_dtype)


def zeros(problem: RaggedProblem) -> jax.Array:
    """Returns the result of a product with nothing to multiply."""
    return jnp.zeros((*problem.batch, *problem.shape(problem.out)), problem.out_dtype)
