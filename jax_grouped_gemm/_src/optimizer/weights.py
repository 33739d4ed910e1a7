"""Chooses the parameters to quantise, and groups those that share quantised arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.fp8.formats import BLOCK
from jax_grouped_gemm._src.fp8.quantize.api import QuantizedWeights
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.optimizer.fused import Options, Weights, apply

Path = tuple[Any, ...]
Select = Callable[[Path, Any], bool]
"""Returns whether to quantise a leaf, given the names from the root to the leaf, and the leaf."""

GATE, UP, DOWN = "wi_0", "wi_1", "wo"


def experts(path: Path, leaf: Any) -> bool:
    """Returns whether a leaf has a name (wi_0, wi_1, wo) and the rank of experts' weights."""
    return bool(path) and path[-1] in (GATE, UP, DOWN) and leaf.ndim >= 3


@dataclasses.dataclass(frozen=True)
class Member:
    """A leaf of the parameters, and its place in a quantised array that leaves may share.

    Attributes:
      leaf: index of the leaf among all leaves.
      part, parts: index of the leaf among the leaves of this array, and the number of these leaves.
    """

    leaf: int
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that are quantised together: the leaves of an MLP, or one leaf.

    Attributes:
      path: the place of the result in the tree of all quantised weights.
      members: for each quantised array, its leaves in order.
    """

    path: Path
    members: tuple[tuple[Member, ...], ...]

    def quantized(
        self, leaves: Sequence[Any], recipe: Recipe, implementation: Implementation
    ) -> Any:
        """Returns the quantised weights of this group's leaves among float32 `leaves`."""
        options = Options(recipe.power_of_two_scales, implementation)
        forms = []
        for members in self.members:
            of_matrix = _no_forms(leaves[members[0].leaf], len(members), recipe)
            for member in members:
                leaf = leaves[member.leaf]
                # Quantise by `apply` with an update of -0, because it keeps the sharding of leaves
                # of any rank. Adding -0 changes no number, not even the sign of a zero.
                nothing = jnp.full_like(leaf, -0.0, jnp.bfloat16)
                old = Weights(leaf, of_matrix)
                at = options._replace(part=member.part, parts=member.parts)
                of_matrix = apply(jnp.ones(1), nothing, old, at).forms
            forms.append(of_matrix)
        return as_container(forms)


def as_forms(quantized: Any) -> list[tuple[Any, ...]]:
    """Returns the forms of each array of a group: values, scales, transposed values, their scales.

    Only this function and `as_container` depend on the types of quantised weights.
    """
    matrices = quantized if isinstance(quantized, QuantizedMlp) else [quantized]
    return [tuple(matrix) for matrix in matrices]


def as_container(forms: Sequence[Sequence[Any]]) -> Any:
    """Inverts `as_forms`: makes two arrays a `QuantizedMlp`, and one array a `QuantizedWeights`."""
    matrices = [QuantizedWeights(*each) for each in forms]
    return QuantizedMlp(*matrices) if len(matrices) > 1 else matrices[0]


def _no_forms(leaf: Any, parts: int, recipe: Recipe) -> tuple[jax.Array, ...]:
    """Returns zeros in the shapes of the forms of `parts` matrices that lie next to each other."""
    *leading, k, n = leaf.shape
    rows, blocks = -(-k // BLOCK), -(-n // BLOCK)
    columns, across = (n if parts == 1 else parts * blocks * BLOCK), parts * blocks
    shapes = (
        ((k, columns), recipe.forward_dtype),
        ((rows, across), jnp.float32),
        ((columns, k), recipe.forward_dtype),
        ((across, rows), jnp.float32),
    )
    return tuple(jnp.zeros((*leading, *shape), dtype) for shape, dtype in shapes)


def groups_of(params: Any, select: Select) -> list[Group]:
    """Returns the groups of the parameters that `select` chooses.

    Raises:
      TypeError: a chosen leaf is not [..., k, n], or is not float32, bfloat16 or float16.
    """
    chosen: dict[Path, int] = {}
    shapes: dict[Path, Any] = {}
    for index, (keys, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        path = path_of(keys)
        if not select(path, leaf):
            continue
        _check(path, leaf)
        chosen[path], shapes[path] = index, leaf.shape
    groups = []
    taken: set[Path] = set()
    for path in chosen:
        if path in taken:
            continue
        node = path[:-1]
        gate, up, down = ((*node, name) for name in (GATE, UP, DOWN))
        if path in (gate, up, down) and _is_mlp(shapes, gate, up, down):
            wi = [gate, up] if up in chosen else [gate]
            taken.update((*wi, down))
            of_wi = [Member(chosen[x], i, len(wi)) for i, x in enumerate(wi)]
            groups.append(Group(node, (tuple(of_wi), (Member(chosen[down]),))))
        else:
            groups.append(Group(path, ((Member(chosen[path]),),)))
    return groups


def path_of(keys: Any) -> Path:
    """Returns the names from the root to a leaf, without the `.value` of a Flax variable or box."""
    *node, last = keys or [None]
    if isinstance(last, jax.tree_util.GetAttrKey) and last.name == "value":
        keys = node
    return tuple(map(_name, keys))


def nested(values: Mapping[Path, Any]) -> Any:
    """Returns nested dictionaries of values by path, or the value alone if its path is empty."""
    if () in values:
        return values[()]
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def at(tree: Any, path: Path) -> Any:
    """Returns the value at `path` in a `tree` that `nested` returned.

    Raises:
      ValueError: the tree has no value there.
    """
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            raise ValueError(
                f"optim: state.quantized has no weights for {'/'.join(map(str, path))}; make them "
                "with state._replace(quantized=optimizer.quantize(params, state))"
            )
        tree = tree[name]
    return tree


def _is_mlp(shapes: Mapping[Path, Any], gate: Path, up: Path, down: Path) -> bool:
    if gate not in shapes or down not in shapes:
        return False
    wi = shapes[gate]
    transposed = (*wi[:-2], wi[-1], wi[-2])
    return len(wi) >= 3 and shapes[down] == transposed and shapes.get(up, wi) == wi


def _name(key: Any) -> Any:
    """Returns the name in a key of a `jax.tree_util` path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _check(path: Path, leaf: Any) -> None:
    name = "/".join(map(str, path))
    if leaf.ndim < 2:
        raise TypeError(
            f"a quantised parameter must be [..., k, n], got {name} of shape {leaf.shape}"
        )
    if leaf.dtype not in (np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)):
        raise TypeError(
            "a quantised parameter must be float32, bfloat16 or float16, got "
            f"{name} of dtype {leaf.dtype}"
        )
