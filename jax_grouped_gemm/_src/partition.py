"""How an operation keeps split over devices what is split.

An operation declares its dimensions once, as a letter each, see `Dims`. What follows:

- the types of results over explicit mesh axes, see `typed`;
- the program of one device: the same primitive on slices of the operands, and sums over devices of
  results whose contracted dimension is split, see `local`;
- how XLA splits a call: over explicit axes by `jax.shard_map` of that program, since types say what
  is split; over auto axes, where that is known once XLA has propagated shardings, by
  `custom_partitioning` of the same program, see `lower`.

Derivatives, vmap, scan and remat need nothing: the primitives that they bind are split likewise.

This module relies on internals of JAX: the devices are in the lowering context of primitives that
are listed in `jax._src.dispatch`. Without that entry, calls lower as for one device.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_grouped_gemm._src.arrays import align_varying, cdiv
from jax_grouped_gemm._src.meshes import Axes, axes_of_kind, names_of, placed

logger = logging.getLogger(__name__)

BATCH = "b"
ROWS = "m"
FIRST = (BATCH, ROWS)
"""Letters that get a mesh axis before others do: with rows and weights split along one axis (FSDP),
the weights are gathered."""

Letters = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Dims:
    """The dimensions of an operation, a letter each; equal letters are one dimension.

    A letter that a result lacks and that is neither `whole` nor `apart` is summed: devices that
    have parts of it compute terms of the result. All else that is not `whole` is independent.

    Attributes:
      operands, results: the letters of each, in order.
      whole: letters of dimensions that every device needs in full.
      apart: letters that results without them do not depend on, as those of another problem of a
        list.
    """

    operands: tuple[Letters, ...]
    results: tuple[Letters, ...]
    whole: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()

    @classmethod
    def of(cls, *operands: str, to: str | Sequence[str], whole: str = "") -> Dims:
        """Dimensions that are one character each."""
        results = (to,) if isinstance(to, str) else to
        return cls(tuple(map(tuple, operands)), tuple(map(tuple, results)), frozenset(whole))

    def with_batch(self, operands: Sequence[Any], ranks: Sequence[int]) -> Dims:
        """With the native batch dimension that some of the `operands` have in front."""
        batched = [x.ndim > rank for x, rank in zip(operands, ranks, strict=True)]
        if not any(batched):
            return self
        named = zip(self.operands, batched, strict=True)
        return Dims(
            tuple((BATCH, *letters) if is_batched else letters for letters, is_batched in named),
            tuple((BATCH, *letters) for letters in self.results),
            self.whole,
            self.apart,
        )

    def sizes(self, operands: Sequence[Any], results: Sequence[Any]) -> dict[str, int]:
        """How long each dimension is."""
        arrays = zip((*self.operands, *self.results), (*operands, *results), strict=True)
        return {
            letter: size
            for letters, x in arrays
            for letter, size in zip(letters, x.shape, strict=True)
        }

    def summed(self, result: int) -> Letters:
        """Letters over whose parts result number `result` is a sum."""
        every = dict.fromkeys(letter for letters in self.operands for letter in letters)
        unsummed = {*self.whole, *self.apart, *self.results[result]}
        return tuple(x for x in every if x not in unsummed)

    def specs(self, axes: Mapping[str, Axes]) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
        """How operands and results are split, if each letter is along those mesh axes."""

        def spec(letters):
            return PartitionSpec(*(axes.get(letter) or None for letter in letters))

        return list(map(spec, self.operands)), list(map(spec, self.results))

    def sharding_rule(self) -> Any:
        """The same for XLA's propagation of shardings."""
        # Not loaded with the package, which few programs need it for.
        from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule

        in_order = dict.fromkeys(
            letter for letters in (*self.operands, *self.results) for letter in letters
        )
        # A letter that only some results lack is no reduction to XLA, which would sum all.
        every_sum = [set(self.summed(i)) for i in range(len(self.results))]
        reduced = set.intersection(*every_sum) if every_sum else set()
        return SdyShardingRule(
            tuple(ArrayMapping(*letters) for letters in self.operands),
            tuple(ArrayMapping(*letters) for letters in self.results),
            reduction_factors=tuple(x for x in in_order if x in reduced),
            need_replication_factors=tuple(x for x in in_order if x in self.whole),
        )


def leading(operands: Sequence[Any], results: Sequence[Any], **params: Any) -> Dims:
    """Dimensions of arrays of independent elements, whose others are whole; if all have as many."""
    dims = whole(operands, results)
    if len({x.shape[0] for x in (*operands, *results)}) > 1:
        return dims
    first = {letters[0] for letters in (*dims.operands, *dims.results)}

    def named(every):
        return tuple(("g", *letters[1:]) for letters in every)

    return Dims(named(dims.operands), named(dims.results), dims.whole - first)


def whole(operands: Sequence[Any], results: Sequence[Any]) -> Dims:
    """Dimensions none of which is split, but for a native batch that is added to them."""
    letters = (f"w{i}" for i in range(sum(x.ndim for x in (*operands, *results))))
    named = [tuple(next(letters) for _ in range(x.ndim)) for x in (*operands, *results)]
    count = len(operands)
    return Dims(
        tuple(named[:count]),
        tuple(named[count:]),
        frozenset(letter for x in named for letter in x),
    )


@dataclasses.dataclass(frozen=True)
class Split:
    """How one call is split: what the program of a device has to know.

    Attributes:
      axes: the mesh axes along which each letter is split.
      devices: over how many devices that is.
      sizes: of the whole dimensions.
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
        """Gives mesh axes to letters, as `specs` of operands, and perhaps of results, have them.

        An axis belongs to one letter, or to several that are `apart`. A letter stays whole that
        has to, or that is summed and does not divide: what pads it would be summed as well.
        """
        wanted: dict[str, Axes] = {}
        for letters, spec in zip((*dims.operands, *dims.results), specs, strict=False):
            for letter, entry in zip(letters, spec, strict=False):
                if entry and letter not in dims.whole:
                    wanted.setdefault(letter, names_of(entry))
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
            axes[letter], devices[letter] = free, count
            taken.update(free)
        return cls(axes, devices, sizes)

    @classmethod
    def of_rows(cls, axes: Axes, rows: int) -> Split:
        """Of the rows alone, along manual mesh axes."""
        return cls({ROWS: axes}, {ROWS: lax.axis_size(axes)}, {ROWS: rows})

    def splits(self, letter: str) -> bool:
        """Whether that dimension is split."""
        return letter in self.axes

    def part(self, letter: str) -> int:
        """How much of a dimension a device has; the last one may have less that counts."""
        return cdiv(self.sizes[letter], self.devices.get(letter, 1))

    def first(self, letter: str) -> jax.Array | int:
        """Where the device's part of a dimension begins."""
        if letter not in self.axes:
            return 0
        return lax.axis_index(self.axes[letter]) * self.part(letter)


def local(op: Any, dims: Dims, split: Split, params: Mapping[str, Any]) -> Callable[..., Any]:
    """The program of one device: slices of operands to slices of the results."""

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
    """The mesh of abstract operands; an empty one if none has any."""
    meshes = (x.sharding.mesh for x in operands)
    return next((mesh for mesh in meshes if not mesh.empty), operands[0].sharding.mesh)


def is_split_explicitly(operands: Sequence[Any]) -> bool:
    """Whether a type says that an abstract operand is split."""
    return any(axes is not None for x in operands for axes in x.sharding.spec)


def typed(op: Any, operands: Sequence[Any], results: Sequence[Any], params) -> list[Any]:
    """Abstract `results` with their types over explicit mesh axes.

    Raises:
      NotImplementedError: an operand is split along a dimension that every device needs in full.
    """
    dims = op.dims_of(operands, results, params)
    mesh = mesh_of(operands)
    split = Split.of(
        dims, [x.sharding.spec for x in operands], dims.sizes(operands, results), mesh.shape
    )
    # What is split along the axis of the rows is gathered, as weights are that lie there (FSDP).
    of_rows = {axis for letter in FIRST for axis in split.axes.get(letter, ())}
    for x, letters in zip(operands, dims.operands, strict=True):
        for axis, (entry, letter) in enumerate(zip(x.sharding.spec, letters, strict=True)):
            if letter in dims.whole and not of_rows.issuperset(names_of(entry)):
                raise NotImplementedError(
                    f"{op.name} needs dimension {axis} of an operand of type {x} in full on every "
                    f"device: take it there with jax.sharding.reshard, or say what each device "
                    "does with jax.shard_map"
                )
    _, specs = dims.specs(split.axes)
    return [
        x.update(sharding=NamedSharding(mesh, spec)) for x, spec in zip(results, specs, strict=True)
    ]


def as_type(x: Any, aval: Any) -> Any:
    """A tangent or cotangent split over explicit mesh axes as the value is that it belongs to."""
    if not isinstance(x, jax.Array) or not (is_split_explicitly([aval, jax.typeof(x)])):
        return x
    if jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def lower(ctx: Any, op: Any, inner: Callable[..., Any], operands, params) -> Any:
    """Lowers a call so that it stays split, by `inner` where nothing is or can be."""
    mesh = mesh_of(ctx.avals_in)
    types = getattr(mesh, "axis_types", ())
    if AxisType.Manual in types:
        return inner(ctx, *operands, **params)
    if is_split_explicitly(ctx.avals_in):
        function = _over_explicit_axes(op, ctx.avals_in, ctx.avals_out, params, mesh)
    elif _has_devices_to_split_over(ctx):
        function = _over_auto_axes(op, ctx.avals_in, ctx.avals_out, params)
    else:
        return inner(ctx, *operands, **params)
    return mlir.lower_fun(function, multiple_results=op.multiple_results)(ctx, *operands)


def _over_explicit_axes(op, avals, results, params, mesh) -> Callable[..., Any]:
    dims = op.dims_of(avals, results, params)
    split = Split.of(dims, [x.sharding.spec for x in avals], dims.sizes(avals, results), mesh.shape)
    in_specs, out_specs = dims.specs(split.axes)

    def function(*operands):
        return jax.shard_map(
            local(op, dims, split, params),
            mesh=mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs if op.multiple_results else out_specs[0],
            axis_names=set(axes_of_kind(mesh, AxisType.Explicit)),
            # A result that is whole is the same everywhere, though it stands beside split ones.
            check_vma=False,
        )(*(placed(x, mesh, spec) for x, spec in zip(operands, in_specs, strict=True)))

    return function


def _has_devices_to_split_over(ctx: Any) -> bool:
    """Whether XLA is going to partition the program, and can call back for it.

    Programs to export cannot hold a Python callback, and those for several platforms at once have
    one module for all.
    """
    module = ctx.module_context
    context = module.axis_context
    devices = getattr(context, "device_assignment", None)
    parameters = getattr(module, "lowering_parameters", None)
    return (
        devices is not None
        and len(devices) > 1
        and not getattr(parameters, "for_export", True)
        and len(ctx.platforms or module.platforms) == 1
        and bool(getattr(jax.config, "jax_use_shardy_partitioner", True))
    )


def _over_auto_axes(op, avals, results, params) -> Callable[..., Any]:
    from jax.experimental.custom_partitioning import custom_partitioning

    dims = op.dims_of(avals, results, params)
    sizes = dims.sizes(avals, results)

    def partition(mesh, operands, result):
        leaves = list(result) if op.multiple_results else [result]
        shardings = [x.sharding for x in (*operands, *leaves)]
        if not all(isinstance(x, NamedSharding) for x in shardings):
            # No mesh is known: all operands are on every device.
            (devices,) = {x._device_assignment for x in shardings if x is not None}
            whole = type(shardings[0]).get_replicated(devices)
            given, returned = [whole] * len(operands), [whole] * len(leaves)
            split = Split({}, {}, sizes)
        else:
            split = Split.of(dims, [x.spec for x in shardings], sizes, mesh.shape)
            _log_gathers(op, dims, split, operands, mesh)
            given, returned = (
                [NamedSharding(mesh, spec) for spec in specs] for specs in dims.specs(split.axes)
            )
        out = returned if op.multiple_results else returned[0]
        return mesh, _without_types(local(op, dims, split, params)), out, tuple(given)

    whole = custom_partitioning(functools.partial(op.primitive.bind, **params))
    whole.def_partition(partition=partition, sharding_rule=lambda *_: dims.sharding_rule())
    return whole


_NO_MESH = AbstractMesh((), ())
_PROGRAM = type(lax.add_p)("program_of_a_device")


def _without_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, traced and lowered as if there were no mesh.

    JAX 0.12 traces the program of a device under the mesh of `jax.set_mesh`. Types over its
    explicit axes would become constraints in a module that nobody partitions.
    """

    def traced(*operands):
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
            jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*types)
        results = _PROGRAM.bind(*operands, jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return traced


def _lower_program(ctx, *operands, jaxpr):
    ctx = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        program = functools.partial(jax.core.eval_jaxpr, jaxpr.jaxpr, jaxpr.consts)
        return mlir.lower_fun(program, multiple_results=True)(ctx, *operands)


_PROGRAM.multiple_results = True
_PROGRAM.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
mlir.register_lowering(_PROGRAM, _lower_program)


def _log_gathers(op, dims, split, operands, mesh) -> None:
    """Says which operands travel, at level DEBUG."""
    specs, _ = dims.specs(split.axes)
    for number, (x, spec) in enumerate(zip(operands, specs, strict=True)):
        for axis, (had, has) in enumerate(zip(x.sharding.spec, spec, strict=False)):
            if lost := [name for name in names_of(had) if name not in names_of(has)]:
                size = math.prod(x.shape) * x.dtype.itemsize
                logger.debug(
                    "%s gathers dimension %d of operand %d, %s%s, over %s: %d bytes in full",
                    *(op.name, axis, number, x.dtype, list(x.shape), ", ".join(lost), size),
                )


def require_devices(primitive: Any) -> None:
    """Has JAX tell the lowering of `primitive` for which devices it is."""
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering as primitives
    except ImportError:  # then `lower` sees no devices, and splits nothing over auto axes
        return
    primitives.add(primitive)
