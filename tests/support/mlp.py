"""MLPs of experts in float64 NumPy, a row at a time, and random operands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.ops import random


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gated(g, s, slope):
    """Returns g s and its derivative, where s = sigmoid(z) and slope = dz/dg."""
    return g * s, s + g * s * (1 - s) * slope


def _silu(g, alpha=1.0):
    return _gated(g, _sigmoid(alpha * g), alpha)


def _gelu_tanh(g):
    # (1 + tanh y) / 2 = sigmoid(2 y), which does not cancel where it is tiny.
    c = math.sqrt(8 / math.pi)
    s = _sigmoid(c * (g + 0.044715 * g**3))
    return g * s, s + g * s * (1 - s) * c * (1 + 3 * 0.044715 * g**2)


def _gelu(g):
    normal = 0.5 * np.vectorize(math.erfc, otypes=[float])(-g / math.sqrt(2))
    return g * normal, normal + g * np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)


def _relu(g):
    return np.maximum(g, 0), np.where(g > 0, 1.0, 0.0)


def _relu2(g):
    return np.maximum(g, 0) ** 2, 2 * np.maximum(g, 0)


UNCLIPPED = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "relu": _relu,
    "relu2": _relu2,
}
CLIPPED = {  # alpha, limit, what is added to up
    "swiglu_oai": (1.702, 7.0, 1.0),
    "clamped_silu": (1.0, 10.0, 0.0),
}
ACTIVATIONS = (*UNCLIPPED, *CLIPPED)
# All kernels have these activations. Their sigmoid is of a polynomial of degree 3 at most.
FUSED = ("silu", "gelu_tanh", *CLIPPED)

STATIC = ("activation", "implementation", "recipe")  # options of `ragged_mlp` that are no arrays


def activated(name: str, gate, up):
    """Returns the activation of gate, the factor it is multiplied by, and the slopes of both."""
    gate, up = np.asarray(gate).astype(np.float64), np.asarray(up).astype(np.float64)
    if name in UNCLIPPED:
        value, slope = UNCLIPPED[name](gate)
        return value, up, slope, np.ones_like(up)
    alpha, limit, shift = CLIPPED[name]
    value, slope = _silu(np.minimum(gate, limit), alpha)
    inside = np.abs(up) <= limit
    return (
        value,
        np.clip(up, -limit, limit) + shift,
        np.where(gate <= limit, slope, 0),
        1.0 * inside,
    )


def linear(x, w, b):
    """Returns x w + b in float64, and the error of a kernel: 2^9 standard deviations.

    Sums of float32 may be rounded to bfloat16. The standard deviation of this error counts as 2^-9
    of the sum, half of the largest error.
    """
    y = x @ w + (0 if b is None else b)
    return y, np.abs(y) + np.abs(x) @ np.abs(w) * (len(w) * 2.0**-14)


def hidden_layer(x, wi_0, wi_1, b0, b1, activation):
    """Returns the hidden layer of an expert in float64, and its error like `linear`."""
    gate, gate_error = linear(x, wi_0, b0)
    up, up_error = (np.ones_like(gate), 0) if wi_1 is None else linear(x, wi_1, b1)
    with np.errstate(over="ignore"):
        value, factor, *slopes = activated(activation, gate, up)
    hidden = value * factor
    errors = [gate_error * slopes[0] * factor, up_error * slopes[1] * value, hidden]
    # Sigmoids of kernels are off by at most 2.3e-7, and hardly where gates are large.
    errors.append(np.clip(gate, -9, 9) * factor * 2.0**-13)
    return hidden, np.sqrt(sum(error**2 for error in errors))


@dataclass
class Case:
    """Operands of `ragged_mlp`: x [T, D] with rows [m], or x [m, D] if rows is None."""

    x: np.ndarray
    wi_0: np.ndarray
    wi_1: np.ndarray
    wo: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray | None = None
    weights: np.ndarray | None = None
    offset: int | None = None

    @property
    def factors(self):
        """The operands that have gradients."""
        given = self.x, self.wi_0, self.wi_1, self.wo
        return given if self.weights is None else (*given, self.weights)

    def run(self, function, x, wi_0, wi_1, wo, weights=None, **options):
        """Calls `function` with these operands and with the indices of the case."""
        rows = None if self.rows is None else jnp.asarray(self.rows)
        options = dict(rows=rows, weights=weights, group_offset=self.offset) | options
        return function(x, wi_0, wi_1, wo, jnp.asarray(self.sizes), **options)

    def value(self, **options):
        """Returns y of `ragged_mlp`, compiled once for cases of equal shapes and options."""
        return _value(*self._arguments(options))

    def value_and_gradients(self, dy, **options):
        """Returns y and the gradients of the factors for the gradient dy, compiled like `value`."""
        return _value_and_gradients(*self._arguments(options), dy)

    def _arguments(self, options):
        static = {n: options.pop(n) for n in STATIC if n in options} | dict(offset=self.offset)
        return tuple(static.items()), self.factors, (self.sizes, self.rows), options

    @property
    def on_rows(self) -> np.ndarray:
        """x [m, D] in float64."""
        x = np.asarray(self.x).astype(np.float64)
        return x if self.rows is None else x[self.rows]

    @property
    def windows(self):
        """The rows of each local group."""
        return oracle.group_rows(self.sizes, self.offset or 0, len(self.wi_0), len(self.on_rows))

    def exact(self, activation="silu", biases=(None, None, None)) -> np.ndarray:
        """Returns y [m, D] in float64, computed one row at a time."""
        matrices = [np.asarray(w).astype(np.float64) for w in (self.wi_0, self.wi_1, self.wo)]
        out = np.zeros((len(self.on_rows), matrices[2].shape[2]))
        for expert, (start, end) in enumerate(self.windows):
            wi_0, wi_1, wo = (w[expert] for w in matrices)
            b0, b1, bo = (0 if b is None else np.asarray(b, np.float64)[expert] for b in biases)
            for row in range(start, end):
                x = self.on_rows[row]
                hidden, _ = hidden_layer(x, wi_0, wi_1, b0, b1, activation)
                weight = 1.0 if self.weights is None else float(self.weights[row])
                out[row] = weight * (hidden @ wo + bo)
        return out


def _layer(static, factors, indices, options):
    static = dict(static)
    one = Case(*factors[:4], *indices, *factors[4:], offset=static.pop("offset"))
    return partial(one.run, jgg.ragged_mlp, **static, **options)


@partial(jax.jit, static_argnums=0)
def _value(static, factors, indices, options):
    return _layer(static, factors, indices, options)(*factors)


@partial(jax.jit, static_argnums=0)
def _value_and_gradients(static, factors, indices, options, dy):
    y, vjp = jax.vjp(_layer(static, factors, indices, options), *factors)
    return y, *vjp(dy.astype(y.dtype))


def case(
    rng: np.random.Generator,
    *,
    tokens=24,
    top_k=2,
    embed=16,
    hidden=24,
    experts=5,
    dtype=np.float32,
    with_rows=True,
    with_weights=True,
    sizes=None,
    offset=None,
    local=None,
    spread=1.0,
) -> Case:
    """Returns a random case, whose gates are of the magnitude of `spread`."""
    m = tokens * top_k
    local = experts if local is None else local
    x = random(rng, (tokens if with_rows else m, embed), dtype)
    wi_0, wi_1 = (
        (spread * max(embed, 1) ** -0.5 * rng.standard_normal((local, embed, hidden))).astype(dtype)
        for _ in range(2)
    )
    wo = (max(hidden, 1) ** -0.5 * rng.standard_normal((local, hidden, embed))).astype(dtype)
    rows = rng.permutation(np.repeat(np.arange(tokens, dtype=np.int32), top_k))
    return Case(
        x,
        wi_0,
        wi_1,
        wo,
        sizes_of.multinomial(rng, m, experts) if sizes is None else np.asarray(sizes, np.int32),
        rows if with_rows else None,
        rng.uniform(0.2, 1, m).astype(np.float32) if with_weights else None,
        offset,
    )
