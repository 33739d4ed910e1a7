"""Platform choice: one call of a CUDA kernel where that is possible, the reference elsewhere."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from jax_grouped_gemm import _ffi
from jax_grouped_gemm.availability import unsuitable_device_reason
from jax_grouped_gemm.plan import Plan
from jax_grouped_gemm.plan_fp8 import QuantizePlan

logger = logging.getLogger(__name__)

Planner = Callable[[Sequence[Any], Mapping[str, Any]], Plan | QuantizePlan]

planners: dict[Primitive, Planner] = {}
"""For each grouped matmul, the function from its operands' abstract values and parameters to a
plan."""


def register_lowering(
    primitive: Primitive,
    *,
    planner: Planner,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    is_matmul: bool = True,
) -> None:
    """Registers how `primitive` is planned and lowered.

    Args:
      primitive: has a parameter `implementation`: None, "cuda" or "reference". The FP8 products
        may have `tile` too, which only a planner reads.
      planner: see `planners`.
      kernel: called as `kernel(plan, *operands)`, for plans whose path is not "reference".
      reference: called as `reference(*operands, **params)`, without these.
      is_matmul: whether `explain` and the checkpoint policies count it as a grouped matmul.
    """
    if is_matmul:
        planners[primitive] = planner
    lower_fun = functools.partial(mlir.lower_fun, multiple_results=primitive.multiple_results)

    def lower_reference(ctx, *operands, implementation, tile=None, **params):
        return lower_fun(reference)(ctx, *operands, **params)

    def lower_default(ctx, *operands, **params):
        if params["implementation"] == "cuda":
            platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
            _raise_impossible(primitive, f"it is being compiled for the platform {platforms}")
        return lower_reference(ctx, *operands, **params)

    def lower_cuda(ctx, *operands, **params):
        plan = planner(ctx.avals_in, params)
        implementation = params["implementation"]
        reason = plan.reason if plan.path == "reference" else _unusable_device_reason(ctx)
        if not reason:
            reason = _ffi.missing_extension_reason()
            if reason and implementation is None:
                _warn_once(reason)
        if not reason:
            return lower_fun(functools.partial(kernel, plan))(ctx, *operands)
        if implementation == "cuda":
            _raise_impossible(primitive, reason)
        logger.debug("%s runs the reference: %s", primitive, reason)
        return lower_reference(ctx, *operands, **params)

    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    mlir.register_lowering(primitive, lower_default)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")


def _raise_impossible(primitive: Primitive, reason: str) -> None:
    raise NotImplementedError(f"implementation='cuda' is impossible for {primitive}: {reason}")


def _unusable_device_reason(ctx: mlir.LoweringRuleContext) -> str | None:
    """Why the target device cannot run the kernels, None if it can or if it is not known."""
    try:
        backend = ctx.module_context.get_backend(optional=True)
    except RuntimeError:  # compiling on a machine without such a device
        return None
    return unsuitable_device_reason(backend.devices()[0]) if backend else None


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("Grouped matmuls run the slower reference on this CUDA device: %s", reason)
