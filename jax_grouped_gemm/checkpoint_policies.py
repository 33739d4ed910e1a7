"""Rematerialisation policies for `jax.checkpoint` that keep the results of grouped matmuls.

`jax.checkpoint_policies.dots_saveable` saves only JAX's own dots, and recomputes the products of
this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jax_grouped_gemm._src.fp8.products import FP8_LHS, FP8_RHS
from jax_grouped_gemm._src.op import ops

if TYPE_CHECKING:
    from jax.extend.core import Primitive


def grouped_matmuls_saveable(primitive: Primitive, *_: Any, **__: Any) -> bool:
    """Saves the results of grouped matmuls, and recomputes everything else."""
    return primitive in ops and ops[primitive].is_matmul


dots_and_grouped_matmuls_saveable = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, grouped_matmuls_saveable
)
"""Saves the results of grouped matmuls and of JAX's own dots, and recomputes everything else."""

quantized_operands_saveable = jax.checkpoint_policies.save_only_these_names(FP8_LHS, FP8_RHS)
"""Saves the quantised operands of `fp8_ragged_dot`, so that no operand is quantised twice."""

grouped_matmuls_and_quantized_operands_saveable = jax.checkpoint_policies.save_from_both_policies(
    grouped_matmuls_saveable, quantized_operands_saveable
)
"""Saves the results of grouped matmuls and the quantised operands of `fp8_ragged_dot`."""
