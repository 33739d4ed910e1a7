"""Helpers for tangents, which may be symbolically zero, and for rematerialisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad


def is_zero(tangent: Any) -> bool:
    """Returns whether a tangent or cotangent is symbolically zero."""
    return type(tangent) is ad.Zero


def tangent_of(out: jax.Array, terms: Sequence[jax.Array]) -> Any:
    """Returns the sum of `terms` as the tangent of `out`, a symbolic zero if there are no terms."""
    if not terms:
        return ad.Zero(jax.typeof(out).to_tangent_aval())
    return functools.reduce(ad.add_tangents, terms)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def once_differentiable(function: str, operands: Any) -> Any:
    """Returns `operands`, whose differentiation raises an error that names `function`."""
    return operands


@once_differentiable.defjvp
def _once_differentiable_jvp(function, primals, tangents):
    raise NotImplementedError(
        f"{function} is differentiable once: its gradients are products of quantised operands, "
        "which have no derivative. Use jax.lax.stop_gradient on values that are differentiated "
        "twice, or compute them without a recipe."
    )


def is_mapped_over_mesh_axis() -> bool:
    """Returns whether the caller is traced under `jax.vmap` with `spmd_axis_name`.

    Such a `jax.vmap` cannot vectorise a nested program that mixes mapped and unmapped values inside
    `jax.shard_map`, because the types that it gives mapped values do not vary over the axis.
    """
    try:
        from jax._src import core  # JAX has no public function for this

        return bool(core.get_axis_env().spmd_axis_names)
    except (ImportError, AttributeError):
        return False


def recomputed(
    function: Callable[..., Any],
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., bool] | None = None,
) -> Any:
    """Returns `jax.checkpoint(function)`. Inside a `jax.vmap` over a mesh axis it is `function`."""
    checkpointed = jax.checkpoint(function, static_argnums=static_argnums, policy=policy)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return (function if is_mapped_over_mesh_axis() else checkpointed)(*args)

    return run
