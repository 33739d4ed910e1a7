"""Muon as a transformation of gradients, made of Optax's parts except for the orthogonalisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    checked_boolean,
    checked_implementation,
    checked_int,
)
from jax_grouped_gemm._src.muon.coefficients import Coefficients, iterations, table
from jax_grouped_gemm._src.muon.dimensions import Axes, Numbers, Spread, over_leaves, spread
from jax_grouped_gemm._src.muon.momentum import direction, mean, promoted, widened
from jax_grouped_gemm._src.muon.orthogonalize import ITERATION_DTYPE, Method, orthogonalize
from jax_grouped_gemm._src.muon.state import MuonState

if TYPE_CHECKING:
    import optax

Schedule = Callable[[jax.Array], ArrayLike]

OFFERED = ("frobenius", "schatten")
REFUSED = {
    "spectral": "a decomposition of every matrix costs more than the iteration",
    "aol": "it scales the rows of every matrix, a pass over memory that saves no step here",
}


def scale_by_muon(
    ns_coeffs: Coefficients = "classic",
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    weight_dimension_numbers: Numbers = None,
    shardings: Any = None,
    period: int | None = None,
    dtype: DTypeLike = ITERATION_DTYPE,
    method: Method = "auto",
    restarts: Sequence[int] | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformation:
    """Orthogonalises the mean of gradients, as `optax.contrib.scale_by_muon` does.

    All leaves must be matrices or stacks of matrices, which are orthogonalised together. The state
    is `optax.contrib.MuonState`, whose copy of `ns_coeffs` is not read. Means are added up in
    float32 at least. They keep their dtype, whatever the dtype of the gradients.

    Args:
      ns_coeffs, ns_steps, eps: `coefficients`, `steps` and `eps` of `orthogonalize`.
      beta: decay of the mean of gradients.
      mu_dtype: dtype of the mean of gradients; None means that of the parameters.
      nesterov: whether to look ahead by one gradient.
      adaptive: whether the update of each leaf is multiplied by a number: the dot product of this
        update and the mean gradient from which it was computed (arXiv:2409.20325).
      preconditioning: "frobenius" or "schatten", see `orthogonalize`. Optax's "spectral" and "aol"
        are not offered.
      weight_dimension_numbers: `MuonDimensionNumbers`, ours or Optax's, for all leaves; or a tree
        of them whose structure is a prefix of the parameters'; or a function of the parameters that
        returns such a tree. None means the last two axes.
      shardings: for matrices whose rows or columns are split over auto axes of a mesh: a tree of
        `NamedSharding`s or None, whose structure is a prefix of the parameters'. See
        `orthogonalize`.
      period: block-periodic orthogonalisation (MuonBP, arXiv:2510.16981) of matrices whose rows or
        columns are split over devices: they are orthogonalised whole in the first of every `period`
        updates. In the other updates each device orthogonalises its own block, and sends nothing:
        see `blockwise` of `orthogonalize`. Other matrices are always whole. None or 1 means that
        all updates are of whole matrices.
      dtype, method, restarts, implementation: as for `orthogonalize`.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      ImportError: Optax is missing.
      TypeError, ValueError: an option is invalid, as for `orthogonalize`; `period` is not a
        positive integer; or, from `init` and `update`, dimension numbers do not fit a leaf.
    """
    optax = _optax()
    _check_preconditioning(preconditioning)
    checked_boolean("nesterov", nesterov)
    checked_boolean("adaptive", adaptive)
    checked_implementation(implementation)
    if period is not None and checked_int("period", period) < 1:
        raise ValueError(f"period must be at least 1, got {period}")
    # Raise errors here that `update` would raise later.
    iterations(ns_coeffs, ns_steps)
    iterate = functools.partial(
        orthogonalize,
        steps=ns_steps,
        coefficients=ns_coeffs,
        eps=eps,
        dtype=dtype,
        method=method,
        restarts=restarts,
        preconditioning=preconditioning,  # type: ignore[arg-type]  # checked above
        implementation=implementation,
    )
    iterate([])

    def init(params):
        _axes(weight_dimension_numbers, params)
        return optax.contrib.MuonState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda x: jnp.zeros_like(x, dtype=mu_dtype), params),
            ns_coeffs=jnp.asarray(table(ns_coeffs), jnp.float32),
        )

    def update(gradients, state, params=None):
        del params
        axes = _axes(weight_dimension_numbers, gradients)
        structure: Any
        leaves, structure = jax.tree.flatten(gradients)
        old = structure.flatten_up_to(state.mu)
        # Saturate the count, so that it never becomes negative.
        count = jnp.minimum(state.count, jnp.iinfo(jnp.int32).max - 2) + 1
        mus = [mean(beta, mu, g) for mu, g in zip(old, leaves, strict=True)]
        directions = [
            direction(beta, mu, g, count, nesterov).astype(promoted(g, x))
            for mu, g, x in zip(mus, leaves, old, strict=True)
        ]
        # Without a barrier, XLA reads the old means after it writes the new ones, and so copies the
        # old means first. It does not do this if means are narrower than directions.
        directions = [
            lax.optimization_barrier(x) if x.dtype == mu.dtype else x
            for x, mu in zip(directions, old, strict=True)
        ]
        matrices = [own.to_matrices(x) for own, x in zip(axes, directions, strict=True)]
        outs = iterate(
            matrices,
            shardings=_of_matrices(shardings, gradients, axes),
            blockwise=period not in (None, 1) and state.count % period != 0,
        )
        updates = [
            own.from_matrices(y, x.shape) for own, y, x in zip(axes, outs, directions, strict=True)
        ]
        if adaptive:
            products = map(jnp.vdot, widened(directions), widened(updates))
            updates = [(dot * u).astype(u.dtype) for dot, u in zip(products, updates, strict=True)]
        mus = [mu.astype(x.dtype) for mu, x in zip(mus, old, strict=True)]
        new = state._replace(count=count, mu=structure.unflatten(mus))
        return structure.unflatten(updates), new

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: ArrayLike | Schedule,
    ns_coeffs: Coefficients = "classic",
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: ArrayLike = 0.0,
    adam_learning_rate: ArrayLike | Schedule | None = None,
    muon_weight_dimension_numbers: Numbers = None,
    consistent_rms: ArrayLike | None = None,
    shardings: Any = None,
    period: int | None = None,
    dtype: DTypeLike = ITERATION_DTYPE,
    method: Method = "auto",
    restarts: Sequence[int] | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns Muon for matrices and AdamW for other leaves, with `optax.contrib.muon`'s arguments.

    A leaf [..., in, out] of two or more dimensions is a kernel that multiplies from the right, as
    in Flax, or a stack of them, such as the experts of a layer or the layers of a scan. The update
    of a matrix is its orthogonalised mean gradient, times sqrt(max(1, out / in)). Leaves of fewer
    dimensions get AdamW. `muon_weight_dimension_numbers` says which axes of other kernels are a
    matrix, and which leaves get AdamW. Choose AdamW for embeddings and output heads.

    With ``dtype=jnp.float32`` and float32 parameters the updates are those of `optax.contrib.muon`,
    except for stacks of matrices, which get AdamW from Optax unless they have dimension numbers.
    The state has Optax's form. `load_muon_state` takes checkpoints of Optax, and of `muon` of
    version 0.1.

    Args:
      learning_rate: scale of the updates, or a function of the number of earlier updates.
      ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov, adaptive, preconditioning: as for
        `scale_by_muon`. AdamW uses `eps`, `mu_dtype` and `nesterov` too.
      weight_decay: this number times the parameters is added to an orthogonalised update, before
        the sum is multiplied by the learning rate. Needs `params` in `update`.
      weight_decay_mask: says which matrices decay: a tree of booleans whose structure is a prefix
        of the parameters', or a function of the parameters that returns such a tree. None means
        all.
      adam_b1, adam_b2, adam_eps_root, adam_weight_decay: options of AdamW.
      adam_learning_rate: the learning rate of AdamW. None means `learning_rate`.
      muon_weight_dimension_numbers: as for `scale_by_muon`. A leaf whose entry is None gets AdamW.
        By default the last two axes of each leaf with two or more axes are a matrix.
      consistent_rms: if given, orthogonalised updates are scaled by
        sqrt(max(in, out)) * consistent_rms instead (arXiv:2502.16982 has 0.2).
      shardings: as for `scale_by_muon`.
      period: as for `scale_by_muon`. MuonBP has a learning rate for each kind of update. With a
        period of 5 this is ``learning_rate=lambda count: jnp.where(count % 5 == 0, whole, block)``.
      dtype, method, restarts, implementation: as for `orthogonalize`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ImportError, TypeError, ValueError: as for `scale_by_muon`.
    """
    optax = _optax()
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate

    def labels(params):
        numbers = spread(muon_weight_dimension_numbers, params)
        return jax.tree.map(lambda x: "adam" if x.value is None else "muon", numbers)

    matrices = optax.chain(
        scale_by_muon(
            ns_coeffs,
            ns_steps,
            beta,
            eps,
            mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=muon_weight_dimension_numbers,
            shardings=shardings,
            period=period,
            dtype=dtype,
            method=method,
            restarts=restarts,
            implementation=implementation,
        ),
        _scale_by_shape(optax, muon_weight_dimension_numbers, consistent_rms),
        _decayed_weights(optax, weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    others = optax.chain(
        optax.scale_by_adam(
            adam_b1, adam_b2, eps, adam_eps_root, mu_dtype=mu_dtype, nesterov=nesterov
        ),
        _decayed_weights(optax, adam_weight_decay, None),
        optax.scale_by_learning_rate(adam_learning_rate),
    )
    return _in_float32(optax, optax.partition({"muon": matrices, "adam": others}, labels), labels)


def _optax() -> Any:
    try:
        import optax
        import optax.contrib
    except ImportError as error:
        raise ImportError(
            "muon and scale_by_muon are made of Optax: pip install 'optax>=0.2.6'"
        ) from error
    return optax


def _check_preconditioning(name: str) -> None:
    if name in OFFERED:
        return
    reason = f" ({REFUSED[name]})" if name in REFUSED else ""
    raise ValueError(f"preconditioning must be one of {OFFERED}, got {name!r}{reason}")


def _axes(numbers: Numbers, tree: Any) -> list[Axes]:
    """Returns the axes of every leaf. All leaves must be matrices or stacks of matrices."""
    axes = []
    for path, x in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda own, x: (own, x), spread(numbers, tree), tree),
        is_leaf=lambda x: isinstance(x, tuple) and bool(x) and isinstance(x[0], Spread),
    ):
        own, leaf = x
        if own.value is None:
            raise ValueError(
                f"scale_by_muon: {jax.tree_util.keystr(path)} of shape {jnp.shape(leaf)} is no "
                "matrix; muon gives such leaves AdamW"
            )
        axes.append(Axes.of(jnp.ndim(leaf), own.value))
    return axes


def _of_matrices(
    shardings: Any, gradients: Any, axes: Sequence[Axes]
) -> list[NamedSharding | None] | None:
    """Returns the shardings of the matrices of each leaf."""
    if shardings is None:
        return None

    def is_sharding(x):
        return x is None or isinstance(x, NamedSharding)

    spread_over = jax.tree.leaves(over_leaves(shardings, gradients, is_sharding))
    return [own.sharding_of_matrices(x.value) for own, x in zip(axes, spread_over, strict=True)]


def _scale_by_shape(
    optax: Any, numbers: Numbers, consistent_rms: ArrayLike | None
) -> optax.GradientTransformation:
    """Multiplies updates by a factor that depends on the shape of their matrices."""

    def factor(fan_in, fan_out):
        if consistent_rms is not None:
            return max(fan_in, fan_out) ** 0.5 * consistent_rms
        return max(1.0, fan_out / max(fan_in, 1)) ** 0.5

    def update(updates, state, params=None):
        del params
        structure: Any
        leaves, structure = jax.tree.flatten(updates)
        axes = _axes(numbers, updates)
        # Add up the following terms in float32, and round once.
        wide = widened(leaves)
        scaled = [factor(*own.sizes(x.shape)) * x for own, x in zip(axes, wide, strict=True)]
        return structure.unflatten(scaled), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def _decayed_weights(optax: Any, decay: ArrayLike, mask: Any) -> optax.GradientTransformation:
    """Returns `optax.add_decayed_weights`, which needs no parameters if nothing decays."""
    decayed = optax.add_decayed_weights(decay, mask)
    if not (isinstance(decay, int | float) and decay == 0):
        return decayed
    return optax.GradientTransformation(
        decayed.init, lambda updates, state, _=None: (updates, state)
    )


def _in_float32(
    optax: Any,
    partition: optax.GradientTransformationExtraArgs,
    labels: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Returns `partition` with AdamW's sums in float32 at least, and updates rounded once."""

    def update(updates, state, params=None, **extra):
        if isinstance(state, MuonState):
            raise TypeError(
                "the state is that of muon of version 0.1: pass it through load_muon_state"
            )
        dtypes = jax.tree.map(promoted, updates, _momenta(optax, state))
        parts = {**state.inner_states, "adam": widened(state.inner_states["adam"])}
        updates = jax.tree.map(
            lambda kind, u: u if kind == "muon" else widened(u), labels(updates), updates
        )
        updates, new = partition.update(
            updates, state._replace(inner_states=parts), params, **extra
        )
        new = jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)
        return jax.tree.map(lambda u, dtype: u.astype(dtype), updates, dtypes), new

    return optax.GradientTransformationExtraArgs(partition.init, update)


def _momenta(optax: Any, state: Any) -> Any:
    """Returns the mean gradients of all leaves."""

    def is_masked(x):
        return isinstance(x, optax.MaskedNode)

    ours, theirs = (state.inner_states[name].inner_state[0].mu for name in ("muon", "adam"))
    return jax.tree.map(lambda x, y: y if is_masked(x) else x, ours, theirs, is_leaf=is_masked)
