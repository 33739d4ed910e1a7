"""Gathers each split matrix on one device, and splits results again.

Matrices whose rows or columns are split are exchanged twice. Before the iteration each device gets
some whole matrices, and afterwards its part of all results. All leaves share one exchange. For two
devices the exchange is cut into chunks: copy engines bring a chunk while the device iterates on
another chunk.

Alternatively, each device iterates on its own blocks, without an exchange.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.barrier import barrier

# For two devices, matrices travel in at most MOST_CHUNKS chunks, each of about this size or more.
CHUNK_BYTES = 2**27
MOST_CHUNKS = 4
WORD = np.dtype(np.uint16)

Names = tuple[str, ...]
Iterate = Callable[[list[jax.Array]], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Split:
    """How the rows or columns of the matrices [..., m, n] of a leaf are split over devices.

    Attributes:
      mesh: the devices.
      spec: the mesh axes over which each dimension of the leaf is split.
      dim: the dimension of a matrix that is split, -2 or -1.
      names: the mesh axes over which this dimension is split.
    """

    mesh: Mesh | AbstractMesh
    spec: PartitionSpec
    dim: int
    names: Names

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)


def split_of(name: str, x: jax.Array, sharding: Any) -> Split | None:
    """Returns how the matrices of `x` are split, None if neither rows nor columns are split.

    Args:
      name: name of the argument, for messages.
      x: matrices [..., m, n].
      sharding: a `NamedSharding`, or None for the sharding over explicit axes in the type of `x`.

    Raises:
      TypeError: `sharding` is neither a `NamedSharding` nor None.
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


def on_split_matrices(
    iterate: Iterate,
    xs: Sequence[jax.Array],
    splits: Sequence[Split],
    blockwise: bool | jax.Array,
) -> list[jax.Array]:
    """Runs `iterate` on matrices that are split over the same mesh axes.

    Args:
      iterate: returns results shaped like matrices [..., m, n], of one dtype.
      xs: leaves [..., m, n] of one dtype.
      splits: how each leaf is split.
      blockwise: whether each device iterates on its own blocks of matrices. If not, devices
        exchange blocks and iterate on whole matrices.

    Returns:
      The results, split like the leaves. Results of blocks are scaled to the RMS that results of
      whole matrices have.
    """
    whole = functools.partial(_on_whole_matrices, iterate, splits)
    blocks = functools.partial(_on_blocks, iterate, splits)

    # Choose inside `shard_map`, because XLA gathers the operands of a condition over auto axes.
    def either(blockwise: jax.Array, *parts: jax.Array) -> tuple[jax.Array, ...]:
        return lax.cond(blockwise, blocks, whole, *parts)

    specs = tuple(split.spec for split in splits)
    function: Callable[..., tuple[jax.Array, ...]] = whole
    operands, in_specs = tuple(xs), specs
    if blockwise is True:
        function = blocks
    elif blockwise is not False:
        function, operands, in_specs = either, (blockwise, *xs), (PartitionSpec(), *specs)
    # Refuse derivatives, because an exchange of bits would silently have zero derivatives.
    run = jax.custom_jvp(
        jax.shard_map(
            function, mesh=splits[0].mesh, in_specs=in_specs, out_specs=specs, check_vma=False
        )
    )
    run.defjvp(_refuse_derivatives)
    return list(run(*operands))


def _on_whole_matrices(
    iterate: Iterate, splits: Sequence[Split], *parts: jax.Array
) -> tuple[jax.Array, ...]:
    """Iterates on whole matrices, and returns this device's parts of the results."""
    stacks = [x.reshape(-1, *x.shape[-2:]) for x in parts]
    # Stack matrices of equal shapes, so that there is little padding.
    shapes = [(*x.shape[1:], split.dim) for x, split in zip(stacks, splits, strict=True)]
    kinds = list(dict.fromkeys(shapes))
    merged = [
        jnp.concatenate([x for x, shape in zip(stacks, shapes, strict=True) if shape == kind])
        for kind in kinds
    ]
    outs = _in_chunks(merged, [kind[-1] for kind in kinds], splits[0], iterate)
    by_kind = {
        kind: iter(_pieces(out, [len(x) for x, s in zip(stacks, shapes, strict=True) if s == kind]))
        for kind, out in zip(kinds, outs, strict=True)
    }
    return tuple(
        next(by_kind[shape]).reshape(part.shape) for shape, part in zip(shapes, parts, strict=True)
    )


def _on_blocks(
    iterate: Iterate, splits: Sequence[Split], *parts: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the results for this device's blocks of matrices."""
    return tuple(map(_as_large_as_whole, iterate(list(parts)), splits))


def _as_large_as_whole(y: jax.Array, split: Split) -> jax.Array:
    """Scales blocks so that elements have the RMS of those of whole orthogonal matrices, which is
    1 / sqrt(longer side)."""
    whole = list(y.shape[-2:])
    whole[split.dim] *= split.devices
    ratio = max(y.shape[-2:]) / max(whole)
    return y if ratio == 1 else (y.astype(at_least_float32(y.dtype)) * ratio**0.5).astype(y.dtype)


def _refuse_derivatives(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "orthogonalize has no derivative for matrices whose rows or columns are split: replicate "
        "the matrices, or split their leading axis"
    )


def _in_chunks(
    stacks: Sequence[jax.Array], dims: Sequence[int], split: Split, iterate: Iterate
) -> list[jax.Array]:
    """Returns this device's parts of the results for stacks [g, m, n], split along `dims`.

    During the iteration on a chunk, one all-to-all brings the next chunk and returns the previous
    results.
    """
    chunks = _chunks([len(x) for x in stacks], sum(x.nbytes for x in stacks), split.devices)
    outs: list[list[jax.Array]] = [[] for _ in stacks]
    wholes: list[jax.Array] = []
    plans: list[list[_Exchange]] = []
    back: list[_Leg] = []
    for c in range(len(chunks) + 2):
        legs = back
        for chunk in chunks[c : c + 1]:
            xs = [stacks[i][part] for i, part in chunk.items()]
            plans.append(
                [_Exchange(x.shape, dims[i], split) for i, x in zip(chunk, xs, strict=True)]
            )
            legs = [*back, _Leg(xs, plans[c], _Exchange.to_owners, _Exchange.gathered)]
        came, stacks = _exchanged(legs, split.names, list(stacks))
        if back:
            for i, part in zip(chunks[c - 2], came.pop(0), strict=True):
                outs[i].append(part)
        back = []
        if wholes:
            owned = iterate(wholes)
            back = [_Leg(owned, plans[c - 1], _Exchange.to_parts, _Exchange.scattered)]
        wholes = came.pop() if came else []
    return list(map(jnp.concatenate, outs))


def _chunks(counts: Sequence[int], nbytes: int, devices: int) -> list[dict[int, slice]]:
    """Returns, for each chunk, the matrices of each stack that travel in it."""
    number = min(MOST_CHUNKS, max(1, nbytes // CHUNK_BYTES)) if devices == 2 else 1
    chunks: list[dict[int, slice]] = [{} for _ in range(number)]
    for i, count in enumerate(counts):
        # Chunks are whole rounds of the devices, so that only the last chunk is padded.
        rounds = -(-count // devices)
        ends = [rounds * c // number * devices for c in range(number)] + [count]
        for chunk, (begin, end) in zip(chunks, itertools.pairwise(ends), strict=True):
            if end > begin:
                chunk[i] = slice(begin, end)
    return [chunk for chunk in chunks if chunk]


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The exchange of a stack of parts of matrices [g, m, n], one dimension of which is split."""

    shape: tuple[int, ...]  # shape of the stack of parts
    dim: int
    split: Split

    @property
    def own(self) -> int:
        """Number of whole matrices that a device gets, padding included."""
        return -(-self.shape[0] // self.split.devices)

    def to_owners(self, parts: jax.Array) -> jax.Array:
        """Returns [devices, elements], the elements of these parts for each device."""
        padding = self.own * self.split.devices - self.shape[0]
        padded = jnp.pad(parts, ((0, padding), (0, 0), (0, 0)))
        return padded.reshape(self.split.devices, -1)

    def gathered(self, rows: jax.Array) -> jax.Array:
        """Returns whole matrices from the rows that came from each device."""
        parts = rows.reshape(self.split.devices, self.own, *self.shape[1:])
        axis = parts.ndim + self.dim
        whole = list(self.shape)
        whole[self.dim] *= self.split.devices
        return jnp.moveaxis(parts, 0, axis - 1).reshape(self.own, *whole[1:])

    def to_parts(self, wholes: jax.Array) -> jax.Array:
        """Returns [devices, elements], each device's parts of these matrices."""
        shape = [self.own, *self.shape[1:]]
        axis = len(shape) + self.dim
        parts = wholes.reshape(*shape[:axis], self.split.devices, *shape[axis:])
        return jnp.moveaxis(parts, axis, 0).reshape(self.split.devices, -1)

    def scattered(self, rows: jax.Array) -> jax.Array:
        """Returns this device's part of all matrices."""
        return rows.reshape(-1, *self.shape[1:])[: self.shape[0]]


class _Leg(NamedTuple):
    """One direction of the exchange of some stacks."""

    arrays: Sequence[jax.Array]
    plan: Sequence[_Exchange]
    pack: Callable[[_Exchange, jax.Array], jax.Array]
    unpack: Callable[[_Exchange, jax.Array], jax.Array]


def _exchanged(
    legs: Sequence[_Leg], names: Names, later: Sequence[jax.Array]
) -> tuple[list[list[jax.Array]], Sequence[jax.Array]]:
    """Returns the result of each leg, from one all-to-all of bits for all legs.

    Also returns `later`, the arrays of later exchanges, ordered after this one. Otherwise XLA would
    pack several chunks in one kernel, which waits for all of its inputs.
    """
    if not legs:
        return [], later
    rows = [leg.pack(own, x) for leg in legs for own, x in zip(leg.plan, leg.arrays, strict=True)]
    words = [lax.bitcast_convert_type(row, WORD).reshape(len(row), -1) for row in rows]
    came, later = _all_to_all(jnp.concatenate(words, axis=1), names, later)
    pieces = iter(_pieces(came, [x.shape[1] for x in words], axis=1))

    def one(own: _Exchange, x: jax.Array, unpack: Callable[..., jax.Array]) -> jax.Array:
        per_element = x.dtype.itemsize // WORD.itemsize
        words = next(pieces)
        if per_element > 1:
            words = words.reshape(len(words), -1, per_element)
        return unpack(own, lax.bitcast_convert_type(words, x.dtype))

    outs = [
        [one(own, x, leg.unpack) for own, x in zip(leg.plan, leg.arrays, strict=True)]
        for leg in legs
    ]
    return outs, later


def _all_to_all(
    rows: jax.Array, names: Names, later: Sequence[jax.Array]
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Sends row i of each device to device i, which gets rows in the order of the devices."""
    if len(rows) != 2:
        came = lax.all_to_all(rows, names, split_axis=0, concat_axis=0, tiled=True)
        return barrier((came, later))
    # Copy engines can send what a ppermute sends, and leave the multiprocessors to products.
    other = 1 - lax.axis_index(names)
    row = lax.dynamic_index_in_dim(rows, other)
    row, later = barrier((lax.ppermute(row, names, [(0, 1), (1, 0)]), later))
    return lax.dynamic_update_index_in_dim(rows, row, other, 0), later


def _pieces(x: jax.Array, sizes: Sequence[int], axis: int = 0) -> list[jax.Array]:
    ends = functools.reduce(lambda found, size: [*found, found[-1] + size], sizes, [0])
    return [lax.slice_in_dim(x, a, b, axis=axis) for a, b in zip(ends, ends[1:], strict=False)]


def _names(entry: Any) -> Names:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
