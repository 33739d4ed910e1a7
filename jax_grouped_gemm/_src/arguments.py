"""Arguments that the public functions have in common, checked and in one form."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

KernelName = Literal["cuda", "reference"]
Implementation = KernelName | None

Choice = TypeVar("Choice", bound=str | None)


def checked_implementation(implementation: Implementation) -> Implementation:
    """`implementation` if it is one, else a `ValueError`."""
    return checked_choice("implementation", implementation, (None, *get_args(KernelName)))


def checked_choice(name: str, value: Choice, choices: Sequence[Choice]) -> Choice:
    """`value` if it is one of `choices`, else a `ValueError`."""
    # An array compares element by element.
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}")
    return value


def checked_boolean(name: str, value: Any) -> bool:
    """`value` as a Python boolean; a `TypeError` if it is anything else than a boolean."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def canonical_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    """`dtype` as arrays have it: 64 bits become 32 unless JAX's x64 mode is on."""
    try:
        if dtype is not None:  # of which NumPy makes float64
            return np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    except TypeError:
        pass
    raise TypeError(f"{name} must be a dtype, got {dtype!r}")


def as_array(name: str, x: Any) -> jax.Array:
    """`x` as a JAX array; a `TypeError` if it is no array at all."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        value = reprlib.repr(x)
        raise TypeError(f"{name} must be a JAX or NumPy array, got {type(x).__name__}: {value}")
    return jnp.asarray(x)


def checked_int(name: str, value: int) -> int:
    """`value` as a Python integer, or a symbolic dimension; a `TypeError` if it is neither."""
    if isinstance(value, bool | np.bool_) or not (
        isinstance(value, int | np.integer) or jax.export.is_symbolic_dim(value)
    ):
        raise TypeError(f"{name} must be an integer, got {reprlib.repr(value)}")
    return int(value) if isinstance(value, int | np.integer) else value


def refuse_sharded(function: str, **operands: jax.Array) -> None:
    """A `NotImplementedError` if an operand is sharded over explicit mesh axes."""
    for name, x in operands.items():
        if any(axes is not None for axes in jax.typeof(x).sharding.spec):
            raise NotImplementedError(
                f"{function}: {name} is sharded over explicit mesh axes ({jax.typeof(x)}); call "
                "it inside jax.shard_map, which says what each device does, or under "
                "jax.sharding.auto_axes(function, out_sharding=...), which leaves that to XLA"
            )


def canonical_precision(precision: Any) -> Any:
    """A hashable precision: None, an algorithm, a `jax.lax.Precision` or a pair of those."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # dynamic
    if isinstance(precision, (tuple, list)):
        return tuple(map(canonical_precision, precision))
    if precision is None or isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return precision
    if precision in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[precision]
    precision = lax.Precision(precision)
    # XLA:GPU lets HIGH use TF32. Only DEFAULT may: HIGH is accurate to float32 here.
    return lax.Precision.HIGHEST if precision == lax.Precision.HIGH else precision


def to_int32(x: jax.Array) -> jax.Array:
    """Converts integers of any dtype, those outside the range of int32 to its nearest end."""
    ours, theirs = jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    return jnp.clip(x, max(ours.min, theirs.min), min(ours.max, theirs.max)).astype(jnp.int32)


def canonical_offset(group_offset: ArrayLike | None) -> jax.Array:
    """`group_offset` as int32 [1]; a `TypeError` or `ValueError` says what is wrong."""
    offset = jnp.asarray(0 if group_offset is None else group_offset)
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(f"group_offset must be an integer, got dtype {offset.dtype}")
    if offset.shape not in ((), (1,)):
        raise ValueError(f"group_offset must be a scalar or have shape (1,), got {offset.shape}")
    return to_int32(offset).reshape(1)


def checked_group_sizes(group_sizes: ArrayLike) -> jax.Array:
    """`group_sizes` [G] as int32; a `TypeError` or `ValueError` says what is wrong."""
    group_sizes = as_array("group_sizes", group_sizes)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be integers, got dtype {group_sizes.dtype}")
    if group_sizes.ndim != 1:
        raise ValueError(f"group_sizes must have the shape [G], got {group_sizes.shape}")
    return to_int32(group_sizes)


def check_group_count(
    group_sizes: jax.Array, num_matrices: int, group_offset: ArrayLike | None
) -> None:
    """Raises a `ValueError` if there are more matrices than groups, or fewer without an offset."""
    count = group_sizes.shape[0]
    if num_matrices > count or (group_offset is None and num_matrices != count):
        raise ValueError(
            f"rhs has {num_matrices} matrices but group_sizes has {count} groups; fewer matrices "
            "than groups need group_offset"
        )


def evaluate_as_jax(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: np.dtype | None,
    is_window: bool,
) -> jax.ShapeDtypeStruct:
    """Shape and dtype that `jax.lax.ragged_dot_general` would return, with its errors.

    With `is_window`, rhs may have matrices for some of the groups only.
    """
    sizes_shape = group_sizes.shape
    if is_window and sizes_shape and dimension_numbers.rhs_group_dimensions:
        num_local_groups = rhs.shape[dimension_numbers.rhs_group_dimensions[0]]
        if num_local_groups > sizes_shape[-1]:
            raise TypeError(
                f"rhs has matrices for {num_local_groups} groups, more than group_sizes has: got "
                f"rhs {jax.typeof(rhs)} and group_sizes {jax.typeof(group_sizes)}"
            )
        sizes_shape = (*sizes_shape[:-1], num_local_groups)
    evaluate = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    # Without the mesh of the context: jax.lax infers no sharding over explicit axes.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        try:
            return jax.eval_shape(
                evaluate,
                jax.ShapeDtypeStruct(lhs.shape, lhs.dtype),
                jax.ShapeDtypeStruct(rhs.shape, rhs.dtype),
                jax.ShapeDtypeStruct(sizes_shape, group_sizes.dtype),
            )
        except TypeError as error:
            raise TypeError(
                f"{error} Got lhs {jax.typeof(lhs)}, rhs {jax.typeof(rhs)} and group_sizes "
                f"{jax.typeof(group_sizes)}."
            ) from None
