"""`quantize`, `dequantize` and `from_codes`: weights in a quantised format."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import as_array, canonical_dtype, checked_boolean
from jax_grouped_gemm._src.meshes import names_of
from jax_grouped_gemm._src.note.primitive import noted
from jax_grouped_gemm._src.partition import is_split_explicitly
from jax_grouped_gemm._src.plan import COMPOSED, Plan
from jax_grouped_gemm._src.quantized import reference  # noqa: F401 - registers formats
from jax_grouped_gemm._src.quantized.array import QuantizedArray, check_slices
from jax_grouped_gemm._src.quantized.format import (
    Codes,
    Format,
    Layout,
    Matrix,
    Parts,
    functions_of,
    named,
)


def quantize(
    x: ArrayLike,
    format: str | Format = "mxfp4",
    *,
    group_size: int | None = None,
    zero_points: bool = False,
    layout: Layout | None = None,
    dtype: DTypeLike | None = None,
) -> QuantizedArray:
    """Quantises weights [..., k, n]. Products take the resulting `QuantizedArray` as weights.

        q = jgg.quantize(w, "mxfp4")
        y = jgg.ragged_dot(x, q, group_sizes)

    Matrices are quantised one after the other, so only one matrix at a time needs temporary memory.
    Call `quantize` once, when weights are loaded, not inside a training or decoding step: `explain`
    shows each call inside of a step. Numbers are rounded to the nearest, ties to even. All elements
    that share a scale become NaN if one of them is infinite or NaN.

    | format | a weight is | elements that share a scale | scale |
    |---|---|---|---|
    | "mxfp4" | e2m1 times 2^e | 32 along k | (exponent of the largest) - 2, as OCP defines it |
    | "int4" | (q - 8) s | `group_size` along k | bfloat16, the largest over 7 |
    | "int4", `zero_points` | (q - z) s | `group_size` along k | bfloat16, the range over 15 |
    | "int8" | q s | a column | float32, the largest over 127 |
    | "fp8" | float8_e4m3fn times s | a column | float32, the largest over 448 |
    | "fp8_128x128" | float8_e4m3fn times s | a block | float32, as in `quantize_weights` |
    | "fp8_1x128" | float8_e4m3fn times s | 128 along n | float32, as in `quantize_blockwise` |
    | "fp8_row" | float8_e4m3fn times s | a row | float32 |
    | "fp8_tensor" | float8_e4m3fn times s | a matrix | float32 |

    The last three formats have only the layout "rows", for products of two FP8 operands (see
    `ragged_dot`).

    Args:
      x: [..., k, n], floating.
      format: the name of a format, or a `Format`.
      group_size: elements along k that share a scale of "int4": 32, 64 or 128, by default 128.
      zero_points: whether groups of "int4" have a zero point z, for weights that are not symmetric.
        The range of a group goes from its smallest to its largest weight, and includes 0.
      layout: "packed" for products of bf16 activations and quantised weights, or "rows" for
        products of two FP8 operands. The default is "packed" if the format has it.
      dtype: float8_e4m3fn or float8_e5m2, for the values of FP8 formats in the layout "rows".

    Raises:
      TypeError: `x` is not floating, or has fewer than two dimensions.
      ValueError: `format` is not registered, or has no such option.
    """
    x = as_array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 2:
        raise TypeError(f"x must be floating, [..., k, n], got {jax.typeof(x)}")
    zero_points = checked_boolean("zero_points", zero_points)
    found = named(
        format,
        layout=layout,
        group_size=group_size,
        zero_points=zero_points or None,
        dtype=None if dtype is None else canonical_dtype("dtype", dtype),
    )
    if functions_of(found).quantize is None:
        raise ValueError(f"the format {found} has no function that quantises")
    return _of_parts(_quantized(x, found), x.shape[-2:], found)


def dequantize(q: QuantizedArray, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """Returns the matrices [..., k, n] of a `QuantizedArray` as an array of `dtype`.

    MXFP4 is exact in bfloat16 and float32, subnormals included. For int4 the product of code and
    scale is rounded once. For int8 and FP8 the product is rounded to float32 and then to `dtype`.

    Args:
      q: a result of `quantize`, `from_codes` or a reader in `checkpoints`.
      dtype: floating.

    Raises:
      TypeError: `q` is not a `QuantizedArray`, or `dtype` is not floating.
    """
    return checked("q", q).dequantize(dtype)


def from_codes(
    codes: ArrayLike,
    scales: ArrayLike,
    format: str | Format,
    *,
    zero_points: ArrayLike | None = None,
    group_size: int | None = None,
) -> QuantizedArray:
    """Packs weights that are quantised already; `QuantizedArray.unpack` is the inverse.

    Args:
      codes: [..., k, n], one code for each element: uint8 in 0..15 for "mxfp4" and "int4", int8 for
        "int8", float8_e4m3fn for "fp8" and "fp8_128x128".
      scales: [..., ceil(k / 32), n] uint8 exponents for "mxfp4", bfloat16
        [..., ceil(k / group_size), n] for "int4", float32 [..., n] for "int8" and "fp8", float32
        [..., ceil(k / 128), ceil(n / 128)] for "fp8_128x128". Finite scales are less than 2^68 for
        "int4", less than 2^122 for "int8", and less than 2^128 for other formats.
      format: the name of a format, or a `Format`.
      zero_points: for "int4", integers in 0..15 in the shape of `scales`; None means 8.
      group_size: for "int4"; by default it follows from the shape of `scales`.

    Raises:
      TypeError: an array has an unsuitable dtype or shape.
      ValueError: `format` is not registered, or has no such option; or codes, scales, exponents or
        zero points are outside of their range. In `jax.jit` their values are unknown and not
        checked.
    """
    given_scales = scales
    codes, scales = as_array("codes", codes), as_array("scales", scales)
    has_zeros = zero_points is not None
    found = named(format, group_size=group_size, zero_points=has_zeros or None)
    functions = functions_of(found)
    if functions.pack is None or functions.unpack is None:
        raise ValueError(f"arrays of the format {found} are not packed: make a QuantizedArray")
    if codes.ndim < 2:
        raise TypeError(f"codes must be [..., k, n], got {jax.typeof(codes)}")
    k, n = codes.shape[-2:]
    if group_size is None and isinstance(format, str) and functions.group_sizes:
        fits = [
            size
            for size in functions.group_sizes
            if scales.ndim >= 2 and -(-k // size) == scales.shape[-2]
        ]
        if fits and found.group_size not in fits:
            found = named(found, group_size=fits[0])
    zeros = as_array("zero_points", zero_points) if has_zeros else None
    given = Codes(codes, scales, zeros)
    q = of_stored(_as_they_are, given, (k, n), found, codes.shape[:-2])
    _check_ranges(given, found, (k, n))
    _check_scales(given_scales, found)
    return q


def of_stored(
    read: Callable[[Any], Codes],
    stored: Any,
    matrix: Matrix,
    format: Format,
    leading: tuple[int, ...],
) -> QuantizedArray:
    """Packs matrices one after the other, from whatever arrays a checkpoint stores.

    Args:
      read: returns the `Codes` of one matrix from its arrays. It must be a module-level function,
        because `jax.jit` compiles again for every new function.
      stored: a pytree of arrays, which all begin with the dimensions `leading`.
      matrix: k and n.
      format: format of the codes.
      leading: the dimensions in front of a matrix.

    Raises:
      TypeError: codes, scales or zero points have an unsuitable dtype or shape.
    """
    rank = len(leading)
    for x in jax.tree.leaves(stored):
        if x.shape[:rank] != leading:
            raise TypeError(
                f"all arrays of {format} must begin with the dimensions {leading} of the codes, "
                f"got {x.dtype} of shape {x.shape}"
            )
    of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[rank:], x.dtype), stored)
    _check_codes(jax.eval_shape(read, of_one), format, matrix)
    return _of_parts(_packed(read, stored, format, leading, matrix), matrix, format)


def _as_they_are(codes: Codes) -> Codes:
    return codes


def checked(name: str, q: Any) -> QuantizedArray:
    """Returns `q` if it is a `QuantizedArray`; raises a `TypeError` otherwise."""
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"{name} must be a QuantizedArray, got {type(q).__name__}")
    return q


def _check_codes(codes: Codes, format: Format, matrix: Matrix) -> None:
    """Raises a `TypeError` unless the codes of one matrix can be cast to the format's dtypes."""
    for name, want in _codes_of(format, matrix)._asdict().items():
        x = getattr(codes, name)
        if want is None or x is None:
            continue
        kinds = {jnp.issubdtype(each.dtype, jnp.floating) for each in (x, want)}
        # A cast would change codes of 8 bits. Smaller codes fit any dtype of their kind.
        fits = len(kinds) == 1 and (name != "codes" or format.bits < 8)
        if x.shape != want.shape or not (fits or x.dtype == want.dtype):
            raise TypeError(
                f"{name} of {format} must be {want.dtype} of shape {want.shape} for each matrix, "
                f"got {x.dtype} of shape {x.shape}"
            )


def _check_ranges(codes: Codes, format: Format, matrix: Matrix) -> None:
    """Raises a `ValueError` unless the integers of one or more matrices fit into the format."""
    for name, want in _codes_of(format, matrix)._asdict().items():
        x = getattr(codes, name)
        if x is None or want is None or want.dtype != np.uint8:
            continue
        most = 255 if name == "scales" else 2**format.bits - 1
        signed = most == 15 and functions_of(format).may_have_zero_points
        advice = "; add 8 to signed codes and zero points" if signed else ""
        rule = f"{name} of {format} must be in 0..{most}"
        if x.dtype == jnp.int4:  # often in traced code, where values are unknown
            raise ValueError(f"{rule}, got dtype {x.dtype}{advice}")
        if x.size and not isinstance(x, jax.core.Tracer):
            with jax.ensure_compile_time_eval():
                low, high = int(x.min()), int(x.max())
            if low < 0 or high > most:
                raise ValueError(f"{rule}, got {low}..{high}{advice}")


def _check_scales(scales: ArrayLike, format: Format) -> None:
    """Raises a `ValueError` if a finite scale is so large that kernels would overflow.

    Args:
      scales: as given, because a cast to float32 would make infinities of some scales.
      format: the format of the scales.
    """
    if isinstance(scales, jax.core.Tracer):
        return
    below = functions_of(format).scales_below
    xp: Any = jnp if isinstance(scales, jax.Array) else np
    with jax.ensure_compile_time_eval(), np.errstate(over="ignore"):
        x = xp.asarray(scales)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return
        sizes = xp.abs(x.astype(xp.promote_types(x.dtype, np.float32)))
        largest = float(xp.max(sizes, initial=0, where=xp.isfinite(sizes)))
        if np.float32(largest) >= below:
            raise ValueError(
                f"scales of {format} must be less than {below:g} (2^{np.log2(below):.0f}), "
                f"got one of magnitude {largest:g}"
            )


@functools.lru_cache(maxsize=1024)
def _codes_of(format: Format, matrix: Matrix) -> Codes:
    """Returns shapes and dtypes of the `Codes` of one matrix."""
    functions = functions_of(format)

    def unpacked(x: jax.Array) -> Codes:
        assert functions.quantize is not None and functions.unpack is not None
        return functions.unpack(functions.quantize(x, format), format, matrix)

    return jax.eval_shape(unpacked, jax.ShapeDtypeStruct(matrix, jnp.float32))


@dataclasses.dataclass(frozen=True)
class _InStep:
    """Weights that a program quantises or packs each time it runs, for `explain`."""

    format: Format
    shape: tuple[Any, ...]

    op = "quantize"

    def plan(self) -> Plan[_InStep]:
        reason = "quantise weights once, when they are loaded, and pass them as an argument"
        return Plan(self, COMPOSED, reason)

    def __str__(self) -> str:
        return f"quantises or packs weights in each call: {self.format} {list(self.shape)}"


def _of_parts(parts: Parts, matrix: Any, format: Format) -> QuantizedArray:
    q = QuantizedArray(*parts, format=format, matrix=tuple(matrix))
    if isinstance(q.values, jax.core.Tracer) and format.layout == "packed":
        noted(jnp.zeros((), jnp.int32), _InStep(format, q.shape))  # a scalar, which no axis splits
    return q


@functools.partial(jax.jit, static_argnums=1)
def _quantized(x: jax.Array, format: Format) -> Parts:
    quantize = functions_of(format).quantize
    assert quantize is not None

    def run(x: jax.Array) -> Parts:
        return _each(lambda x: quantize(x.astype(jnp.float32), format), x, x.shape[:-2])

    k, n = x.shape[-2:]
    return _split_alike(run, x, x.ndim, format, (k, n))


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def _packed(
    read: Callable[[Any], Codes],
    stored: Any,
    format: Format,
    leading: tuple[int, ...],
    matrix: Matrix,
) -> Parts:
    functions = functions_of(format)

    def of_one(stored: Any) -> Parts:
        codes = read(stored)
        wanted = _codes_of(format, codes.codes.shape)
        found = [
            None if x is None else x.astype(w.dtype) for x, w in zip(codes, wanted, strict=True)
        ]
        assert functions.pack is not None
        return functions.pack(Codes(*found), format)

    def run(stored: Any) -> Parts:
        return _each(of_one, stored, leading)

    return _split_alike(run, stored, len(leading), format, matrix)


def _split_alike(
    run: Callable[[Any], Parts], arrays: Any, rank: int, format: Format, matrix: Matrix
) -> Parts:
    """Returns `run(arrays)`, which explicit mesh axes split like the first of `arrays`.

    Nothing says how such axes split the reshaped arrays inside of `run`, so XLA decides about them.
    Only the first `rank` dimensions are split, and k and n only into whole groups and records.
    """
    types = [jax.typeof(x) for x in jax.tree.leaves(arrays)]
    if not is_split_explicitly(types):
        return run(arrays)
    sharding = types[0].sharding
    mesh = sharding.mesh
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        q = _of_parts(jax.eval_shape(run, struct), matrix, format)
    entries = list(sharding.spec[:rank])
    for dim in range(len(q.leading), len(entries)):
        count = math.prod(mesh.shape[axis] for axis in names_of(entries[dim]))
        try:
            check_slices("x", q, (count, 1) if dim == len(q.leading) else (1, count))
        except ValueError:
            entries[dim] = None
    specs = q.specs(PartitionSpec(*entries))
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.sharding.auto_axes(run, out_sharding=Parts(**placed.arrays))(arrays)


def _each(function: Any, arrays: Any, leading: tuple[int, ...]) -> Any:
    """Applies `function` to one matrix after the other."""
    if not leading:
        return function(arrays)
    rank, count = len(leading), math.prod(leading)
    flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[rank:]), arrays)
    out = lax.map(function, flat)
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), out)
