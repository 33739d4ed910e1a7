"""Runs layers so that each device sorts and computes its own tokens.

The order of rows is internal to a layer, and tokens do not depend on each other. So tokens that
`jax.jit` splits stay split, because the layer runs in a `jax.shard_map`. Every device gets whole
matrices; split matrices are gathered. The gradients of matrices are summed over devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.meshes import axes_of_kind, gathered, names_of, placed
from jax_grouped_gemm._src.transfers import current_recorder

AxisNames = str | Sequence[str]


def over_tokens(
    function: str,
    layer: Callable[..., jax.Array],
    tokens: Any,
    whole: Any,
    token_axes: AxisNames | None,
) -> jax.Array:
    """Runs `layer(tokens, whole, axes)` on each device for its own tokens.

    Args:
      function: name of the public function, for messages.
      layer: returns an array with the leading dimensions of the tokens, and one more dimension.
        `axes` are the mesh axes along which the first dimension of the tokens is split.
      tokens: a pytree of arrays [..., any] with the same leading dimensions. The type of the first
        array says how explicit axes split them.
      whole: a pytree of arrays that every device needs in full.
      token_axes: the auto mesh axes along which the first dimension is split. None means the auto
        axes over which it can be divided evenly.

    Raises:
      ValueError: `token_axes` names something else than auto axes of the mesh, or the product of
        their sizes does not divide the first dimension.
    """
    x, *_ = leaves = jax.tree.leaves(tokens)
    mesh = _mesh([*leaves, *jax.tree.leaves(whole)])
    axes = _auto_axes(function, mesh, x.shape[0] if x.ndim > 1 else 1, token_axes)
    leading = _leading_spec(x, axes)
    # Inside a `jax.shard_map` the caller has split the tokens already.
    if not any(leading) or AxisType.Manual in mesh.axis_types:
        return layer(tokens, whole, ())

    def spec_of(operand):
        spec = P(*leading, None)
        return spec, placed(operand, mesh, spec)

    def split(every, of):
        leaves, tree = jax.tree.flatten(every)
        specs, arrays = zip(*map(of, leaves), strict=True) if leaves else ((), ())
        return jax.tree.unflatten(tree, specs), jax.tree.unflatten(tree, arrays)

    if recorder := current_recorder():
        for operand in jax.tree.leaves(whole):
            recorder.watch(function, operand)
    token_specs, tokens = split(tokens, spec_of)
    axes_of_tokens = {name for entry in leading for name in names_of(entry)}

    def gathered_there(operand):
        # Keep splits only along the axes of the tokens, because `gathered` knows no other axes.
        spec = jax.typeof(operand).sharding.spec
        kept = P(*(entry if axes_of_tokens.issuperset(names_of(entry)) else None for entry in spec))
        return kept, placed(operand, mesh, kept)

    whole_specs, whole = split(whole, gathered_there)

    def on_device(tokens, whole):
        whole = jax.tree.map(gathered, whole, whole_specs)
        return layer(tokens, whole, names_of(leading[0]))

    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(token_specs, whole_specs), out_specs=P(*leading, None)
    )(tokens, whole)


def _mesh(arrays: Sequence[jax.Array]) -> Any:
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _auto_axes(
    function: str, mesh: Any, size: int, token_axes: AxisNames | None
) -> tuple[str, ...]:
    auto = axes_of_kind(mesh, AxisType.Auto)
    if token_axes is not None:
        names = names_of(token_axes)
        for name in names:
            if name not in auto:
                raise ValueError(
                    f"{function}: token_axes must name auto axes of the mesh, got {name!r} where "
                    f"they are {auto}"
                )
        devices = math.prod(mesh.shape[name] for name in names)
        if size % devices:
            raise ValueError(
                f"{function}: the first dimension of x, {size}, must be a multiple of the "
                f"{devices} devices along token_axes {names}"
            )
        return names
    taken: list[str] = []
    if not is_static(size):  # a symbolic size may not be divisible
        return ()
    for name in auto:
        devices = math.prod(mesh.shape[axis] for axis in (*taken, name))
        if mesh.shape[name] > 1 and size and size % devices == 0:
            taken.append(name)
    return tuple(taken)


def _leading_spec(x: jax.Array, auto: tuple[str, ...]) -> list[Any]:
    """Returns the entries of a `PartitionSpec` for the leading dimensions of the tokens."""
    spec: list[Any] = list(jax.typeof(x).sharding.spec[:-1])
    if auto and spec:
        spec[0] = (*names_of(spec[0]), *auto)
    return spec
