"""Finds transfers between devices, without running anything.

Over explicit axes, types say how operands are split. Over auto axes, XLA decides this when it
compiles. So `explain` compiles the program inside `recording`, where the operations of this package
compute nothing.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax import lax

from jax_grouped_gemm._src.meshes import names_of


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A transfer of one operation between devices; `str()` describes it.

    Attributes:
      kind: "gathers": each device has a part and gets the whole. "sums": each device has a term and
        gets the sum or a part of it. "sends": devices exchange parts.
      op: what moves the array: the name of an operation or of a layer's function, or
        "jax.shard_map" for a collective inside one.
      what: a description of the array.
      bytes: the size of the array on a device: after the transfer for "gathers", and before it for
        the other kinds.
      devices: the number of devices that take part.
      instead: a function or option that avoids the transfer; empty if it cannot be avoided.
    """

    kind: Literal["gathers", "sums", "sends"]
    op: str
    what: str
    bytes: int
    devices: int
    instead: str = ""

    def __str__(self) -> str:
        to = "on each device" if self.kind == "gathers" else f"over {self.devices} devices"
        instead = f"; not so with {self.instead}" if self.instead else ""
        return f"{self.op} {self.kind} {megabytes(self.bytes)} {to}: {self.what}{instead}"


def megabytes(size: int) -> str:
    """Returns `size` bytes in megabytes, with the unit."""
    return f"{size / 1e6:.3g} MB"


def type_of(x: Any) -> str:
    """Returns dtype and shape of an array as text, such as "float32[8, 16]"."""
    return f"{x.dtype}{list(x.shape)}"


@dataclasses.dataclass(frozen=True)
class Call:
    """How a call is split: its `partition.Split`, and the specs that its operands had before."""

    split: Any
    specs: Sequence[Sequence[Any]]
    mesh_shape: Mapping[str, int]


class Recorder:
    """Records how XLA splits a program over auto axes while it compiles the program.

    Attributes:
      calls: calls of operations, by `key_of`, in the order in which XLA compiles them.
      transfers: transfers of arrays that layers need in full on every device.
    """

    def __init__(self):
        self.calls: dict[Hashable, list[Call]] = collections.defaultdict(list)
        self.transfers: list[Transfer] = []

    def watch(self, function: str, x: jax.Array) -> None:
        """Records the transfer that gives every device all of `x`, if XLA splits it."""
        what, size = type_of(x), x.size * x.dtype.itemsize

        def record(sharding):
            axes = [name for entry in getattr(sharding, "spec", ()) for name in names_of(entry)]
            devices = math.prod(sharding.mesh.shape[name] for name in axes)
            if devices > 1:
                self.transfers.append(Transfer("gathers", function, what, size, devices))

        jax.debug.inspect_array_sharding(lax.stop_gradient(x), callback=record)


# The context is part of the key of JAX's caches, so that earlier traces are not reused.
_context = jax.make_user_context(None)


def current_recorder() -> Recorder | None:
    """Returns the recorder of the innermost `recording`."""
    return _context.value


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Returns a context in which programs are compiled only to find transfers."""
    recorder = Recorder()
    with _context(recorder):
        yield recorder


def key_of(op: Any, avals: Sequence[Any], params: Mapping[str, Any]) -> Hashable:
    """Returns the key of a call, which is equal in the traced and in the compiled program."""
    shapes = tuple((x.shape, x.dtype) for x in avals)
    return op.name, shapes, tuple(sorted(params.items(), key=lambda item: item[0]))


_COLLECTIVES: dict[str, Literal["gathers", "sums", "sends"]] = {
    "all_gather": "gathers",
    "all_gather_invariant": "gathers",
    "psum": "sums",
    "psum_invariant": "sums",
    "reduce_scatter": "sums",
    "all_to_all": "sends",
    "ppermute": "sends",
    "ragged_all_to_all": "sends",
}


def of_equation(eqn: Any, op: str, axis_sizes: Mapping[str, int]) -> Iterator[Transfer]:
    """Yields an equation's transfers over manual or explicit axes, except those of scalars."""
    name = eqn.primitive.name
    if name == "reshard":
        yield from _of_reshard(eqn)
    if name not in _COLLECTIVES:
        return
    kind = _COLLECTIVES[name]
    params = eqn.params
    axes = params["axes"] if "axes" in params else params["axis_name"]
    devices = math.prod(axis_sizes.get(axis, 1) for axis in names_of(axes))
    arrays = eqn.outvars if kind == "gathers" else eqn.invars
    arrays = arrays[:1] if name == "ragged_all_to_all" else arrays
    for x in (var.aval for var in arrays):
        if x.ndim and devices > 1:
            yield Transfer(kind, op, type_of(x), math.prod(x.shape) * x.dtype.itemsize, devices)


def _of_reshard(eqn: Any) -> Iterator[Transfer]:
    before, after = (v.aval for v in (*eqn.invars, *eqn.outvars))
    had, has = (
        [name for entry in x.sharding.spec for name in names_of(entry)] for x in (before, after)
    )
    mesh_shape = after.sharding.mesh.shape
    devices = math.prod(mesh_shape[name] for name in had if name not in has)
    if devices > 1:
        parts = math.prod(mesh_shape[name] for name in has)
        size = math.prod(after.shape) * after.dtype.itemsize // parts
        yield Transfer("gathers", "jax.sharding.reshard", type_of(after), size, devices)
