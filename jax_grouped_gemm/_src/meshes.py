"""Finds mesh axes by kind, and moves arrays to the sharding of a `PartitionSpec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]


def names_of(entry: str | Sequence[str] | None) -> Axes:
    """Returns the mesh axes of an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def axes_of_kind(mesh: Any, kind: AxisType) -> Axes:
    """Returns the axes of `mesh` that are of `kind`, in the order of the mesh."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, its_kind in kinds if its_kind == kind)


def placed(x: jax.Array, mesh: Any, spec: P) -> jax.Array:
    """Returns `x`, split over the explicit axes in `spec`. XLA decides about auto axes."""
    explicit = axes_of_kind(mesh, AxisType.Explicit)

    def kept(entry):
        return tuple(name for name in names_of(entry) if name in explicit) or None

    wanted = NamedSharding(mesh, P(*map(kept, spec)))
    if not explicit or jax.typeof(x).sharding == wanted:
        return x
    return jax.sharding.reshard(x, wanted)


def gathered(x: jax.Array, spec: P) -> jax.Array:
    """Gathers the whole array from devices' slices `x`, which `spec` splits along manual axes."""
    for axis, names in enumerate(spec):
        if names is not None:
            x = lax.all_gather(x, names, axis=axis, tiled=True)
    return x


def as_sharded(out_sharding: Any, product: Callable[..., Any], *operands: Any) -> Any:
    """Computes `product` with a result of `out_sharding`; XLA decides how to partition it."""
    if not isinstance(out_sharding, NamedSharding | P):
        raise TypeError(
            "out_sharding must be None, a jax.sharding.NamedSharding or a PartitionSpec, got "
            f"{out_sharding!r}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(out_sharding, NamedSharding) and mesh.empty:
        mesh = out_sharding.mesh.abstract_mesh
    if mesh.explicit_axes:
        return jax.sharding.auto_axes(product, out_sharding=out_sharding)(*operands)
    spec = out_sharding if isinstance(out_sharding, P) else out_sharding.spec
    if any(axes is not None for axes in spec):
        raise ValueError(
            f"out_sharding is for explicit mesh axes, got {out_sharding} where the mesh has none: "
            f"{mesh}"
        )
    return product(*operands)
