"""`QuantizedArray`: matrices in a `Format`, as one pytree."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
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
)


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """Matrices [..., k, n] in a quantised format: a pytree of their arrays.

    `quantize` and `from_codes` make one, and `checkpoints` reads them from files. Leading
    dimensions are those of the arrays, so that `jax.lax.scan`, `jax.vmap`, slices of the experts
    and `jax.shard_map` over them work as for an array of weights.

    Attributes:
      values: the elements as the format stores them.
      scales: those of groups or blocks, or None.
      channel_scales: float32, those of columns, or None.
      zero_points: uint8, those of groups, or None.
      format: a `Format`, static.
      matrix: k and n, static.

    Args:
      values, scales, channel_scales, zero_points: the arrays.
      format: a `Format`, or the name of one.
      matrix: k and n. By default the last two dimensions of `values`, where the format does not
        pack them.

    Raises:
      TypeError: an array that the format needs is missing or has another shape or dtype.
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
        self.format = named(format)
        if matrix is None:
            if self.format.values_rank != 2:
                raise TypeError(f"matrix must be (k, n) for the format {self.format}")
            matrix = tuple(values.shape[-2:])
        k, n = (checked_int("matrix", size) for size in matrix)
        self.matrix = k, n
        self._parts = Parts(values, scales, channel_scales, zero_points)
        self._check()

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
        """What `dequantize` returns by default."""
        return np.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        """What all arrays take."""
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(self))

    def dequantize(self, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
        """The matrices [..., k, n] as an array of `dtype`."""
        dtype = canonical_dtype("dtype", dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype must be floating, got {dtype}")
        out = primitive.dequantize(self._flat(), self.format, self.matrix, dtype)
        return out.reshape(self.shape)

    def unpack(self) -> Codes:
        """The codes [..., k, n], scales and zero points, as `from_codes` takes them.

        Exact, but for the codes of blocks whose scale is NaN.

        Raises:
          NotImplementedError: the format is stored as it is, and has nothing to unpack.
        """
        unpack = functions_of(self.format).unpack
        if unpack is None:
            raise NotImplementedError(f"arrays of the format {self.format} are not packed")
        codes = jax.vmap(lambda parts: unpack(parts, self.format, self.matrix))(self._flat())
        return jax.tree.map(lambda x: x.reshape(*self.leading, *x.shape[1:]), codes)

    def to_dict(self) -> dict[str, Any]:
        """Plain arrays, for checkpoints: those that there are, and "format", JSON as uint8."""
        text = json.dumps(as_json(self.format, self.matrix)).encode()
        arrays = {name: x for name, x in self._parts._asdict().items() if x is not None}
        return arrays | {"format": np.frombuffer(text, np.uint8)}

    @classmethod
    def from_dict(cls, arrays: Any) -> QuantizedArray:
        """The inverse of `to_dict`.

        Raises:
          ValueError: the format is not registered, or in another version of its layout.
        """
        rest = dict(arrays)
        format, matrix = of_json(json.loads(np.asarray(rest.pop("format")).tobytes()))
        return cls(**rest, format=format, matrix=matrix)

    def _flat(self) -> Parts:
        """With one leading dimension."""
        rank, count = len(self.leading), math.prod(self.leading)
        return jax.tree.map(lambda x: jnp.reshape(x, (count, *x.shape[rank:])), self._parts)

    def _check(self) -> None:
        """Raises a `TypeError` unless the arrays are those of the format."""
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
        return keyed, (self.format, self.matrix)

    def tree_flatten(self) -> Any:
        return tuple(self._parts), (self.format, self.matrix)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> QuantizedArray:
        # No checks: JAX puts things in the place of arrays that are none.
        array = object.__new__(cls)
        array.format, array.matrix = static
        array._parts = Parts(*leaves)
        return array


@functools.lru_cache(maxsize=1024)
def _parts_of(format: Format, matrix: Matrix) -> Parts:
    """Shapes and dtypes of the arrays of one matrix."""
    quantize = functions_of(format).quantize
    assert quantize is not None
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.eval_shape(
            lambda x: quantize(x, format), jax.ShapeDtypeStruct(matrix, jnp.float32)
        )


# Exported programs take and return arrays; the name and the aux data are part of what is written.
export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="jax_grouped_gemm.QuantizedArray",
    serialize_auxdata=lambda static: json.dumps(as_json(*static)).encode(),
    deserialize_auxdata=lambda text: of_json(json.loads(bytes(text))),
)
