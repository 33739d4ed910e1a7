"""Activations of an expert's MLP: by name, as a function, or with the parameters of a model.

A kernel that applies an activation needs only the fields of `Activation`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arguments import checked_boolean, checked_real
from jax_grouped_gemm._src.arrays import at_least_float32

# For gates beyond this number, all functions equal their limits, even in float64. 1024^3 (for
# "gelu_tanh") is finite in float32.
_SATURATED = 1024.0


def _saturating(x: jax.Array) -> jax.Array:
    """Clips `x` for a function that is constant past `_SATURATED`, so that its slope there is zero.

    Without clipping, the slope for a large gate would be zero times infinity, because powers of the
    gate overflow.
    """
    return jnp.where(jnp.abs(x) > _SATURATED, jnp.sign(x) * _SATURATED, x)


def _silu(gate: jax.Array, alpha: float = 1.0) -> jax.Array:
    return gate * jax.nn.sigmoid(alpha * _saturating(gate))


def _gelu(gate: jax.Array) -> jax.Array:
    return 0.5 * gate * lax.erfc(-_saturating(gate) * math.sqrt(0.5))


def _gelu_tanh(gate: jax.Array) -> jax.Array:
    x = _saturating(gate)
    return 0.5 * gate * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Elementwise functions by name. `jax.nn.gelu` is "gelu_tanh", its default approximation."""


@dataclasses.dataclass(frozen=True)
class Activation:
    """Computes function(gate) * (up + up_offset), with clipping before or after the function.

    Attributes:
      function: a name ("silu", "gelu", "gelu_tanh", "relu", "relu2") or any elementwise function.
      alpha: for "silu", which then is gate * sigmoid(alpha * gate).
      limit: if given, gate is clipped to at most `limit`, and up to [-limit, limit].
      up_offset: added to up.
      limit_after: whether `limit` clips function(gate) instead of gate, as in Ling 3:
        min(silu(gate), limit) * clip(up, -limit, limit). No kernel fuses this option.
    """

    function: str | Callable[[jax.Array], jax.Array] = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    limit_after: bool = False

    def __post_init__(self):
        is_name = isinstance(self.function, str) and self.function in FUNCTIONS
        if not is_name and not callable(self.function):
            raise ValueError(
                f"function must be callable or one of {sorted(FUNCTIONS)}, got {self.function!r}"
            )
        for name in ("alpha", "up_offset", "limit"):
            if name != "limit" or self.limit is not None:
                object.__setattr__(self, name, checked_real(name, getattr(self, name)))
        if self.alpha != 1 and self.function != "silu":
            raise ValueError(f"alpha is a parameter of 'silu', got {self.function!r}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive or None, got {self.limit!r}")
        if checked_boolean("limit_after", self.limit_after) and self.limit is None:
            raise ValueError("limit_after needs a limit, got limit=None")

    def __call__(self, gate: jax.Array, up: jax.Array | None = None) -> jax.Array:
        """Returns the hidden layer of `gate` and `up`, or of `gate` alone if experts have no up."""
        if self.limit is not None and not self.limit_after:
            gate = _at_most(gate, self.limit)
        if self.alpha != 1:
            hidden = _silu(gate, self.alpha)
        else:
            function = self.function
            hidden = (FUNCTIONS[function] if isinstance(function, str) else function)(gate)
        if self.limit is not None and self.limit_after:
            hidden = _at_most(hidden, self.limit)
        if up is None:
            return hidden
        if self.limit is not None:
            up = -_at_most(-_at_most(up, self.limit), self.limit)
        return hidden * (up + self.up_offset if self.up_offset else up)

    def __str__(self) -> str:
        function = self.function
        if not isinstance(function, str):
            function = getattr(function, "__name__", repr(function))
        options = [
            f"{field.name}={getattr(self, field.name):g}"
            for field in dataclasses.fields(self)
            if field.name != "function" and getattr(self, field.name) != field.default
        ]
        return f"{function}[{', '.join(options)}]" if options else function


def _at_most(x: jax.Array, limit: float) -> jax.Array:
    # At the limit itself, `minimum` has slope 1/2, but the kernels and `where` have slope 1.
    return jnp.where(x > limit, limit, x)


ACTIVATIONS = {name: Activation(name) for name in FUNCTIONS} | {
    "swiglu_oai": Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0),
    "clamped_silu": Activation("silu", limit=10.0),
}
"""Activations by name. GPT-OSS uses "swiglu_oai", DeepSeek-V4 uses "clamped_silu"."""

_KNOWN = {jax.nn.silu: "silu", jax.nn.gelu: "gelu_tanh", jax.nn.relu: "relu"}


def as_activation(activation: str | Callable | Activation) -> Activation:
    """Returns `activation` as an `Activation`; recognises silu, gelu and relu of `jax.nn`.

    Raises:
      ValueError: no activation has this name.
      TypeError: `activation` is neither a name nor callable.
    """
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be callable or one of {sorted(ACTIVATIONS)}, got {activation!r}"
            )
        return ACTIVATIONS[activation]
    if not callable(activation):
        raise TypeError(
            f"activation must be callable or one of {sorted(ACTIVATIONS)}, got {activation!r}"
        )
    return Activation(_KNOWN.get(activation, activation))


def closes_over_traced(activation: Activation, rows: int, columns: int) -> bool:
    """Returns whether the activation's function, applied to [rows, columns], reads traced values.

    Such a function cannot be a primitive's parameter, because parameters must be static.
    """
    function = activation.function
    if isinstance(function, str):
        return False
    traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((rows, columns), jnp.float32))
    return any(isinstance(x, jax.core.Tracer) for x in traced.consts)


def hidden_layer(
    activation: Activation, gate: jax.Array, up: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    """Returns activation(gate, up) * weights for [m, F], [m, F] and [m].

    It computes in float32 at least, and rounds once to the dtype of `gate`.
    """
    dtype = at_least_float32(gate.dtype)
    hidden = activation(gate.astype(dtype), None if up is None else up.astype(dtype))
    if weights is not None:
        hidden = hidden * weights.astype(dtype)[:, None]
    return hidden.astype(gate.dtype)
