"""`QuantizedArray`, the pytree of the arrays of matrices in a `Format`."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_grouped_gemm._src.arguments import canonical_dtype, checked_int
from jax_grouped_gemm._src.quantized import primitive
from jax_grouped_gemm._src.quantized.format import (
    Codes,
    Format,
    Matrix,
    Parts,
    as_json,
    functions_of,
    named,
    of_json,
    with_values,
)


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """Matrices [..., k, n] in a quantised format: a pytree of their arrays.

    `quantize` and `from_codes` return `QuantizedArray`s, and `checkpoints` reads them from files.
    All arrays have the same leading dimensions, so that `jax.lax.scan`, `jax.vmap`, slices of the
    experts and `jax.shard_map` over these dimensions work as for an array of weights.

    Attributes:
      values: the elements as the format stores them.
      scales: scales of groups or blocks as the format stores them, or None; see `unpack`.
      channel_scales: float32, scales of columns, or None.
      zero_points: uint8, the zero points of groups, or None.
      format: a `Format`, static.
      matrix: k and n. If the arrays are slices along k or n, as in `jax.shard_map`, k and n are the
        sizes of the slice.

    Args:
      values, scales, channel_scales, zero_points: the arrays.
      format: a `Format`, or the name of one.
      matrix: k and n. The default is the last two dimensions of `values`; formats that pack
        `values` have no default.

    Raises:
      TypeError: an array that the format needs is missing or has another shape or dtype, or
        `matrix` is not a pair of integers.
      ValueError: `format` is not registered.
    """

    def __init__(
        self,
        values: Any,
        scales: Any = None,
        channel_scales: Any = None,
        zero_points: Any = None,
        *,
        format: Format | str,
        matrix: Matrix | None = None,
    ):
        if not hasattr(values, "dtype"):
            raise TypeError(f"values must be an array, got {type(values).__name__}")
        if isinstance(format, str):
            self.format = with_values(format, values.dtype)
        else:
            self.format = named(format)
        if matrix is None:
            if self.format.values_rank != 2:
                raise TypeError(f"matrix must be (k, n) for the format {self.format}")
            matrix = tuple(values.shape[-2:])
        if not isinstance(matrix, tuple | list) or len(matrix) != 2:
            raise TypeError(f"matrix must be (k, n), got {matrix!r}")
        k, n = (checked_int("matrix", size) for size in matrix)
        self._whole = k, n
        self._parts = Parts(values, scales, channel_scales, zero_points)
        self.check()

    @property
    def values(self) -> Any:
        return self._parts.values

    @property
    def scales(self) -> Any:
        return self._parts.scales

    @property
    def channel_scales(self) -> Any:
        return self._parts.channel_scales

    @property
    def zero_points(self) -> Any:
        return self._parts.zero_points

    @property
    def matrix(self) -> Matrix:
        """k and n, or those of the slice if the arrays are slices."""
        shape = getattr(self.values, "shape", None)
        if shape is None or functions_of(self.format).quantize is None:
            return self._whole
        sizes = dict(zip("kn", self._whole, strict=True))
        whole = _parts_of(self.format, self._whole).values.shape
        for letter, have, full in zip(
            dimensions(self.format).values, shape[-len(whole) :], whole, strict=True
        ):
            if letter and have != full:
                units = _units(self.format, letter)
                of_values, unit = units[0], math.lcm(*units)
                if sizes[letter] != of_values * full or of_values * have % unit:
                    raise TypeError(
                        f"a slice of a QuantizedArray along {letter} needs sizes in multiples of "
                        f"{unit}, got values {shape} of matrices {self._whole} in {self.format}"
                    )
                sizes[letter] = of_values * have
        return sizes["k"], sizes["n"]

    @property
    def leading(self) -> tuple[int, ...]:
        """The dimensions in front of k and n."""
        return tuple(self.values.shape[: len(self.values.shape) - self.format.values_rank])

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., k, n]."""
        return (*self.leading, *self.matrix)

    @property
    def ndim(self) -> int:
        """The number of dimensions of `shape`."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype that `dequantize` returns by default."""
        return np.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(self))

    def dequantize(self, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
        """Returns the matrices [..., k, n] as an array of `dtype`."""
        dtype = canonical_dtype("dtype", dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype must be floating, got {dtype}")
        return self.dequantized(dtype)

    def dequantized(self, dtype: np.dtype, reason: str = "") -> jax.Array:
        """Computes `dequantize` without checking `dtype`.

        Args:
          dtype: a floating-point dtype.
          reason: why no kernel multiplies by the packed matrices, for `explain`.
        """
        out = primitive.dequantize(self._flat(), self.format, self.matrix, dtype, reason)
        return out.reshape(self.shape)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The arrays by name, without those that are None."""
        return {name: x for name, x in self._parts._asdict().items() if x is not None}

    def unpack(self) -> Codes:
        """Returns the codes [..., k, n], scales and zero points that `from_codes` takes.

        MXFP4 codes are exact, except in groups whose scale is NaN. All other codes are exact. An
        FP8 code that is NaN makes the scale of its block or column NaN.

        Raises:
          NotImplementedError: the format does not pack its values.
          ValueError: the arrays are slices that cut blocks, as those of "fp8_128x128" may.
        """
        unpack = functions_of(self.format).unpack
        if unpack is None:
            raise NotImplementedError(f"arrays of the format {self.format} are not packed")
        self._check_blocks("unpack")
        codes = jax.vmap(lambda parts: unpack(parts, self.format, self.matrix))(self._flat())
        return jax.tree.map(lambda x: x.reshape(*self.leading, *x.shape[1:]), codes)

    def specs(self, spec: PartitionSpec) -> QuantizedArray:
        """Returns the `PartitionSpec` of every array, if `spec` splits the matrices [..., k, n].

        `jax.shard_map` and `jax.device_put` take the result:

            specs = q.specs(P("expert", None, "model"))
            q = jax.device_put(q, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))

        Each device then has a `QuantizedArray` of its slice. Slices along k and n must hold whole
        groups or blocks, except blocks of "fp8_128x128" in the layout "packed". In this layout they
        must be multiples of 64.

        Args:
          spec: for the dimensions [..., k, n].

        Returns:
          A `QuantizedArray` with specs in place of its arrays.

        Raises:
          ValueError: `spec` has more entries than the matrices have dimensions.
        """
        rank = len(self.leading)
        if len(spec) > rank + 2:
            raise ValueError(f"spec must have at most {rank + 2} entries for {self}, got {spec}")
        entries = [*spec, *[None] * (rank + 2 - len(spec))]
        of_letter = dict(k=entries[rank], n=entries[rank + 1])

        def of_array(letters):
            split = [of_letter.get(letter) for letter in letters]
            return PartitionSpec(*entries[:rank], *split)

        named = dimensions(self.format)
        return self._with(
            [
                None if x is None else of_array(letters)
                for x, letters in zip(self._parts, named, strict=True)
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain arrays by name, for checkpoints. "format" is JSON text as uint8.

        NumPy cannot read its files if they have arrays of float8_e5m2; Orbax can.

        Raises:
          ValueError: the arrays are slices that cut blocks.
        """
        self._check_blocks("to_dict")
        text = json.dumps(as_json(self.format, self.matrix)).encode()
        return self.arrays | {"format": np.frombuffer(text, np.uint8)}

    @classmethod
    def from_dict(cls, arrays: Any) -> QuantizedArray:
        """Returns the `QuantizedArray` from which `to_dict` made `arrays`.

        Raises:
          TypeError: an array is missing or has another shape or dtype.
          ValueError: the format is not registered, or the arrays have another version of its
            layout, or "format" is not what `to_dict` writes.
        """
        rest = dict(arrays)
        if not {"format", "values"} <= rest.keys() <= {"format", *Parts._fields}:
            raise ValueError(
                f"from_dict: arrays must have format and values, and no others than format, "
                f"{', '.join(Parts._fields)}; got {', '.join(rest)}"
            )
        text = np.asarray(rest.pop("format")).tobytes()
        try:
            described = json.loads(text)
        except ValueError as error:
            raise ValueError(f"from_dict: format must be JSON text, got {text[:40]!r}") from error
        format, matrix = of_json(described)
        dtypes = dict(values=format.values, scales=format.scales and format.scales.dtype)
        for name, dtype in dtypes.items():
            # NumPy's files keep the bytes of bfloat16 and FP8 arrays, but not their dtypes.
            x = rest.get(name)
            if isinstance(x, np.ndarray) and x.dtype == np.dtype(f"V{x.itemsize}"):
                rest[name] = x.view(dtype) if dtype and dtype.itemsize == x.itemsize else x
        q = cls(**rest, format=format, matrix=matrix)
        if q.matrix != matrix:  # the constructor took the arrays for slices of other matrices
            raise ValueError(
                f"from_dict: k and n in format must be {q.matrix}, as in the arrays of {q.format}, "
                f"got {matrix}"
            )
        return q

    def _flat(self) -> Parts:
        """Returns the arrays with all leading dimensions merged into one."""
        rank, count = len(self.leading), math.prod(self.leading)
        return jax.tree.map(lambda x: jnp.reshape(x, (count, *x.shape[rank:])), self._parts)

    def _check_blocks(self, name: str) -> None:
        """Raises a `ValueError` if the arrays are slices that cut blocks."""
        blocks = self.format.scales.block if self.format.scales else (None, None)
        for size, whole, block in zip(self.matrix, self._whole, blocks, strict=True):
            if size != whole and size % (block or 1):
                raise ValueError(f"{name}: slices must hold whole blocks of {block}, got {self}")

    def check(self) -> None:
        """Raises a `TypeError` unless the arrays have the shapes and dtypes of the format."""
        leading = self.leading
        if functions_of(self.format).quantize is None:
            return
        for name, want in _parts_of(self.format, self.matrix)._asdict().items():
            x = getattr(self._parts, name)
            if (x is None) != (want is None):
                raise TypeError(
                    f"{name} must be {'None' if want is None else 'an array'} for the format "
                    f"{self.format}, got {None if x is None else jax.typeof(x)}"
                )
            if x is not None and (x.shape, x.dtype) != ((*leading, *want.shape), want.dtype):
                raise TypeError(
                    f"{name} must be {want.dtype} of shape {(*leading, *want.shape)} for matrices "
                    f"{self.matrix} of the format {self.format}, got {x.dtype} of shape {x.shape}"
                )

    def __repr__(self) -> str:
        described = "?" if not hasattr(self.values, "shape") else f"{list(self.shape)}"
        return f"QuantizedArray({self.format}, {described})"

    def tree_flatten_with_keys(self) -> Any:
        keyed = [(jax.tree_util.GetAttrKey(n), x) for n, x in self._parts._asdict().items()]
        return keyed, (self.format, self._whole)

    def tree_flatten(self) -> Any:
        return tuple(self._parts), (self.format, self._whole)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> QuantizedArray:
        # Check nothing here, because JAX also unflattens trees whose leaves are not arrays.
        array = object.__new__(cls)
        array.format, array._whole = static
        array._parts = Parts(*leaves)
        return array

    def _with(self, parts: Any) -> QuantizedArray:
        return self.tree_unflatten((self.format, self._whole), parts)


@functools.lru_cache(maxsize=1024)
def _parts_of(format: Format, matrix: Matrix) -> Parts:
    """Returns shapes and dtypes of the arrays of one matrix."""
    quantize = functions_of(format).quantize
    assert quantize is not None
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.eval_shape(
            lambda x: quantize(x, format), jax.ShapeDtypeStruct(matrix, jnp.float32)
        )


@functools.lru_cache(maxsize=1024)
def dimensions(format: Format) -> Parts:
    """Returns the dimensions of each array of a matrix: "k", "n", or "" for neither."""
    if functions_of(format).quantize is None:
        if format.values_rank != 2:
            raise NotImplementedError(
                f"arrays of the format {format} cannot be split along k or n, because its "
                "dimensions are unknown: register a `quantize` function for it"
            )
        return Parts(("k", "n"), ("k", "n"), ("n",), ("k", "n"))
    small, tall, wide = (
        _parts_of(format, matrix)
        for matrix in ((_LONG, _LONG), (2 * _LONG, _LONG), (_LONG, 2 * _LONG))
    )

    def letters(x, with_k, with_n):
        if x is None:
            return ()
        sizes = zip(x.shape, with_k.shape, with_n.shape, strict=True)
        return tuple("k" if a < b else "n" if a < c else "" for a, b, c in sizes)

    return Parts(*map(letters, small, tall, wide))


_LONG = 4096
"""A size larger than that of any group, block or record."""


def _units(format: Format, letter: str) -> list[int]:
    """Returns the size of the least slice along k or n of each split array, `values` first."""
    arrays = zip(dimensions(format), _parts_of(format, (_LONG, _LONG)), strict=True)
    return [_LONG // x.shape[of.index(letter)] for of, x in arrays if letter in of]


def check_slices(name: str, q: QuantizedArray, devices: Matrix) -> None:
    """Raises a `ValueError` unless k and n of the matrices can be split over `devices` slices."""
    if functions_of(q.format).quantize is None:
        return
    for letter, size, count in zip("kn", q.matrix, devices, strict=True):
        unit = math.lcm(*_units(q.format, letter))
        if count > 1 and size % (unit * count):
            raise ValueError(
                f"{name} {q.shape} of the format {q.format} cannot be divided into {count} slices "
                f"along {letter}: each must be a multiple of {unit}"
            )


# Serialised programs store this name and the auxiliary data of a `QuantizedArray`, but no arrays.
export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="jax_grouped_gemm.QuantizedArray",
    serialize_auxdata=lambda static: json.dumps(as_json(*static)).encode(),
    deserialize_auxdata=lambda text: of_json(json.loads(bytes(text))),
)
