"""Custom calls of optimiser steps. A step is one custom call, which updates its arrays in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.optimizer.plan import UpdatePlan

TARGETS = {
    name: f"jax_grouped_gemm.{name}.v1" for name in ("adamw_quantized", "apply_and_quantize")
}


def update(plan: UpdatePlan, *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, which must not be `XLA`, on the primitive's operands."""
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
    # The custom call takes an empty array in place of a form that is not wanted.
    present = [True] * len(stacks)
    present += [layout.plain] * 2 + [layout.transposed] * 2 + [layout.copied]
    rest = iter(flat)
    given = [next(rest) if exists else jnp.zeros((0,), jnp.float32) for exists in present]
    results = jax.ffi.ffi_call(
        TARGETS[problem.op],
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
