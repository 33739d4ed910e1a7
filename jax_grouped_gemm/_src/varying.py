"""Manual mesh axes: inside `jax.shard_map` every array's type says over which axes it varies.

Primitives whose operands vary over different axes are ill-typed. JAX's own operations insert the
missing casts; ours do it with these helpers. The transpose of a cast is the `psum` that the
gradient of a replicated operand needs, so it must be visible to autodiff and cannot be left to
the lowering.
"""

from __future__ import annotations

import jax


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """The manual axes over which at least one of `arrays` varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Casts `x` so that it varies over all of `axes` too."""
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def align_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts all arrays to the union of the axes over which any of them varies."""
    axes = varying_axes(*arrays)
    return tuple(vary_over(x, axes) for x in arrays)
