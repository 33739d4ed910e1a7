"""Functions for operations that take quantised weights.

An operation may get a `QuantizedArray` in place of an array of weights. If no kernel reads it
packed (see `plan`), `with_arrays` dequantises it to the dtype of the activations in each call. The
backward pass dequantises again instead of keeping the arrays, so only packed weights stay in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_grouped_gemm._src.arguments import as_array, has_group_checks
from jax_grouped_gemm._src.autodiff import recomputed
from jax_grouped_gemm._src.meshes import names_of
from jax_grouped_gemm._src.quantized.array import QuantizedArray, check_slices
from jax_grouped_gemm._src.quantized.format import functions_of
from jax_grouped_gemm._src.quantized.primitive import DEQUANTIZE

T = TypeVar("T")
Result = TypeVar("Result")


def with_arrays(
    function: str,
    compute: Callable[[T], Result],
    weights: T,
    *,
    x: jax.Array,
    name: str = "x",
    reason: str = "",
) -> Result:
    """Returns `compute(weights)` with arrays in place of quantised weights.

    Args:
      function: name of the public function, for messages.
      compute: function that multiplies x by the weights.
      weights: a pytree of arrays and one or more `QuantizedArray`s.
      x: the other operand; weights are dequantised to its dtype.
      name: name of x.
      reason: why no kernel multiplies packed weights, for `explain`.

    Raises:
      TypeError: a weight is quantised and x is not floating.
    """
    if not any(map(_is_quantized, jax.tree.leaves(weights, is_leaf=_is_quantized))):
        return compute(weights)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{function}: {name} must be floating where weights are quantised, got {x.dtype}"
        )

    def of_packed(weights: T) -> Result:
        return compute(_each(lambda q: q.dequantized(x.dtype, reason), weights))

    # `recomputed` traces its function, but checks of group sizes outside of `jax.jit` cannot be
    # traced.
    run = of_packed if has_group_checks() else recomputed(of_packed, policy=_not_weights)
    return run(weights)


def abstract_arrays(weights: T, dtype: np.dtype) -> T:
    """Returns the weights with abstract arrays of `dtype` in place of quantised weights."""
    return _each(lambda q: jax.ShapeDtypeStruct(q.shape, dtype), weights)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedArray)


def _each(make: Callable[[QuantizedArray], Any], weights: T) -> T:
    def of_one(x):
        return make(x) if _is_quantized(x) else x

    return jax.tree.map(of_one, weights, is_leaf=_is_quantized)


def _not_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Saves everything except dequantised weights, as a policy of `jax.checkpoint`."""
    return primitive is not DEQUANTIZE.primitive


TRANSFORMED = "the call is differentiated or vectorised"
"""Why a primitive's reference dequantises, which its rules under transformations trace."""

RECIPE = (
    "a recipe quantises rows and weights itself: give it weights of 16 or 32 bits, or quantise all "
    "weights with quantize(w, 'fp8_128x128', layout='rows') and leave out quantized="
)


def check_weights(
    function: str,
    weights: Mapping[str, Any],
    refused: Mapping[str, Any],
    *,
    instead: str = RECIPE,
    alike: tuple[str, ...] = (),
) -> None:
    """Raises a `TypeError` or `ValueError` unless quantised weights can be multiplied.

    Args:
      function: name of the public function, for messages.
      weights: arguments by name, quantised or not.
      refused: arguments that must be None or False if weights are quantised.
      instead: what to do if `refused` arguments are given, for messages.
      alike: names of weights that must all have the same format.
    """
    packed = {name: q for name, q in weights.items() if _is_quantized(q)}
    if not packed:
        return
    for argument, value in refused.items():
        # Compare with `is`, because an argument may be an array, which has no truth value.
        if value is not None and value is not False:
            names = " and ".join(packed)
            raise ValueError(
                f"{function}: {argument} cannot be used if {names} is quantised: {instead}"
            )
    for name, q in packed.items():
        if q.format.layout != "packed":
            raise ValueError(
                f"{function}: {name} has the format {q.format} in the layout {q.format.layout!r}, "
                "which products of two FP8 operands read; write quantize(..., layout='packed'), or "
                "give MLPs a recipe"
            )
    # Ask `packed` and not the weight, because a JAX array has an attribute `format` too.
    formats = {n: packed[n].format if n in packed else None for n in alike if n in weights}
    if len(set(formats.values())) > 1:
        found = " and ".join(str(format or "an array") for format in formats.values())
        raise TypeError(f"{function}: {' and '.join(formats)} must have one format, got {found}")


def product_of(
    function: str, lhs: QuantizedArray, name: str, rhs: QuantizedArray
) -> Callable[..., jax.Array]:
    """Returns the function that multiplies quantised rows `lhs` by quantised weights `rhs`.

    Raises:
      TypeError: no such function is registered, or arrays are slices that cut blocks.
    """
    lhs.check()
    rhs.check()
    product = functions_of(rhs.format).products.get(function)
    if product is None:
        raise TypeError(
            f"{function}: nothing multiplies rows of the format {lhs.format} by {name} of the "
            f"format {rhs.format} in the layout {rhs.format.layout!r}; dequantize() the rows"
        )
    return product


def as_weights(name: str, x: Any) -> Any:
    """Returns `x` if it is quantised, and otherwise `as_array(name, x)`."""
    return x if _is_quantized(x) else as_array(name, x)


def specs_of_weights(name: str, x: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """Returns the `PartitionSpec`s of the arrays of weights [g, k, n] that `spec` splits.

    Raises:
      ValueError: weights are quantised, and a device's slice would not fit the format.
    """
    if not _is_quantized(x):
        return spec
    sizes = [math.prod(mesh.shape[axis] for axis in names_of(entry)) for entry in spec]
    check_slices(name, x, (sizes[1], sizes[2]))
    return x.specs(spec)
