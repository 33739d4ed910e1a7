"""The devices that share the experts of one layer, as mesh axes inside `jax.shard_map`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax import lax

from jax_grouped_gemm._src.arrays import varying_axes

Axes = tuple[str, ...]
AxisNames = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Group:
    """The mesh axes over which one layer is divided.

    Attributes:
      experts: the axes along which each device has a slice of the experts.
      tensor: the axes along which each device has a slice of every expert's hidden features.
      tokens: the axes, out of `experts` and `tensor`, along which each device has its own tokens.
        Along them, tokens are gathered and results scattered. Along the remaining axes all devices
        have the same tokens, and results are added up.
    """

    experts: Axes
    tensor: Axes
    tokens: Axes

    @classmethod
    def of(
        cls, expert_axis: AxisNames, tensor_axis: AxisNames | None, *of_tokens: jax.Array
    ) -> Group:
        """Returns the group of a layer; types of `of_tokens` say over which axes tokens vary.

        Raises:
          TypeError: the name of an axis is not a string.
          ValueError: no axis is given, an axis is named twice, or the mesh lacks an axis.
        """
        experts = axis_names("expert_axis", expert_axis)
        tensor = () if tensor_axis is None else axis_names("tensor_axis", tensor_axis)
        every = experts + tensor
        if len(set(every)) < len(every):
            raise ValueError(
                f"expert_axis and tensor_axis must be different mesh axes, got {expert_axis!r} and "
                f"{tensor_axis!r}"
            )
        for name in every:
            try:
                lax.axis_size(name)
            except NameError as error:
                raise ValueError(
                    f"expert_parallel_mlp: {name!r} is no mesh axis here; call this function "
                    "inside jax.shard_map over the axis, or use moe.expert_parallel(mesh, ...)"
                ) from error
        if not varying_axes(lax.axis_index(every)):
            # With check_vma=False types show no varying axes, so tokens may vary over all axes.
            return cls(experts, tensor, every)
        varying = varying_axes(*of_tokens)
        return cls(experts, tensor, tuple(name for name in every if name in varying))

    @property
    def every(self) -> Axes:
        """All axes."""
        return self.experts + self.tensor

    @property
    def summed(self) -> Axes:
        """The axes along which tokens are the same."""
        return tuple(name for name in self.every if name not in self.tokens)

    @property
    def num_slices(self) -> int:
        """Number of slices of the experts."""
        return lax.axis_size(self.experts)

    @property
    def num_sources(self) -> int:
        """Number of devices with tokens of their own."""
        return lax.axis_size(self.tokens) if self.tokens else 1

    def slice_index(self) -> jax.Array:
        """Returns the index of this device's slice of the experts."""
        return lax.axis_index(self.experts)

    def tensor_index(self) -> jax.Array | int:
        """Returns the index of this device's slice of the hidden features."""
        return lax.axis_index(self.tensor) if self.tensor else 0


def axis_names(argument: str, axes: AxisNames) -> Axes:
    """Returns the name, or the sequence of names, as a tuple.

    Raises:
      TypeError: a name is not a string.
      ValueError: there is no name.
    """
    names = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be the name of a mesh axis or several, got {axes!r}")
    if not names:
        raise ValueError(f"{argument} must name at least one mesh axis, got {axes!r}")
    return names
