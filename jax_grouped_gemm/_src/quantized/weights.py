"""How operations take quantised weights: the one place where they meet a format.

`takes_quantized` decorates a public function. Of its weights that are quantised it makes arrays in
the dtype of the activations, once a call, and keeps none of them for the backward pass, which
dequantises again: the packed weights are all that stays in memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_grouped_gemm._src.arguments import as_array, has_group_checks
from jax_grouped_gemm._src.autodiff import recomputed
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import functions_of
from jax_grouped_gemm._src.quantized.primitive import DEQUANTIZE

F = TypeVar("F", bound=Callable[..., Any])


def takes_quantized(
    *weights: str, like: str, unless: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Has a function take a `QuantizedArray` for the arguments named `weights`.

    Args:
      *weights: arguments that are matrices [g, k, n].
      like: the argument in whose dtype they are multiplied.
      unless: arguments that must be false where weights are quantised, and what to do instead.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        name = function.__name__
        refused = dict(recipe=_RECIPE, quantized=_RECIPE) | dict(unless or {})

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(x, QuantizedArray) for x in (*args, *kwargs.values())):
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            packed = {w: given[w] for w in weights if isinstance(given.get(w), QuantizedArray)}
            if not packed:
                return function(*args, **kwargs)
            if isinstance(given[like], QuantizedArray):
                return _product(name, given[like], packed)(**given)
            _check(name, given, packed, refused)
            x = as_array(like, given[like])
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise TypeError(
                    f"{name}: {like} must be floating where weights are quantised, got {x.dtype}"
                )

            def of_packed(packed: dict[str, QuantizedArray]) -> Any:
                arrays = {w: q.dequantize(x.dtype) for w, q in packed.items()}
                return function(**(given | arrays))

            # Checks of group sizes outside of `jax.jit` cannot be traced.
            run = of_packed if has_group_checks() else recomputed(of_packed, policy=_not_weights)
            return run(packed)

        return wrapper  # type: ignore[return-value]

    return decorate


_RECIPE = (
    "a recipe quantises rows and weights itself: give it weights of 16 or 32 bits, or no recipe"
)


def _product(
    function: str, lhs: QuantizedArray, packed: Mapping[str, QuantizedArray]
) -> Callable[..., Any]:
    """What computes a function of two quantised operands.

    Raises:
      TypeError: nothing does.
    """
    (name, rhs), *_ = packed.items()
    product = functions_of(rhs.format).products.get(function)
    if product is None:
        raise TypeError(
            f"{function}: nothing multiplies rows of the format {lhs.format} by {name} of the "
            f"format {rhs.format} in the layout {rhs.format.layout!r}; dequantize() the rows"
        )
    return product


def _check(
    function: str,
    given: Mapping[str, Any],
    packed: Mapping[str, QuantizedArray],
    refused: Mapping[str, str],
) -> None:
    for argument, instead in refused.items():
        # An argument may be an array, which has no truth value.
        if given.get(argument) is not None and given[argument] is not False:
            names = " and ".join(packed)
            raise ValueError(f"{function}: {argument} where {names} is quantised: {instead}")
    for name, q in packed.items():
        if q.format.layout != "packed":
            raise ValueError(
                f"{function}: {name} has the format {q.format} in the layout {q.format.layout!r}, "
                "which products of two FP8 operands read; write quantize(..., layout='packed')"
            )
    if given.get("wi_1") is not None and ("wi_0" in packed or "wi_1" in packed):
        gate, up = (getattr(given[name], "format", None) for name in ("wi_0", "wi_1"))
        if gate != up:
            raise TypeError(
                f"{function}: wi_0 and wi_1 must have one format, got {gate or 'an array'} and "
                f"{up or 'an array'}"
            )


def _not_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint`: all is kept but weights that were dequantised."""
    return primitive is not DEQUANTIZE.primitive


def as_weights(name: str, x: Any) -> Any:
    """`x` if it is quantised, else as an array; raises as `as_array` does."""
    return x if isinstance(x, QuantizedArray) else as_array(name, x)


def spec_of_weights(function: str, name: str, x: Any, spec: PartitionSpec) -> PartitionSpec:
    """How to split all arrays of weights [g, k, n] that `spec` splits.

    Raises:
      NotImplementedError: they are quantised, and `spec` divides k or n.
    """
    if not isinstance(x, QuantizedArray):
        return spec
    experts, *others = spec
    if any(others):
        raise NotImplementedError(
            f"{function}: {name} is quantised, so that devices may divide experts but no matrix: "
            "leave out fsdp_axis and tensor_axis, or dequantize() first"
        )
    return PartitionSpec(experts)
