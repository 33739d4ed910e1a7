"""Optimisers: AdamW and any Optax chain that write FP8 weights, and Muon.

`adamw` and `quantized` make an `Optimizer`, whose state has the FP8 weights of the next forward
pass, written in the pass that updates the float32 weights.

`muon` is momentum whose updates are orthogonalised, for all matrices of a model in grouped
launches. Newton-Schulz orthogonalisation needs two symmetric products a step. Both are rank-k
updates, and one launch computes each for every matrix of the model, whatever their shapes.

Muon is described at https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import register_namedtuple_serialization
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    as_array,
    checked_boolean,
    checked_implementation,
)
from jax_grouped_gemm._src.lists.rank_k.api import grouped_syrk
from jax_grouped_gemm._src.optimizer.api import Optimizer, OptimizerState, adamw, quantized
from jax_grouped_gemm._src.optimizer.rules import AdamWState
from jax_grouped_gemm._src.optimizer.weights import experts

__all__ = [
    "AdamWState",
    "COEFFICIENTS",
    "GradientTransformation",
    "MuonState",
    "Optimizer",
    "OptimizerState",
    "adamw",
    "experts",
    "muon",
    "orthogonalize",
    "quantized",
]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x (a + b x^2 + c x^4): moves singular values in (0, 1] to about 1 in 5 steps."""

# No class: `optax.inject_hyperparams` takes whatever can be called for a schedule.
ITERATION_DTYPE = jnp.dtype(jnp.bfloat16)

Coefficients = Sequence[float] | Sequence[Sequence[float]]
Schedule = Callable[[jax.Array], ArrayLike]


class GradientTransformation(NamedTuple):
    """A pair of functions that Optax takes for one of its own."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class MuonState(NamedTuple):
    """Moments of the gradients, shaped like the parameters."""

    count: jax.Array  # type: ignore[assignment]  # int32, updates so far, under Optax's name
    mu: Any  # mean of the gradients
    nu: Any  # mean of their squares for leaves that are no matrices, None for matrices


register_namedtuple_serialization(MuonState, serialized_name="jax_grouped_gemm.optim.MuonState")


def orthogonalize(
    matrices: Iterable[jax.Array],
    *,
    steps: int = 5,
    coefficients: Coefficients = COEFFICIENTS,
    eps: ArrayLike = 1e-8,
    dtype: DTypeLike = ITERATION_DTYPE,
    implementation: Implementation = None,
) -> list[jax.Array]:
    """U V^T of each matrix U S V^T, nearly: by Newton-Schulz iteration, without a decomposition.

    Args:
      matrices: arrays [..., m, n] of any shapes, floating point; leading dimensions count matrices.
      steps: iterations, possibly traced. Five bring singular values above 0.002 of the Frobenius
        norm into 0.68 to 1.21.
      coefficients: (a, b, c) of the iteration X <- a X + (b A + c A^2) X with A = X X^T; or a
        sequence of such triples, one for each iteration, whose number then counts for `steps`.
      eps: added to the Frobenius norm by which every matrix is first divided.
      dtype: what is multiplied; bfloat16, float16 and float32 take the CUDA kernel.
      implementation: as for `grouped_syrk`.

    Returns:
      Arrays shaped like `matrices`, of their dtypes.

    Raises:
      TypeError: `matrices` is no sequence of real floating-point arrays of two dimensions at least,
        or `dtype` is not floating point.
      ValueError: `steps` is negative or `coefficients` are not triples.
    """
    triples, steps = _iterations(coefficients, steps)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be real floating point, got {np.dtype(dtype)}")
    matrices = _checked_matrices(matrices)
    # Wide, so that the Gram matrices are the small ones. What has no elements has no norm either.
    chosen = [i for i, x in enumerate(matrices) if x.size]
    is_tall = [matrices[i].shape[-2] > matrices[i].shape[-1] for i in chosen]
    wide = [_transposed_if(tall, matrices[i]) for tall, i in zip(is_tall, chosen, strict=True)]
    xs = [_normalized(x, eps).astype(dtype).reshape(-1, *x.shape[-2:]) for x in wide]
    rank_k = functools.partial(grouped_syrk, symmetrize_output=True, implementation=implementation)

    def iterate(xs, triple):
        a, b, c = triple
        grams = rank_k(xs)
        # A is symmetric, so A A^T is A^2.
        polynomials = rank_k(grams, grams, alpha=c, beta=b)
        return [a * x + p @ x for x, p in zip(xs, polynomials, strict=True)]

    if xs and isinstance(steps, jax.Array):
        xs = jax.lax.fori_loop(0, steps, lambda _, xs: iterate(xs, triples[0]), xs)
    elif xs:
        xs = functools.reduce(iterate, triples[:steps], xs)
    outs = list(matrices)
    for i, tall, like, x in zip(chosen, is_tall, wide, xs, strict=True):
        outs[i] = _transposed_if(tall, x.reshape(like.shape)).astype(like.dtype)
    return outs


def _iterations(coefficients: Coefficients, steps: Any) -> tuple[list[list[float]], Any]:
    """A triple of coefficients for each iteration, and the number of iterations."""
    try:
        table = np.asarray(coefficients, np.float64)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.ndim not in (1, 2) or table.shape[-1] != 3:
        raise ValueError(
            f"coefficients must be three numbers, or three for each iteration, got {coefficients!r}"
        )
    if table.ndim == 2:
        return table.tolist(), len(table)
    if isinstance(steps, jax.Array) and jnp.issubdtype(steps.dtype, jnp.integer):
        return [table.tolist()], steps
    if not isinstance(steps, int | np.integer) or isinstance(steps, bool) or steps < 0:
        raise ValueError(f"steps must be an integer that is not negative, got {steps!r}")
    return [table.tolist()] * int(steps), int(steps)


def _checked_matrices(matrices: Iterable[jax.Array]) -> list[jax.Array]:
    if hasattr(matrices, "ndim") or not isinstance(matrices, Iterable):
        shape = f" of shape {matrices.shape}" if hasattr(matrices, "shape") else ""
        raise TypeError(
            f"matrices must be a sequence of arrays, got {type(matrices).__name__}{shape}; "
            "orthogonalize([x]) takes one"
        )
    arrays = [as_array(f"matrices[{i}]", x) for i, x in enumerate(matrices)]
    for i, x in enumerate(arrays):
        if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"matrices[{i}] must be [..., m, n] of a real floating-point dtype, got {x.dtype} "
                f"of shape {x.shape}"
            )
    return arrays


def _transposed_if(condition: bool, x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2) if condition else x


def _normalized(x: jax.Array, eps: ArrayLike) -> jax.Array:
    """Scaled so that no singular value exceeds one."""
    x = x.astype(_wide(x.dtype))
    return x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)


def muon(
    learning_rate: ArrayLike | Schedule,
    ns_coeffs: Coefficients = COEFFICIENTS,
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: ArrayLike = 0.0,
    adam_learning_rate: ArrayLike | Schedule | None = None,
    consistent_rms: float | None = None,
    dtype: DTypeLike = ITERATION_DTYPE,
    implementation: Implementation = None,
) -> GradientTransformation:
    """Muon as an Optax-compatible transformation of gradients, named as `optax.contrib.muon`.

    A leaf [..., in, out] of two or more dimensions is a kernel that multiplies from the right, as
    in Flax, or a stack of them, such as the experts of a layer or the layers of a scan. Its update
    is its mean gradient orthogonalised, times sqrt(max(1, out / in)). Leaves of fewer dimensions
    get AdamW. What else should not be orthogonalised, such as embeddings, output heads and kernels
    of more than one input or output axis, goes to another optimiser by `optax.multi_transform`.

    With ``dtype=jnp.float32`` and float32 parameters this is `optax.contrib.muon`, step by step,
    but for three things. Optax takes leaves of exactly two dimensions for matrices. Moments are
    added up in float32 at least and keep their dtype, whatever the gradients have. And `adaptive`,
    `preconditioning` and dimension numbers are not offered.

    Args:
      learning_rate: scale of the updates, or a function of the number of earlier updates.
      ns_coeffs: coefficients of the Newton-Schulz iteration, see `orthogonalize`.
      ns_steps: Newton-Schulz iterations, see `orthogonalize`.
      beta: decay of the mean of gradients.
      eps: added to denominators: norms of matrices, and Adam's.
      weight_decay: the parameters times this are added to an orthogonalised update, before the
        learning rate. Needs `params` in `update`.
      weight_decay_mask: tree of booleans, a prefix of the parameters' tree, or a function of the
        parameters that returns one: which matrices decay. None: all.
      mu_dtype: of the mean of gradients; None: that of the parameters.
      nesterov: whether to look ahead by one gradient, in Adam too.
      adam_b1, adam_b2, adam_eps_root, adam_weight_decay: AdamW's, for leaves that are no matrices.
      adam_learning_rate: as `learning_rate`, for those; None: the same.
      consistent_rms: if given, orthogonalised updates are scaled by
        sqrt(max(in, out)) * consistent_rms instead (arXiv:2502.16982 has 0.2).
      dtype: of the Newton-Schulz iteration. Optax iterates in the dtype of the gradients.
      implementation: as for `grouped_syrk`.

    Returns:
      A pair (init, update): `init(params)` and `update(gradients, state, params=None)`, which
      returns (updates, state). Further keyword arguments of `update` are ignored.
    """
    # Raised here, what update would raise.
    _iterations(ns_coeffs, ns_steps)
    checked_boolean("nesterov", nesterov)
    checked_implementation(implementation)
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate

    def init(params):
        def second_moment(x):
            return None if jnp.ndim(x) >= 2 else jnp.zeros_like(x)

        return MuonState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda x: jnp.zeros_like(x, dtype=mu_dtype), params),
            nu=jax.tree.map(second_moment, params),
        )

    def update(gradients, state, params=None, **_):
        structure: Any
        leaves, structure = jax.tree.flatten(gradients)
        old_mus, old_nus = (structure.flatten_up_to(tree) for tree in (state.mu, state.nu))
        is_matrix = [nu is None for nu in old_nus]
        # The largest count stays what it is, so that it never becomes negative.
        count = jnp.minimum(state.count, jnp.iinfo(jnp.int32).max - 2) + 1

        rates = [beta if matrix else adam_b1 for matrix in is_matrix]
        mus = [_mean(*x) for x in zip(rates, old_mus, leaves, strict=True)]
        nus = [
            None if matrix else _mean(adam_b2, nu, jnp.square(g))
            for matrix, nu, g in zip(is_matrix, old_nus, leaves, strict=True)
        ]
        directions = [
            _direction(rate, mu, g, count, nesterov)
            for rate, mu, g in zip(rates, mus, leaves, strict=True)
        ]
        orthogonal = iter(
            orthogonalize(
                [x for matrix, x in zip(is_matrix, directions, strict=True) if matrix],
                steps=ns_steps,
                coefficients=ns_coeffs,
                eps=eps,
                dtype=dtype,
                implementation=implementation,
            )
        )

        def step(matrix, direction, nu):
            if matrix:
                return _shape_scale(direction.shape, consistent_rms) * next(orthogonal)
            return direction / (jnp.sqrt(_unbiased(adam_b2, nu, count) + adam_eps_root) + eps)

        updates = [step(*x) for x in zip(is_matrix, directions, nus, strict=True)]
        decays = [weight_decay if matrix else adam_weight_decay for matrix in is_matrix]
        updates = _with_decayed_weights(
            updates, structure, params, decays, weight_decay_mask, is_matrix
        )
        scales = {
            matrix: rate(state.count) if callable(rate) else rate
            for matrix, rate in ((True, learning_rate), (False, adam_learning_rate))
        }
        updates = [
            (-jnp.asarray(scales[matrix], u.dtype) * u).astype(jnp.promote_types(g.dtype, mu.dtype))
            for matrix, u, g, mu in zip(is_matrix, updates, leaves, old_mus, strict=True)
        ]
        return structure.unflatten(updates), MuonState(
            count, *(structure.unflatten(_cast(*x)) for x in ((mus, old_mus), (nus, old_nus)))
        )

    return GradientTransformation(init, update)


def _wide(*dtypes: DTypeLike) -> np.dtype:
    return functools.reduce(jnp.promote_types, dtypes, np.dtype(np.float32))


def _mean(decay: Any, old: jax.Array, new: jax.Array) -> jax.Array:
    """The exponentially decaying mean of what `old` is the mean of, and `new`."""
    dtype = _wide(old.dtype, new.dtype)
    return decay * old.astype(dtype) + (1 - decay) * new.astype(dtype)


def _unbiased(decay: Any, mean: jax.Array, count: jax.Array) -> jax.Array:
    """A mean of `count` values that began with zero, without the share of that zero."""
    return mean / (1 - decay**count).astype(mean.dtype)


def _direction(
    decay: Any, mu: jax.Array, gradient: jax.Array, count: jax.Array, nesterov: bool
) -> jax.Array:
    if not nesterov:
        return _unbiased(decay, mu, count)
    gradient = _unbiased(decay, gradient.astype(mu.dtype), count)
    return decay * _unbiased(decay, mu, count + 1) + (1 - decay) * gradient


def _shape_scale(shape: tuple[int, ...], consistent_rms: float | None) -> float:
    """The factor by which the update of a kernel [..., in, out] is multiplied."""
    fan_in, fan_out = shape[-2:]
    if consistent_rms is not None:
        return max(fan_in, fan_out) ** 0.5 * consistent_rms
    return max(1.0, fan_out / max(fan_in, 1)) ** 0.5


def _with_decayed_weights(updates, structure, params, decays, mask, is_matrix):
    """`updates` plus the parameters times their decay; `mask` says which matrices decay."""
    if all(isinstance(decay, int | float) and decay == 0 for decay in decays):
        return updates
    if params is None:
        raise ValueError("weight decay needs the parameters: pass params to update")
    mask = mask(params) if callable(mask) else mask
    if mask is None:
        masks = [True] * len(updates)
    else:
        masks = structure.flatten_up_to(
            jax.tree.map(lambda m, part: jax.tree.map(lambda _: m, part), mask, params)
        )
    weights = structure.flatten_up_to(params)
    return [
        u + decay * jnp.where(m, w.astype(u.dtype), 0) if matrix else u + decay * w.astype(u.dtype)
        for u, decay, w, m, matrix in zip(updates, decays, weights, masks, is_matrix, strict=True)
    ]


def _cast(values: list[Any], like: list[Any]) -> list[Any]:
    """Moments in the dtypes that they had, so that a state's type never changes."""
    return [v if v is None else v.astype(x.dtype) for v, x in zip(values, like, strict=True)]
