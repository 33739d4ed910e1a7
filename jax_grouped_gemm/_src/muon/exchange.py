"""Matrices that are split over devices, made whole on one device each, and split again.

What is split inside of matrices is exchanged twice: before the iteration each device gets some of
the matrices as a whole, and afterwards its part of all results. All leaves share one exchange.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Names = tuple[str, ...]
Iterate = Callable[[list[jax.Array]], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Split:
    """How the matrices [..., m, n] of a leaf are split inside.

    Attributes:
      mesh: the devices.
      spec: what each dimension of the leaf is split over.
      dim: the dimension of a matrix that is split, -2 or -1.
      names: the mesh axes over which it is.
    """

    mesh: Mesh | AbstractMesh
    spec: PartitionSpec
    dim: int
    names: Names

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)


def split_of(name: str, x: jax.Array, sharding: Any) -> Split | None:
    """How the matrices of `x` are split, None if each of them is whole on some device.

    Args:
      name: of the argument, for messages.
      x: matrices [..., m, n].
      sharding: a `NamedSharding`, or None for what the type of `x` says over explicit axes.

    Raises:
      TypeError: `sharding` is anything else.
      ValueError: `sharding` splits both dimensions of a matrix, or unevenly.
    """
    if sharding is None:
        sharding = jax.typeof(x).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return None
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"{name} must be a jax.sharding.NamedSharding or None, got {sharding!r}")
    entries: list[Any] = [*sharding.spec, *[None] * x.ndim][: x.ndim]
    inside = {dim: _names(entries[dim]) for dim in (-2, -1) if _names(entries[dim])}
    if not inside:
        return None
    if len(inside) > 1:
        raise ValueError(
            f"{name} splits rows and columns of matrices, {sharding.spec}: split one of them"
        )
    ((dim, names),) = inside.items()
    split = Split(sharding.mesh, PartitionSpec(*entries), dim, names)
    if x.shape[dim] % split.devices:
        raise ValueError(
            f"{name} splits a dimension of {x.shape[dim]} over {split.devices} devices, which must "
            "divide it"
        )
    return split


def whole_on_one_device(
    iterate: Iterate, xs: Sequence[jax.Array], splits: Sequence[Split]
) -> list[jax.Array]:
    """`iterate` of whole matrices, for leaves whose matrices are split over the same mesh axes.

    Args:
      iterate: gives results shaped like matrices [g, m, n], of one dtype.
      xs: leaves [..., m, n] of one dtype.
      splits: how each is split.

    Returns:
      The results, split like the leaves.
    """
    first = splits[0]
    specs = tuple(split.spec for split in splits)

    def local(*parts: jax.Array) -> tuple[jax.Array, ...]:
        stacks = [x.reshape(-1, *x.shape[-2:]) for x in parts]
        # One matrix after another, those of equal shapes in one stack, so that few are padding.
        shapes = [(*x.shape[1:], split.dim) for x, split in zip(stacks, splits, strict=True)]
        kinds = list(dict.fromkeys(shapes))
        merged = [
            jnp.concatenate([x for x, shape in zip(stacks, shapes, strict=True) if shape == kind])
            for kind in kinds
        ]
        plan = [_Exchange(x.shape, kind[-1], first) for x, kind in zip(merged, kinds, strict=True)]
        wholes = _exchanged(merged, plan, first.names, _Exchange.to_owners, _Exchange.gathered)
        outs = _exchanged(
            iterate(wholes), plan, first.names, _Exchange.to_parts, _Exchange.scattered
        )
        by_kind = {
            kind: iter(
                _pieces(out, [len(x) for x, s in zip(stacks, shapes, strict=True) if s == kind])
            )
            for kind, out in zip(kinds, outs, strict=True)
        }
        return tuple(
            next(by_kind[shape]).reshape(part.shape)
            for shape, part in zip(shapes, parts, strict=True)
        )

    outs = jax.shard_map(local, mesh=first.mesh, in_specs=specs, out_specs=specs, check_vma=False)(
        *xs
    )
    return list(outs)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Of a stack of parts of matrices [g, m, n], one dimension of which is split."""

    shape: tuple[int, ...]  # of the parts
    dim: int
    split: Split

    @property
    def own(self) -> int:
        """How many matrices a device gets as a whole, some of which may be padding."""
        return -(-self.shape[0] // self.split.devices)

    def to_owners(self, parts: jax.Array) -> jax.Array:
        """[devices, elements], what each device is to have of these parts."""
        padding = self.own * self.split.devices - self.shape[0]
        padded = jnp.pad(parts, ((0, padding), (0, 0), (0, 0)))
        return padded.reshape(self.split.devices, -1)

    def gathered(self, rows: jax.Array) -> jax.Array:
        """Whole matrices from what came from each device."""
        parts = rows.reshape(self.split.devices, self.own, *self.shape[1:])
        axis = parts.ndim + self.dim
        whole = list(self.shape)
        whole[self.dim] *= self.split.devices
        return jnp.moveaxis(parts, 0, axis - 1).reshape(self.own, *whole[1:])

    def to_parts(self, wholes: jax.Array) -> jax.Array:
        """[devices, elements], the parts of each device of these matrices."""
        shape = [self.own, *self.shape[1:]]
        axis = len(shape) + self.dim
        parts = wholes.reshape(*shape[:axis], self.split.devices, *shape[axis:])
        return jnp.moveaxis(parts, axis, 0).reshape(self.split.devices, -1)

    def scattered(self, rows: jax.Array) -> jax.Array:
        """This device's part of all matrices."""
        return rows.reshape(-1, *self.shape[1:])[: self.shape[0]]


def _exchanged(
    arrays: Sequence[jax.Array],
    plan: Sequence[_Exchange],
    names: Names,
    pack: Callable[[_Exchange, jax.Array], jax.Array],
    unpack: Callable[[_Exchange, jax.Array], jax.Array],
) -> list[jax.Array]:
    """One all-to-all of all arrays, as integers, so that nothing converts them on the way."""
    dtype = arrays[0].dtype
    bits = jnp.dtype(f"uint{8 * dtype.itemsize}")
    rows = [pack(own, x) for own, x in zip(plan, arrays, strict=True)]
    sent = lax.bitcast_convert_type(jnp.concatenate(rows, axis=1), bits)
    came = lax.all_to_all(sent, names, split_axis=0, concat_axis=0, tiled=True)
    came = lax.bitcast_convert_type(came, dtype)
    sizes = [row.shape[1] for row in rows]
    return [unpack(own, x) for own, x in zip(plan, _pieces(came, sizes, axis=1), strict=True)]


def _pieces(x: jax.Array, sizes: Sequence[int], axis: int = 0) -> list[jax.Array]:
    ends = functools.reduce(lambda found, size: [*found, found[-1] + size], sizes, [0])
    return [lax.slice_in_dim(x, a, b, axis=axis) for a, b in zip(ends, ends[1:], strict=False)]


def _names(entry: Any) -> Names:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
