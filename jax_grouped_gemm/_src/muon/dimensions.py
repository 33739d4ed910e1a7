"""The axes of a parameter that form a matrix: Optax's dimension numbers of Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


class MuonDimensionNumbers(NamedTuple):
    """The axes of a leaf that form a matrix, as in `optax.contrib`.

    The other axes count matrices. By default a matrix is the last two axes; in Optax it is the
    first two.
    """

    reduction_axis: int | Sequence[int] = -2
    output_axis: int | Sequence[int] = -1


def is_numbers(x: Any) -> bool:
    """Whether `x` stands for all leaves of a subtree: dimension numbers, Optax's too, or None."""
    return x is None or (hasattr(x, "reduction_axis") and hasattr(x, "output_axis"))


class Axes(NamedTuple):
    """The axes of one leaf, by kind."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]

    @classmethod
    def of(cls, ndim: int, numbers: Any) -> Axes:
        """Returns the axes of a leaf with `ndim` dimensions.

        Raises:
          ValueError: `numbers` name an axis twice, or an axis that the leaf lacks.
        """
        named = []
        for axes in (numbers.reduction_axis, numbers.output_axis):
            axes = (axes,) if isinstance(axes, int) else tuple(axes)
            if not all(-ndim <= axis < ndim for axis in axes):
                raise ValueError(f"{numbers} name axes that a leaf of {ndim} dimensions lacks")
            named.append(tuple(axis % ndim for axis in axes))
        reduction, output = named
        if len({*reduction, *output}) < len(reduction) + len(output):
            raise ValueError(f"{numbers} name an axis of a leaf of {ndim} dimensions twice")
        batch = tuple(axis for axis in range(ndim) if axis not in {*reduction, *output})
        return cls(batch, reduction, output)

    def sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the numbers of inputs and outputs of a matrix."""
        return tuple(math.prod(shape[i] for i in axes) for axes in self[1:])  # type: ignore[return-value]

    def to_matrices(self, x: jax.Array) -> jax.Array:
        """Returns the leaf as matrices [..., in, out]."""
        order = [axis for axes in self for axis in axes]
        batch = tuple(x.shape[axis] for axis in self.batch)
        return jnp.transpose(x, order).reshape(*batch, *self.sizes(x.shape))

    def sharding_of_matrices(self, sharding: NamedSharding | None) -> NamedSharding | None:
        """Returns the sharding of `to_matrices` of a leaf with this sharding.

        Raises:
          ValueError: `sharding` splits an axis that is merged with other axes.
        """
        if sharding is None:
            return None
        ndim = len(self.batch) + len(self.reduction) + len(self.output)
        entries = [*sharding.spec, *[None] * ndim][:ndim]
        spec = [entries[axis] for axis in self.batch]
        for axes in self[1:]:
            split = [entries[axis] for axis in axes if entries[axis] is not None]
            if split and len(axes) > 1:
                raise ValueError(
                    f"{sharding.spec} splits one of the axes {axes}, which are one dimension of a "
                    "matrix"
                )
            spec.append(split[0] if split else None)
        return NamedSharding(sharding.mesh, PartitionSpec(*spec))

    def from_matrices(self, matrices: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Undoes `to_matrices`: returns the leaf of shape `shape` with these matrices."""
        order = [axis for axes in self for axis in axes]
        x = matrices.reshape([shape[axis] for axis in order])
        return jnp.transpose(x, sorted(range(len(order)), key=order.__getitem__))


Numbers = Any | Callable[[Any], Any]


def spread(numbers: Numbers, tree: Any) -> Any:
    """Returns the dimension numbers of every leaf of `tree`, None for leaves without matrices.

    Args:
      numbers: None means the last two axes of every leaf that has two axes or more. Otherwise
        a tree of dimension numbers or None, whose structure is a prefix of that of `tree`, or a
        function of `tree` that returns such a tree.
      tree: parameters, or gradients.
    """
    if callable(numbers) and not is_numbers(numbers):
        numbers = numbers(tree)
    elif numbers is None:
        default = MuonDimensionNumbers()
        return jax.tree.map(lambda x: Spread(default if jnp.ndim(x) >= 2 else None), tree)
    return over_leaves(numbers, tree, is_numbers)


def over_leaves(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Returns, for every leaf of `tree`, a `Spread` of the prefix's entry."""
    return jax.tree.map(
        lambda own, part: jax.tree.map(lambda _: Spread(own), part), prefix, tree, is_leaf=is_leaf
    )


class Spread:
    """A leaf of a pytree that holds any value, even a value that is a pytree itself."""

    def __init__(self, value: Any):
        self.value = value
