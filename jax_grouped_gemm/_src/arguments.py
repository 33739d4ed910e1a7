"""Checks arguments that the public functions share, and brings them into one form.

Ragged products take any integers as group sizes and offsets. Negative sizes count as zero, the
running sum saturates at the number of rows, and rows that no group owns are zero. These rules make
any sizes safe, but hide mistakes. `check_groups` checks the values when a program runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.invariance import Invariant, invariant, is_enabled

_INT32 = np.iinfo(np.int32)

# Keep JAX's function, because `adapters.replace_lax` may replace it by this package's.
jax_ragged_dot_general = lax.ragged_dot_general

KernelName = Literal["cuda", "xla", "reference"]
"""Says how to compute an operation: by kernels, or in pure JAX. "reference" is another name for
"xla"."""
Implementation = KernelName | Invariant | None

Chosen = TypeVar("Chosen", bound=str | None)


def checked_implementation(implementation: Implementation) -> Implementation:
    """Returns `implementation`, or "xla" for "reference"; raises `ValueError` if it is invalid."""
    if isinstance(implementation, Invariant):
        return implementation
    checked_choice("implementation", implementation, (None, *get_args(KernelName)))
    return "xla" if implementation == "reference" else implementation


def with_invariance(function: str, implementation: Any, batch_invariant: bool) -> Any:
    """Returns `implementation`, made batch invariant if the argument or the context asks for it.

    Raises:
      TypeError: `batch_invariant` is not a boolean.
      ValueError: batch invariance is asked for, but `implementation` excludes the kernels.
    """
    if not (checked_boolean(f"{function}: batch_invariant", batch_invariant) or is_enabled()):
        return implementation
    if callable(implementation) or implementation in ("xla", "reference"):
        raise ValueError(
            f"{function}: implementation must be None or 'cuda' with batch_invariant, because only "
            f"kernels of this package are batch invariant, got {implementation!r}"
        )
    return invariant(implementation)


def checked_choice(name: str, value: Chosen, choices: Sequence[Chosen]) -> Chosen:
    """Returns `value` if it is one of `choices`, else raises a `ValueError`."""
    # `value in choices` would compare an array element by element.
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}")
    return value


def checked_boolean(name: str, value: Any) -> bool:
    """Returns `value` as a Python boolean; raises a `TypeError` if it is anything else."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def canonical_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    """Returns the dtype that arrays made with `dtype` have. Without x64 mode, 64 bits become 32."""
    try:
        if dtype is not None:  # NumPy would take None as float64
            return np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    except TypeError:
        pass
    raise TypeError(f"{name} must be a dtype, got {dtype!r}")


def as_array(name: str, x: Any) -> jax.Array:
    """Returns `x` as a JAX array; raises a `TypeError` if it is not an array of numbers."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        if hasattr(x, "dequantize"):
            raise TypeError(
                f"{name} must be an array of numbers, got a {type(x).__name__}: only the weights "
                "of ragged_dot and of MLPs may be quantised; dequantize() makes an array"
            )
        if hasattr(x, "qvalue"):
            raise TypeError(
                f"{name} must be an array of numbers, got a {type(x).__name__}: checkpoints.qwix() "
                "makes a QuantizedArray of it"
            )
        raise TypeError(f"{name} must be a JAX or NumPy array, got {_described(x)}")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} must be an array of numbers, got {jax.typeof(x)}")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _described(x: Any) -> str:
    """Returns the type and value of `x`, which should be an array, and how to convert it."""
    is_convertible = isinstance(x, (list, tuple)) or hasattr(x, "__jax_array__")
    advice = "; jnp.asarray() makes an array of it" if is_convertible else ""
    return f"{type(x).__name__}: {reprlib.repr(x)}{advice}"


def check_floating(function: str, kind: Any = jnp.floating, **operands: jax.Array) -> None:
    """Raises a `TypeError` unless all operands of an MLP are of `kind`, with at least 16 bits."""
    for name, x in operands.items():
        if not jnp.issubdtype(x.dtype, kind):
            raise TypeError(f"{function}: {name} must be floating, got dtype {x.dtype}")
        if x.dtype.itemsize < 2:
            raise TypeError(
                f"{function}: {name} must have 16 bits at least, got dtype {x.dtype}; a recipe "
                "quantises wider operands, and scaled_ragged_dot multiplies quantised ones"
            )


def check_ranks(**operands: tuple[jax.Array, int]) -> None:
    """Raises a `TypeError` unless each operand has its rank; operands are (array, rank) by name."""
    for name, (x, rank) in operands.items():
        if x.ndim != rank:
            dimensions = "1 dimension" if rank == 1 else f"{rank} dimensions"
            raise TypeError(
                f"{name} must have {dimensions}, got {jax.typeof(x)}; jax.vmap adds others"
            )


def checked_int(name: str, value: int) -> int:
    """Returns `value`, an integer or symbolic dimension; raises a `TypeError` for anything else."""
    if isinstance(value, bool | np.bool_) or not (
        isinstance(value, int | np.integer) or jax.export.is_symbolic_dim(value)
    ):
        raise TypeError(f"{name} must be an integer, got {reprlib.repr(value)}")
    return int(value) if isinstance(value, int | np.integer) else value


def checked_real(name: str, value: Any) -> float:
    """Returns `value` as a Python float; raises a `TypeError` if it is not a real number."""
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        raise TypeError(f"{name} must be a real number, got {reprlib.repr(value)}")
    return float(value)


def refuse_sharded(function: str, **operands: Any) -> None:
    """Raises a `NotImplementedError` if an operand is sharded over explicit mesh axes."""
    for name, operand in operands.items():
        for x in jax.tree.leaves(operand):
            if any(axes is not None for axes in jax.typeof(x).sharding.spec):
                raise NotImplementedError(
                    f"{function}: {name} is sharded over explicit mesh axes ({jax.typeof(x)}); "
                    "call it inside jax.shard_map, which says what each device does, or under "
                    "jax.sharding.auto_axes(function, out_sharding=...), which leaves that to XLA"
                )


def canonical_precision(precision: Any) -> Any:
    """Returns `precision` in a hashable form: None, an algorithm, a `jax.lax.Precision` or a pair.

    None becomes the value of `jax_default_matmul_precision`.
    """
    if precision is None:
        config: Any = jax.config  # its options are attributes made at run time
        precision = config.jax_default_matmul_precision
    if isinstance(precision, (tuple, list)):
        return tuple(map(canonical_precision, precision))
    if precision is None or isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return precision
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[precision]
    try:
        precision = lax.Precision(precision)
    except (TypeError, ValueError):  # TypeError if it has no hash
        raise ValueError(
            "precision must be None, a jax.lax.Precision or its name, a jax.lax.DotAlgorithm or a "
            f"preset, or a pair of these, got {reprlib.repr(precision)}"
        ) from None
    # XLA:GPU may use TF32 for HIGH. Here HIGH is as accurate as float32, and only DEFAULT is not.
    return lax.Precision.HIGHEST if precision == lax.Precision.HIGH else precision


def as_indices(name: str, x: Any) -> jax.Array:
    """Returns an integer or an array of integers as int32, clipped to the range of int32.

    Raises:
      TypeError: `x` is neither an integer nor an array of integers.
    """
    if isinstance(x, np.generic):
        x = np.asarray(x)
    elif isinstance(x, int) and not isinstance(x, bool):
        x = np.asarray(min(max(x, _INT32.min), _INT32.max))
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be integers, got {_described(x)}")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {x.dtype}")
    if x.dtype == jnp.int32:
        return as_array(name, x)
    # Clip NumPy's arrays in NumPy: without x64, JAX would cut 64 bits down to 32.
    clip = jnp.clip if isinstance(x, jax.Array) else np.clip
    theirs = jnp.iinfo(x.dtype)
    low, high = max(_INT32.min, int(theirs.min)), min(_INT32.max, int(theirs.max))
    return jnp.asarray(clip(x, low, high).astype(np.int32))


def canonical_offset(group_offset: ArrayLike | None) -> jax.Array:
    """Returns `group_offset` as int32 [1]; raises a `TypeError` if it is not an integer."""
    if group_offset is None:
        return _no_offset()
    offset = as_indices("group_offset", group_offset)
    if offset.shape not in ((), (1,)):
        raise TypeError(f"group_offset must be a scalar or have shape (1,), got {offset.shape}")
    return offset.reshape(1)


@functools.partial(jax.jit, inline=True)
def _no_offset() -> jax.Array:
    # Make the zero on the device, so that an eager call copies nothing to it.
    return jnp.zeros(1, jnp.int32)


def checked_group_sizes(group_sizes: ArrayLike) -> jax.Array:
    """Returns `group_sizes` [G] as int32; raises a `TypeError` if they are not [G] integers."""
    sizes = as_indices("group_sizes", group_sizes)
    if sizes.ndim != 1:
        raise TypeError(f"group_sizes must have the shape [G], got {sizes.shape}")
    return sizes


def check_group_count(
    name: str, group_sizes: jax.Array, num_matrices: int, group_offset: ArrayLike | None
) -> None:
    """Raises a `TypeError` if operand `name` has more matrices than there are groups, or fewer
    matrices although there is no offset."""
    count = group_sizes.shape[0]
    if num_matrices > count or (group_offset is None and num_matrices != count):
        raise TypeError(
            f"{name} has {num_matrices} matrices but group_sizes has {count} groups; fewer "
            "matrices than groups need group_offset"
        )


def evaluate_as_jax(
    lhs: jax.Array,
    rhs: jax.Array | jax.ShapeDtypeStruct,
    group_sizes: jax.Array,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: np.dtype | None,
    is_window: bool,
) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the result of `jax.lax.ragged_dot_general`, or raises its errors.

    With `is_window`, rhs may have matrices for a part of the groups.
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
    try:
        return _evaluated(
            (lhs.shape, lhs.dtype),
            (rhs.shape, rhs.dtype),
            (sizes_shape, group_sizes.dtype),
            dimension_numbers,
            precision,
            preferred_element_type,
        )
    except TypeError as error:
        raise TypeError(
            f"{error} Got lhs {jax.typeof(lhs)}, rhs {jax.typeof(rhs)} and group_sizes "
            f"{jax.typeof(group_sizes)}."
        ) from None


# Cache results, because in an eager call tracing takes longer than all other work on the host.
@functools.lru_cache(maxsize=1024)
def _evaluated(lhs, rhs, group_sizes, dimension_numbers, precision, preferred_element_type):
    evaluate = functools.partial(
        jax_ragged_dot_general,
        ragged_dot_dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    # Hide the mesh of the context, because jax.lax infers no sharding over explicit axes.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.eval_shape(
            evaluate, *(jax.ShapeDtypeStruct(*x) for x in (lhs, rhs, group_sizes))
        )


@dataclasses.dataclass(frozen=True)
class _Checks:
    unowned_rows: bool


# The context is part of the key of JAX's caches, so a jitted function is traced again inside it.
_context = jax.make_user_context(None)


@contextlib.contextmanager
def check_groups(*, unowned_rows: bool = False) -> Iterator[None]:
    """Returns a context in which ragged products check group sizes and offsets when they run.

    Sizes must not be negative, their sum must be the number of rows, and with a group offset all
    local groups must be global groups. Outside `jax.jit` a failed check raises at once. Inside
    `jax.jit`, `jax.experimental.checkify` has to carry the errors out:

        with jgg.check_groups():
            error, y = checkify.checkify(jax.jit(layer))(x, weights)
        error.throw()

    The context covers `ragged_dot`, `ragged_dot_general`, `ragged_dot_accumulate`,
    `fp8_ragged_dot`, the scaled products, `ragged_mlp`, `gated_ragged_dot`, `moe.dropless_mlp` and
    everything that calls them inside the context, Flax layers included. For `moe.dropless_mlp`, a
    choice of an expert that does not exist counts as a row that no group owns. The checks run a few
    small kernels for each product. The context can decorate a function.

    Args:
      unowned_rows: whether the sum may be less than the number of rows, for example because of
        padding.

    Raises:
      checkify.JaxRuntimeError: a check failed. A product outside of `jax.jit` or `error.throw()`
        raises it, and the message has the sizes.
    """
    with _context(_Checks(checked_boolean("unowned_rows", unowned_rows))):
        yield


def has_group_checks() -> bool:
    """Returns whether the context asks for checks."""
    return _context.value is not None


def run_group_checks(
    group_sizes: jax.Array, num_rows: int, group_offset: jax.Array, num_local_groups: int
) -> None:
    """Runs the checks of the context, if it asks for any.

    Args:
      group_sizes: int32 [..., G].
      num_rows: number of rows, m.
      group_offset: int32 [1].
      num_local_groups: number of matrices, g.
    """
    checks: _Checks | None = _context.value
    if checks is None:
        return
    from jax.experimental import checkify  # imported late, because it imports Pallas

    checkify.check(
        jnp.all(group_sizes >= 0),
        "group_sizes must not be negative, got {sizes}",
        sizes=group_sizes,
    )
    # Let the sum saturate at one more than the rows, because a plain sum could overflow.
    limit = num_rows + 1
    sizes = jnp.clip(group_sizes, 0, limit)
    sums = lax.associative_scan(lambda a, b: a + jnp.minimum(b, limit - a), sizes, axis=-1)
    total = sums[..., -1] if group_sizes.shape[-1] else jnp.zeros((), jnp.int32)
    rows = jnp.asarray(num_rows, jnp.int32)
    checkify.check(
        jnp.all(total <= num_rows),
        "group_sizes must not sum past the {rows} rows, got {sizes}",
        rows=rows,
        sizes=group_sizes,
    )
    if not checks.unowned_rows:
        checkify.check(
            jnp.all(total >= num_rows),
            "group_sizes must sum to the {rows} rows, got {sizes}; "
            "check_groups(unowned_rows=True) allows rows that no group owns",
            rows=rows,
            sizes=group_sizes,
        )
    last = group_sizes.shape[-1] - num_local_groups
    checkify.check(
        jnp.all((group_offset >= 0) & (group_offset <= last)),
        "group_offset must be between 0 and {last}, which leaves the local groups inside the "
        "global ones, got {offset}",
        last=jnp.asarray(last, jnp.int32),
        offset=group_offset,
    )
