"""Our kernels in every compiled configuration that can run a problem, whatever the plan chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.harness.peer import NotOffered

# At least as many as any product has; a peer each, which most problems do not offer.
MOST = 4


def configured(
    function: Callable[..., jax.Array], index: int, *operands: jax.Array
) -> tuple[Callable[..., jax.Array], Any]:
    """`function`, which multiplies once, with one of the configurations that its plan could take.

    Returns:
      The function, and the configuration.

    Raises:
      NotOffered: if there are not so many.
    """
    # Not before: `first_call.py` times the import of our library, and needs the peers before.
    import jax_grouped_gemm as jgg

    (plan,) = jgg.explain(function, *operands).plans
    if index >= len(plan.candidates):
        raise NotOffered(f"{len(plan.candidates)} configurations can run it")
    config = plan.candidates[index]

    def with_config(*operands: jax.Array) -> jax.Array:
        with jgg.use_tiles(forward=config):
            return function(*operands)

    return with_config, config
