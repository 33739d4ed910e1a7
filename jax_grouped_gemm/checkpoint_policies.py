"""Rematerialisation policies for `jax.checkpoint` that keep the results of grouped matmuls.

`jax.checkpoint_policies.dots_saveable` knows JAX's own dots only and recomputes ours.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive

from jax_grouped_gemm.primitives.lowering import planners


def grouped_matmuls_saveable(primitive: Primitive, *_: Any, **__: Any) -> bool:
    """Saves the results of grouped matmuls, recomputes everything else."""
    return primitive in planners


dots_and_grouped_matmuls_saveable = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, grouped_matmuls_saveable
)
"""Saves the results of grouped matmuls and of JAX's own dots, recomputes everything else."""
