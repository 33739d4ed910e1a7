"""Says which kernels a function would run, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params

from jax_grouped_gemm._src.op import ops
from jax_grouped_gemm._src.plan import Plan


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The plans of all grouped matmuls of a function, in program order; `str()` for reading."""

    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        if not self.plans:
            return "no grouped matmuls"
        return "\n".join(f"{i}. {plan}" for i, plan in enumerate(self.plans, start=1))


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Traces `fn(*args, **kwargs)` and plans each grouped matmul found, nested ones included.

    The plans are those for a GPU of compute capability 9.0, whatever devices this process has; see
    `unavailable_reason` for what runs here. A matmul inside a loop is listed once.

    Args:
      fn: the function, such as a loss or `jax.grad` of it.
      *args: its arguments; `jax.ShapeDtypeStruct` does for an array.
      **kwargs: its keyword arguments.

    Returns:
      An `Explanation` with a `Plan` per grouped matmul: shapes, dtypes, the path taken and why,
      tile, cluster, grid, workspace bytes and predicted efficiency. A tile that is not the default
      is marked as overridden, see `use_tiles`.
    """
    jaxpr = jax.make_jaxpr(fn)(*args, **kwargs).jaxpr
    return Explanation(tuple(_plans(jaxpr)))


def _plans(jaxpr: Jaxpr) -> Iterator[Plan]:
    """Of the grouped matmuls of `jaxpr`, in program order, nested ones included."""
    for eqn in jaxpr.eqns:
        op = ops.get(eqn.primitive)
        if op and op.is_matmul:
            yield op.planner([x.aval for x in eqn.invars], eqn.params)
        for inner in jaxprs_in_params(eqn.params):
            yield from _plans(inner)
