"""The state of Muon in version 0.1, and the loading of checkpoints into today's state."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.export import register_namedtuple_serialization

State = TypeVar("State")
Path = tuple[str, ...]

# The name before the parts of a partition, in paths of Optax's states.
_PARTS = "inner_states"


class MuonState(NamedTuple):
    """The state of `muon` in version 0.1, for `load_muon_state`."""

    count: jax.Array  # type: ignore[assignment]  # int32, updates so far, under Optax's name
    mu: Any  # mean of the gradients
    nu: Any  # mean of squared gradients for leaves that are no matrices, None for matrices


register_namedtuple_serialization(MuonState, serialized_name="jax_grouped_gemm.optim.MuonState")


def load_muon_state(state: State, checkpoint: Any) -> State:
    """Returns the state of an optimiser that continues from a checkpoint.

    Args:
      state: today's state of the optimiser: `optimizer.init(params)`, alone or within a chain or a
        partition of Optax.
      checkpoint: a saved state of `muon`, of `optax.contrib.muon` with the same dimension numbers,
        or the `MuonState` of version 0.1, in the same place of the same chain. It may consist of
        the state objects, or of nested dictionaries and lists, which is the form of a checkpoint
        that is restored without a target.

    Returns:
      A state like `state` with the arrays of `checkpoint`, in the dtypes of `state`.

    Raises:
      ValueError: an array is missing in the checkpoint, or has another shape.
    """
    saved = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(checkpoint)}

    def load(path, leaf):
        name = _name(path)
        # This value belongs to the optimiser's options, not to its history.
        if name[-1:] == ("ns_coeffs",):
            return leaf
        found = next((saved[x] for x in _places(name) if x in saved), None)
        if found is None:
            raise ValueError(f"the checkpoint has no {'.'.join(name)}")
        if jnp.shape(found) != jnp.shape(leaf):
            raise ValueError(
                f"{'.'.join(name)} has shape {jnp.shape(leaf)}, but {jnp.shape(found)} in the "
                "checkpoint"
            )
        return jnp.asarray(found, leaf.dtype)

    return jax.tree_util.tree_map_with_path(load, state)


def _name(path: Any) -> Path:
    """Returns the names of a path's keys, which may be attributes, entries or indices."""
    keys = (getattr(k, "name", getattr(k, "key", getattr(k, "idx", None))) for k in path)
    return tuple(map(str, keys))


def _places(name: Path) -> list[Path]:
    """Returns where a checkpoint may have the array: in this place, or in that of version 0.1."""
    # prefix / inner_states / group / inner_state / index / field / parameter
    parts = [i for i, part in enumerate(name) if part == _PARTS]
    return [name, *((*name[:i], *name[i + 4 :]) for i in parts)]
