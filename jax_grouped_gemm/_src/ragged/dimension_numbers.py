"""Brings the operands of a general ragged dot into the layouts that the primitives take.

Every dimension gets a name. The dimensions that the primitives know (m, k, n and the group
dimension g) keep their order if a static flag can express it. `jax.vmap` maps over all other
dimensions. Its rules merge them into a known dimension or make them the native batch dimension.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class Mode(enum.Enum):
    """Kind of the ragged dimension of lhs."""

    NONCONTRACTING = enum.auto()
    CONTRACTING = enum.auto()
    BATCH = enum.auto()


@dataclasses.dataclass(frozen=True)
class DimensionNames:
    """Names of all dimensions; the ragged dimension is "m", the group dimension "g"."""

    mode: Mode
    lhs: tuple[str, ...]
    rhs: tuple[str, ...]
    batch: tuple[str, ...]
    contracting: tuple[str, ...]

    @classmethod
    def of(
        cls, numbers: lax.RaggedDotDimensionNumbers, lhs_rank: int, rhs_rank: int
    ) -> DimensionNames:
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        lhs = {dim: f"lhs{dim}" for dim in range(lhs_rank)}
        rhs = {dim: f"rhs{dim}" for dim in range(rhs_rank)}
        lhs |= {dim: f"batch{i}" for i, dim in enumerate(lhs_batch)}
        lhs |= {dim: f"contracting{i}" for i, dim in enumerate(lhs_contracting)}
        lhs[ragged] = "m"
        rhs |= {dim: lhs[partner] for dim, partner in zip(rhs_batch, lhs_batch, strict=True)}
        rhs |= {
            dim: lhs[partner] for dim, partner in zip(rhs_contracting, lhs_contracting, strict=True)
        }
        rhs |= {dim: "g" for dim in numbers.rhs_group_dimensions}
        if ragged in lhs_contracting:
            mode = Mode.CONTRACTING
        else:
            mode = Mode.BATCH if ragged in lhs_batch else Mode.NONCONTRACTING
        return cls(
            mode=mode,
            lhs=tuple(lhs[dim] for dim in range(lhs_rank)),
            rhs=tuple(rhs[dim] for dim in range(rhs_rank)),
            batch=tuple(lhs[dim] for dim in lhs_batch),
            contracting=tuple(lhs[dim] for dim in lhs_contracting),
        )

    def kept(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the `names` of dimensions that the result gets from this operand alone."""
        shared = {*self.batch, *self.contracting, "g"}
        return tuple(name for name in names if name not in shared)

    def group_sizes(self, rank: int) -> tuple[str, ...]:
        """Returns the names of the dimensions of group sizes of the given rank."""
        if rank == 1:
            return ("g",)
        outer = self.kept(self.lhs)
        outer = outer[: outer.index("m")] if "m" in outer else ()
        return (*self.batch, *outer, "g")


@dataclasses.dataclass(frozen=True)
class _Named:
    """An array and the names of its dimensions."""

    array: jax.Array
    names: tuple[str, ...]

    def transpose(self, names: Sequence[str]) -> _Named:
        order = [self.names.index(name) for name in names]
        return _Named(jnp.transpose(self.array, order), tuple(names))

    def merge(self, merged: Sequence[str], name: str) -> _Named:
        """Merges dimensions into one, at the place of the first. Without `merged`, appends a 1."""
        first = min((self.names.index(name) for name in merged), default=len(self.names))
        before, after = self.names[:first], [n for n in self.names[first:] if n not in merged]
        x = self.transpose((*before, *merged, *after)).array
        end = first + len(merged)
        size = math.prod(x.shape[first:end])
        x = x.reshape(*x.shape[:first], size, *x.shape[end:])
        return _Named(x, (*before, name, *after))

    def order(self, *names: str) -> tuple[str, ...]:
        """Returns the given names in the order of this array's dimensions."""
        return tuple(name for name in self.names if name in names)


def check_k(lhs: Any, rhs: Any, described: str, k_axis: int = 1) -> None:
    """Raises a `TypeError` unless `ragged_dot` can contract k, which is axis `k_axis` of rhs.

    `described` is rhs for the message, because rhs may be quantised.
    """
    if lhs.ndim < 2 or rhs.ndim < 3 or lhs.shape[1] != rhs.shape[k_axis]:
        raise TypeError(
            f"lhs must be [m, k] and rhs {'[g, n, k]' if k_axis == 2 else '[g, k, n]'} with "
            f"transpose_rhs={k_axis == 2}, got lhs {jax.typeof(lhs)} and rhs {described}"
        )


def noncontracting(
    primitive: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    names: DimensionNames,
    **params: Any,
) -> jax.Array:
    """Binds the non-contracting `primitive` to operands of any rank.

    Dimensions of size 1 may remain in the result.
    """
    rhs_kept = names.kept(names.rhs)
    rows = _Named(lhs, names.lhs).merge(names.contracting, "k")
    matrices = _Named(rhs, names.rhs).merge(names.contracting, "k").merge(rhs_kept[-1:], "n")

    def of_core(lhs_core, rhs_core, sizes, offset):
        return primitive(
            lhs_core,
            jnp.moveaxis(rhs_core, matrices.order("g", "k", "n").index("g"), 0),
            sizes,
            offset,
            transpose_lhs=rows.order("m", "k") == ("k", "m"),
            transpose_rhs=matrices.order("k", "n") == ("n", "k"),
            **params,
        )

    sizes = _Named(group_sizes, names.group_sizes(group_sizes.ndim))
    out = (*names.batch, *names.kept(names.lhs), *rhs_kept[:-1], "n")
    return _map_unknown(of_core, rows, matrices, sizes, group_offset, core=("m", "n"), out=out)


def contracting(
    primitive: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    names: DimensionNames,
    **params: Any,
) -> jax.Array:
    """Binds the contracting `primitive` to operands of any rank.

    Dimensions of size 1 may remain in the result.
    """
    if names.contracting != ("m",):
        raise NotImplementedError(
            "a ragged contracting dimension must be the only contracting dimension, got "
            f"{len(names.contracting)} of them; merge them, or map over the others and sum."
        )
    lhs_kept, rhs_kept = names.kept(names.lhs), names.kept(names.rhs)
    left = _Named(lhs, names.lhs).merge(lhs_kept[-1:], "k")
    right = _Named(rhs, names.rhs).merge(rhs_kept[-1:], "n")

    def of_core(lhs_core, rhs_core, sizes, offset):
        return primitive(
            lhs_core,
            rhs_core,
            sizes,
            offset,
            num_groups=group_sizes.shape[-1],
            transpose_lhs=left.order("m", "k") == ("k", "m"),
            transpose_rhs=right.order("m", "n") == ("n", "m"),
            **params,
        )

    sizes = _Named(group_sizes, names.group_sizes(group_sizes.ndim))
    out = ("g", *names.batch, *lhs_kept[:-1], "k", *rhs_kept[:-1], "n")
    return _map_unknown(of_core, left, right, sizes, group_offset, core=("g", "k", "n"), out=out)


def _map_unknown(
    product: Callable[..., jax.Array],
    lhs: _Named,
    rhs: _Named,
    sizes: _Named,
    group_offset: jax.Array,
    *,
    core: tuple[str, ...],
    out: tuple[str, ...],
) -> jax.Array:
    """Maps `product`, which returns the dimensions `core`, over all other dimensions of `out`."""
    mapped = tuple(name for name in out if name not in core)

    def nest(outer: tuple[str, ...], pending: tuple[str, ...]) -> Callable[..., jax.Array]:
        if not pending:
            return product
        name, *rest = pending
        axes = []
        for operand in (lhs, rhs, sizes):
            left = [n for n in operand.names if n not in outer]
            axes.append(left.index(name) if name in left else None)
        return jax.vmap(nest((*outer, name), tuple(rest)), in_axes=(*axes, None))

    result = nest((), mapped)(lhs.array, rhs.array, sizes.array, group_offset)
    return _Named(result, (*mapped, *core)).transpose(out).array
