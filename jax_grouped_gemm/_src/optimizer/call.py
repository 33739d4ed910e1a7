"""Calls of the steps of an optimiser: one custom call each, which updates all in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.optimizer.plan import UpdatePlan

ADAMW = "jax_grouped_gemm.adamw_quantized.v1"
APPLY = "jax_grouped_gemm.apply_and_quantize.v1"


def adamw_quantized(plan: UpdatePlan, *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, whose path is "direct", on its primitive's operands."""
    return _call(ADAMW, plan, operands)


def apply_and_quantize(plan: UpdatePlan, *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, whose path is "direct", on its primitive's operands."""
    return _call(APPLY, plan, operands)


def _call(target: str, plan: UpdatePlan, operands: tuple[jax.Array, ...]) -> list[jax.Array]:
    problem, layout = plan.problem, plan.problem.layout
    scalars, change, *updated = operands
    quantized = 2 * (layout.plain + layout.transposed)
    first_form = len(updated) - quantized - layout.copied
    stacks = updated[:first_form]
    forms = updated[first_form : first_form + quantized]
    copies = updated[first_form + quantized :]
    flat = [
        *(x.reshape(problem.shape) for x in stacks),
        *(
            x.reshape(like.shape)
            for x, like in zip(forms, layout.forms(stacks[-1], problem.dtype), strict=True)
        ),
        *(x.reshape(problem.shape) for x in copies),
    ]
    # An unwanted form is an operand without elements.
    present = [True] * len(stacks)
    present += [layout.plain] * 2 + [layout.transposed] * 2 + [layout.copied]
    rest = iter(flat)
    given = [next(rest) if exists else jnp.zeros((0,), jnp.float32) for exists in present]
    results = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given],
        input_output_aliases={2 + i: i for i, exists in enumerate(present) if exists},
    )(
        scalars,
        change.reshape(problem.shape),
        *given,
        power_of_two=problem.power_of_two,
        part=np.int32(layout.part),
        parts=np.int32(layout.parts),
    )
    found = [x for x, exists in zip(results, present, strict=True) if exists]
    return [x.reshape(old.shape) for x, old in zip(found, updated, strict=True)]
