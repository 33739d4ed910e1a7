"""Says which kernels a function would run, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from jax_grouped_gemm._src.arguments import checked_int
from jax_grouped_gemm._src.device import H200, Target, default_device, unsuitable_device_reason
from jax_grouped_gemm._src.op import ops
from jax_grouped_gemm._src.plan import Plan

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The plans of all grouped matmuls of a function, in program order; `str()` for reading.

    Attributes:
      plans: one for each grouped matmul.
      device: what they are plans for, in words.
    """

    plans: tuple[Plan[Any], ...]
    device: str

    @property
    def workspace_bytes(self) -> int:
        """What all kernels ask for; XLA gives those that run one after another the same memory."""
        return sum(plan.workspace_bytes for plan in self.plans)

    def __str__(self) -> str:
        lines = [f"A plan for {self.device}; nothing ran."]
        if not self.plans:
            return "\n".join([*lines, "no grouped matmuls"])
        lines += [f"{i}. {plan}" for i, plan in enumerate(self.plans, start=1)]
        most = max(plan.workspace_bytes for plan in self.plans)
        lines.append(f"workspace {self.workspace_bytes} bytes in all, {most} at a time")
        return "\n".join(lines)


def explain(
    fn: Callable[..., Any], *args: Any, multiprocessors: int | None = None, **kwargs: Any
) -> Explanation:
    """Traces `fn(*args, **kwargs)` and plans each grouped matmul found, nested ones included.

    The plans are those for a GPU of compute capability 9.0, whatever devices this process has; see
    `unavailable_reason` for what runs here. A matmul inside a loop is listed once.

        jgg.explain(jgg.ragged_dot, lhs, rhs, group_sizes, precision="highest")

    Args:
      fn: the function, such as a loss or `jax.grad` of it.
      *args: its arguments; `jax.ShapeDtypeStruct` does for an array. What has no shape and dtype,
        such as a string or a number, is passed on as it is.
      multiprocessors: how many the GPU has; by default as many as JAX's default device, if that can
        run the kernels, and else 132, as an H200 and an H100 SXM have.
      **kwargs: its keyword arguments, likewise.

    Returns:
      An `Explanation` with a `Plan` for each grouped matmul: shapes and dtypes as operands are
      stored, the path taken and why, tile, cluster, grid, workspace bytes, and the predicted time
      with what bounds it, the tensor cores or memory. That is for the clock and the memory of an
      H200 and for groups of equal size, without what launching takes. The products of a ragged
      matmul are labelled forward, dgrad and wgrad, and a tile that is not the default is marked as
      overridden, see `use_tiles`. Its first line, printed, says that it is a plan, and for which
      device.

    Raises:
      TypeError, ValueError: `multiprocessors` is no integer, or not positive.
    """
    if multiprocessors is None:
        target, device = _default_target()
    else:
        target = Target(checked_int("multiprocessors", multiprocessors))
        device = f"a Hopper GPU of {multiprocessors} multiprocessors {_TIMES}"
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def of_arrays(*arrays: jax.Array) -> Any:
        rest = iter(arrays)
        given = [next(rest) if x else leaf for leaf, x in zip(leaves, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, given)
        return fn(*args, **kwargs)

    arrays = [leaf for leaf, x in zip(leaves, is_array, strict=True) if x]
    jaxpr = jax.make_jaxpr(of_arrays)(*arrays).jaxpr
    return Explanation(tuple(_plans(jaxpr, target)), device)


_TIMES = "with the clock and the memory of an H200"


def _default_target() -> tuple[Target, str]:
    """The size of the chip that plans are made for by default, and which chip it is, in words."""
    device = default_device()
    if unsuitable_device_reason(device):
        words = f"an H200 of {H200.multiprocessors} multiprocessors"
        return H200, f"{words} (the default device, {device.device_kind}, runs no kernel)"
    target = Target.of(device)
    words = f"{device.device_kind} of {target.multiprocessors} multiprocessors"
    return target, words if "H200" in device.device_kind else f"{words}, taken {_TIMES}"


def _plans(jaxpr: Jaxpr, target: Target) -> Iterator[Plan[Any]]:
    """Yields those of the grouped matmuls of `jaxpr` in program order, nested ones included."""
    from jax.extend.core import jaxprs_in_params  # as slow to import as `op.py` says

    for eqn in jaxpr.eqns:
        op = ops.get(eqn.primitive)
        if op and (op.is_matmul or op.is_listed):
            yield op.planner([x.aval for x in eqn.invars], eqn.params, target)
        for inner in jaxprs_in_params(eqn.params):
            yield from _plans(inner, target)
