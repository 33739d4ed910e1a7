"""Muon: momentum whose updates are orthogonalised, for all matrices of a model in grouped launches.

Newton-Schulz orthogonalisation needs two symmetric products a step. Both are rank-k updates, and
one launch computes each for every matrix of the model, whatever their shapes.

Muon is described at https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped_gemm._src.lists.rank_k.api import grouped_syrk

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x (a + b x^2 + c x^4), which moves singular values in (0, 1] to about 1 within five steps."""


class GradientTransformation(NamedTuple):
    """A pair of functions that Optax takes for one of its own."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class MuonState(NamedTuple):
    """The running sum of gradients, shaped like the parameters."""

    momentum: Any


def orthogonalize(
    matrices: Sequence[jax.Array],
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    dtype: DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
) -> list[jax.Array]:
    """U V^T of each matrix U S V^T, nearly: by Newton-Schulz iteration, without a decomposition.

    Args:
      matrices: arrays [..., m, n] of any shapes, floating point; leading dimensions count matrices.
      steps: iterations. Five bring singular values above 0.002 of the Frobenius norm into
        0.68 to 1.21.
      coefficients: of the iteration X <- a X + (b A + c A^2) X with A = X X^T.
      dtype: what is multiplied; bfloat16, float16 and float32 take the CUDA kernel.
      implementation: as for `grouped_syrk`.

    Returns:
      Arrays shaped like `matrices`, of their dtypes.
    """
    if not matrices:
        return []
    a, b, c = coefficients
    # Wide, so that the Gram matrices are the small ones.
    is_tall = [x.shape[-2] > x.shape[-1] for x in matrices]
    xs = [_normalized(_transposed_if(tall, x)) for tall, x in zip(is_tall, matrices, strict=True)]
    xs = [x.astype(dtype).reshape(-1, *x.shape[-2:]) for x in xs]
    for _ in range(steps):
        grams = grouped_syrk(xs, symmetrize_output=True, implementation=implementation)
        # A is symmetric, so A A^T is A^2.
        polynomials = grouped_syrk(
            grams, grams, alpha=c, beta=b, symmetrize_output=True, implementation=implementation
        )
        xs = [a * x + p @ x for x, p in zip(xs, polynomials, strict=True)]
    return [
        _transposed_if(tall, x).reshape(like.shape).astype(like.dtype)
        for tall, x, like in zip(is_tall, xs, matrices, strict=True)
    ]


def _transposed_if(condition: bool, x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2) if condition else x


def _normalized(x: jax.Array) -> jax.Array:
    """Scaled so that no singular value exceeds one."""
    x = x.astype(jnp.float32)
    return x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)


def muon(
    learning_rate: float,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    implementation: str | None = None,
) -> GradientTransformation:
    """Muon as an Optax-compatible transformation of gradients.

    Every leaf [..., m, n] is a stack of weight matrices. Vectors, embeddings and output heads want
    another optimiser, which `optax.multi_transform` combines with this one.

    Args:
      learning_rate: scale of the updates.
      momentum: decay of the running sum of gradients.
      nesterov: whether to look ahead by one gradient.
      steps: Newton-Schulz iterations, see `orthogonalize`.
      implementation: as for `grouped_syrk`.

    Returns:
      A pair (init, update): `init(params)` and `update(gradients, state, params=None)`, which
      returns (updates, state).

    Raises:
      ValueError: by `init`, for a leaf that is not a matrix.
    """

    def init(params):
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if leaf.ndim < 2:
                name = jax.tree_util.keystr(path)
                raise ValueError(f"Muon updates matrices, got {name} of shape {leaf.shape}")
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(gradients, state, params=None):
        del params
        total = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, gradients)
        ahead = total
        if nesterov:
            ahead = jax.tree.map(lambda m, g: momentum * m + g, total, gradients)
        leaves, structure = jax.tree.flatten(ahead)
        leaves = orthogonalize(leaves, steps=steps, implementation=implementation)
        updates = [-learning_rate * max(1.0, x.shape[-2] / x.shape[-1]) ** 0.5 * x for x in leaves]
        return jax.tree.unflatten(structure, updates), MuonState(total)

    return GradientTransformation(init, update)
