"""Keeps the operands and results of operations split over devices.

An operation declares its dimensions once, with a letter for each (`Dims`). The letters define:

- the types of results over explicit mesh axes (`typed`);
- the program of one device, which is the same primitive on slices of the operands, and sums over
  devices of results whose contracted dimension is split (`local`);
- how XLA splits a call (`lowering`);
- the traffic between devices (`gathers`, `transfers`).

Derivatives, vmap, scan and remat need no rules, because this module also splits the primitives that
they bind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_grouped_gemm._src.arrays import align_varying, cdiv
from jax_grouped_gemm._src.meshes import Axes, names_of
from jax_grouped_gemm._src.transfers import Transfer, type_of

BLOCK = 128  # elements that share a scale
BATCH = "b"
ROWS = "m"
GROUPS = "g"
"""The letter of groups of matrices. Only one matrix multiplies a row, so the terms of other groups
are zeros."""
FIRST = (BATCH, ROWS)
"""Letters that get a mesh axis before other letters. If rows and weights are split along the same
axis (FSDP), rows stay split and the weights are gathered."""

Letters = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Dims:
    """The dimensions of an operation, with a letter for each. Equal letters are one dimension.

    If a result lacks a letter that is neither `whole` nor `apart`, the operation sums over this
    dimension: devices with parts of it compute terms of the result. Elements along other dimensions
    are independent, unless the dimension is `whole`.

    Attributes:
      operands, results: the letters of each array, in order.
      whole: letters of dimensions that every device needs in full.
      apart: letters of dimensions that do not affect results that lack the letter. An example is
        the dimensions of one problem of a list, which do not affect results of other problems.
      blocks: maps letters that count blocks of `BLOCK` elements to the letters of the elements.
        Elements, and their blocks, are split only if every device gets whole blocks.
    """

    operands: tuple[Letters, ...]
    results: tuple[Letters, ...]
    whole: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    blocks: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, *operands: Sequence[str], to: str | Sequence[str], whole: Sequence[str] = ""
    ) -> Dims:
        """Returns dimensions whose letters are the characters of strings, or elements of lists."""
        results = (to,) if isinstance(to, str) else to
        return cls(tuple(map(tuple, operands)), tuple(map(tuple, results)), frozenset(whole))

    def with_batch(self, operands: Sequence[Any], ranks: Sequence[int]) -> Dims:
        """Returns dimensions with the native batch dimension of `operands` that exceed `ranks`."""
        batched = [x.ndim > rank for x, rank in zip(operands, ranks, strict=True)]
        if not any(batched):
            return self
        named = zip(self.operands, batched, strict=True)
        return Dims(
            tuple((BATCH, *letters) if is_batched else letters for letters, is_batched in named),
            tuple((BATCH, *letters) for letters in self.results),
            self.whole,
            self.apart,
            self.blocks,
        )

    def with_whole_sums(self) -> Dims:
        """Returns dimensions without sums over devices, except over groups, because a single device
        has all terms of a row that are not zero."""
        found = {letter for i in range(len(self.results)) for letter in self.summed(i)}
        return dataclasses.replace(self, whole=self.whole | (found - {GROUPS}))

    def sizes(self, operands: Sequence[Any], results: Sequence[Any]) -> dict[str, int]:
        """Returns the size of each dimension."""
        arrays = zip((*self.operands, *self.results), (*operands, *results), strict=True)
        return {
            letter: size
            for letters, x in arrays
            for letter, size in zip(letters, x.shape, strict=True)
        }

    def summed(self, result: int) -> Letters:
        """Returns the letters over which result number `result` is summed."""
        every = dict.fromkeys(letter for letters in self.operands for letter in letters)
        unsummed = {*self.whole, *self.apart, *map(self.elements, self.results[result])}
        return tuple(x for x in every if self.elements(x) not in unsummed)

    def elements(self, letter: str) -> str:
        """Returns the letter of elements for a letter that counts blocks; others are unchanged."""
        return self.blocks.get(letter, letter)

    def specs(self, axes: Mapping[str, Axes]) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """Returns the specs of operands and results, if `axes` has the mesh axes of each letter."""

        def spec(letters):
            return PartitionSpec(*(axes.get(letter) or None for letter in letters))

        return list(map(spec, self.operands)), list(map(spec, self.results))

    def sharding_rule(self, sizes: Mapping[str, int], devices: int) -> Any:
        """Returns the dimensions for XLA's propagation of shardings.

        A dimension of elements has two factors, blocks and elements of a block, if its blocks can
        be divided among `devices`. If not, such factors would give devices parts of blocks.
        """
        # Import this late, because few programs need it.
        from jax.experimental.custom_partitioning import (
            ArrayMapping,
            CompoundFactor,
            SdyShardingRule,
        )

        # XLA sums all results over a reduction factor. So a letter is a reduction factor only if
        # every result is summed over it.
        every_sum = [set(self.summed(i)) for i in range(len(self.results))]
        reduced = set.intersection(*every_sum) if every_sum else set()
        inside = {
            elements: (blocks, f"in_{blocks}")
            for blocks, elements in self.blocks.items()
            if sizes[blocks] % devices == 0 and sizes[elements] == sizes[blocks] * BLOCK
        }
        in_order = dict.fromkeys(
            factor
            for letters in (*self.operands, *self.results)
            for letter in letters
            for factor in inside.get(letter, (letter,))
        )
        whole = self.whole.union(name for _, name in inside.values())
        of_blocks: Any = {name: BLOCK for _, name in inside.values()}

        def mapping(letters: Letters) -> Any:
            of_each = (inside.get(letter, (letter,)) for letter in letters)
            return ArrayMapping(*(x[0] if len(x) == 1 else CompoundFactor(*x) for x in of_each))

        return SdyShardingRule(
            tuple(map(mapping, self.operands)),
            tuple(map(mapping, self.results)),
            reduction_factors=tuple(x for x in in_order if x in reduced),
            need_replication_factors=tuple(x for x in in_order if x in whole),
            **of_blocks,
        )


def leading(operands: Sequence[Any], results: Sequence[Any], **params: Any) -> Dims:
    """Returns dimensions. Only the first may be split, if all arrays have equal sizes along it."""
    dims = whole(operands, results)
    if len({x.shape[0] for x in (*operands, *results)}) > 1:
        return dims
    first = {letters[0] for letters in (*dims.operands, *dims.results)}

    def named(every):
        return tuple(("g", *letters[1:]) for letters in every)

    return Dims(named(dims.operands), named(dims.results), dims.whole - first)


def whole(operands: Sequence[Any], results: Sequence[Any]) -> Dims:
    """Returns dimensions that may not be split."""
    letters = (f"w{i}" for i in range(sum(x.ndim for x in (*operands, *results))))
    named = [tuple(next(letters) for _ in range(x.ndim)) for x in (*operands, *results)]
    count = len(operands)
    return Dims(
        tuple(named[:count]),
        tuple(named[count:]),
        frozenset(letter for x in named for letter in x),
    )


def own_letters(number: int, operand: Any) -> list[str]:
    """Returns letters that no other operand has, one for each dimension of operand `number`."""
    return [f"of{number}_{axis}" for axis in range(operand.ndim)]


@dataclasses.dataclass(frozen=True)
class Split:
    """How one call is split, for the program of a device.

    Attributes:
      axes: the mesh axes along which each letter is split.
      devices: the number of devices along the axes of each letter.
      sizes: the size of each dimension on all devices together.
    """

    axes: Mapping[str, Axes]
    devices: Mapping[str, int]
    sizes: Mapping[str, int]

    @classmethod
    def of(
        cls,
        dims: Dims,
        specs: Sequence[Sequence[Any]],
        sizes: Mapping[str, int],
        mesh_shape: Mapping[str, int],
    ) -> Split:
        """Returns the split that `specs` of operands and optionally of results ask for.

        An axis splits one letter, or several letters that are `apart`. A letter is not split if it
        is `whole`, if a device would get a part of a block, or if it is summed and its size is not
        a multiple of the number of devices, because padding would be summed too.
        """
        wanted: dict[str, Axes] = {}
        for letters, spec in zip((*dims.operands, *dims.results), specs, strict=False):
            for letter, entry in zip(letters, spec, strict=False):
                of_elements = dims.elements(letter)
                if entry and of_elements not in dims.whole:
                    wanted.setdefault(of_elements, names_of(entry))
        summed = {letter for i in range(len(dims.results)) for letter in dims.summed(i)}
        order = sorted(wanted, key=lambda letter: FIRST.index(letter) if letter in FIRST else 2)
        axes: dict[str, Axes] = {}
        devices: dict[str, int] = {}
        taken: set[str] = set()
        for letter in order:
            free = tuple(axis for axis in wanted[letter] if axis not in taken)
            if letter in dims.apart:
                free = wanted[letter]
            count = math.prod(mesh_shape[axis] for axis in free)
            if count == 1 or sizes[letter] < count:
                continue
            if letter in summed and sizes[letter] % count:
                continue
            blocks = [x for x, elements in dims.blocks.items() if elements == letter]
            if blocks and sizes[letter] % (count * BLOCK):
                continue
            for split in (letter, *blocks):
                axes[split], devices[split] = free, count
            taken.update(free)
        return cls(axes, devices, sizes)

    @classmethod
    def of_rows(cls, axes: Axes, rows: int) -> Split:
        """Returns the split that splits only rows, along manual mesh axes."""
        return cls({ROWS: axes}, {ROWS: lax.axis_size(axes)}, {ROWS: rows})

    def splits(self, letter: str) -> bool:
        """Returns whether a dimension is split."""
        return letter in self.axes

    def part(self, letter: str) -> int:
        """Returns the size of a device's part of a dimension; the last part may be padded."""
        return cdiv(self.sizes[letter], self.devices.get(letter, 1))

    def first(self, letter: str) -> jax.Array | int:
        """Returns the start of this device's part of a dimension."""
        if letter not in self.axes:
            return 0
        return lax.axis_index(self.axes[letter]) * self.part(letter)


def local_shapes(every: Sequence[Letters], split: Split) -> list[tuple[int, ...]]:
    """Returns the shapes of a device's slices of arrays, given their letters."""
    return [tuple(map(split.part, letters)) for letters in every]


def gathers(
    op: Any,
    dims: Dims,
    split: Split,
    operands: Sequence[Any],
    specs: Sequence[Sequence[Any]],
    mesh_shape: Mapping[str, int],
) -> Iterator[Transfer]:
    """Yields the transfers that reshard abstract `operands` from `specs` to `split`."""
    wanted, _ = dims.specs(split.axes)
    shapes = local_shapes(dims.operands, split)
    whole = dims.whole.union(*dims.blocks.items())
    for number, (x, letters, spec) in enumerate(zip(operands, dims.operands, specs, strict=True)):
        had = {
            name: letter
            for letter, entry in zip(letters, spec, strict=False)
            for name in names_of(entry)
        }
        kept = {name for entry in wanted[number] for name in names_of(entry)}
        lost = [name for name in had if name not in kept]
        devices = math.prod(mesh_shape[name] for name in lost)
        if devices > 1:
            part = jax.ShapeDtypeStruct(shapes[number], x.dtype)
            yield Transfer(
                "gathers",
                op.name,
                f"operand {number}, {type_of(x)}",
                part.size * part.dtype.itemsize,
                devices,
                op.instead if whole.intersection(had[name] for name in lost) else "",
            )


def local(op: Any, dims: Dims, split: Split, params: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the program of one device, from its slices of operands to its slices of results."""

    def function(*operands):
        operands, local_params = op.localize(operands, dict(params), split)
        results = op.primitive.bind(*align_varying(*operands), **local_params)
        results = results if op.multiple_results else [results]
        sums = [
            tuple(axis for letter in dims.summed(i) for axis in split.axes.get(letter, ()))
            for i in range(len(results))
        ]
        results = [lax.psum(x, axes) if axes else x for x, axes in zip(results, sums, strict=True)]
        return results if op.multiple_results else results[0]

    return function


def mesh_of(operands: Sequence[Any]) -> Any:
    """Returns the mesh of abstract operands, or an empty mesh if no operand has a mesh."""
    meshes = (x.sharding.mesh for x in operands)
    return next((mesh for mesh in meshes if not mesh.empty), operands[0].sharding.mesh)


def is_split_explicitly(operands: Sequence[Any]) -> bool:
    """Returns whether the type of an abstract operand says that it is split."""
    return any(axes is not None for x in operands for axes in x.sharding.spec)


def typed(op: Any, operands: Sequence[Any], results: Sequence[Any], params) -> list[Any]:
    """Returns abstract `results` with their shardings over explicit mesh axes.

    Raises:
      NotImplementedError: an operand is split along a dimension that every device needs in full.
    """
    dims = op.dims_of(operands, results, params)
    mesh = mesh_of(operands)
    split = Split.of(
        dims, [x.sharding.spec for x in operands], dims.sizes(operands, results), mesh.shape
    )
    # A dimension that is split along the axes of the rows may be gathered, as weights are in FSDP.
    of_rows = {axis for letter in FIRST for axis in split.axes.get(letter, ())}
    for x, letters in zip(operands, dims.operands, strict=True):
        for axis, (entry, letter) in enumerate(zip(x.sharding.spec, letters, strict=True)):
            is_lost = letter in dims.whole or (
                letter in dims.blocks.values() and not split.splits(letter)
            )
            if is_lost and not of_rows.issuperset(names_of(entry)):
                raise NotImplementedError(
                    f"{op.name} needs dimension {axis} of an operand of type {x} in full on every "
                    f"device: gather it with jax.sharding.reshard, or use {op.instead}"
                )
    _, specs = dims.specs(split.axes)
    return [
        x.update(sharding=NamedSharding(mesh, spec)) for x, spec in zip(results, specs, strict=True)
    ]


def groups_split_like(x: jax.Array, like: Any) -> jax.Array:
    """Returns `x`, whose leading axis is split over explicit mesh axes like that of `like`."""
    sharding = jax.typeof(jax.tree.leaves(like)[0]).sharding
    spec = PartitionSpec(sharding.spec[0], *(None,) * (x.ndim - 1))
    aval = jax.typeof(x)
    return as_type(x, aval.update(sharding=NamedSharding(sharding.mesh, spec)))


def as_type(x: Any, aval: Any) -> Any:
    """Returns the tangent or cotangent `x`, split over explicit mesh axes like its primal value."""
    if not isinstance(x, jax.Array) or not (is_split_explicitly([aval, jax.typeof(x)])):
        return x
    if jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)
