"""Rules that change float32 weights: AdamW, and any Optax transformation."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import register_namedtuple_serialization

from jax_grouped_gemm._src.optimizer import fused, reference
from jax_grouped_gemm._src.optimizer.fused import Options, Weights
from jax_grouped_gemm._src.optimizer.problem import AdamwScalars

MOMENT_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


class AdamWState(NamedTuple):
    """Moments of the gradients, shaped like the parameters."""

    count: jax.Array  # type: ignore[assignment]  # int32, number of steps, under Optax's name
    mu: Any  # mean of the gradients
    nu: Any  # mean of squared gradients


register_namedtuple_serialization(AdamWState, serialized_name="jax_grouped_gemm.optim.AdamWState")


class Rule(Protocol):
    """How an optimiser changes float32 weights."""

    def init(self, masters: Any) -> Any:
        """Returns the state for a tree of weights."""

    def begin(
        self, masters: Any, gradients: Any, state: Any, factor: jax.Array, applies: jax.Array
    ) -> Step:
        """Starts a step with `factor` times `gradients`. If `applies` is false, nothing changes."""


class Step(Protocol):
    """One step of a `Rule`, leaf by leaf. A leaf is an index into `jax.tree.leaves`."""

    def plain(self, leaf: int, master: jax.Array) -> jax.Array:
        """Returns the new weights of a leaf that is not quantised."""

    def fused(self, leaf: int, weights: Weights, options: Options) -> Weights:
        """Returns the new weights of a quantised leaf."""

    def end(self) -> Any:
        """Returns the new state of the rule, after the updates of all leaves."""


@dataclasses.dataclass(frozen=True, eq=False)
class AdamW:
    """The rule of `optax.adamw`; see `adamw` for the attributes."""

    learning_rate: Any
    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    mu_dtype: np.dtype
    nu_dtype: np.dtype
    weight_decay: Any
    mask: Any
    nesterov: bool

    def init(self, masters: Any) -> AdamWState:
        def zeros(dtype):
            return jax.tree.map(lambda x: jnp.zeros_like(x, dtype=dtype), masters)

        return AdamWState(jnp.zeros([], jnp.int32), zeros(self.mu_dtype), zeros(self.nu_dtype))

    def begin(self, masters, gradients, state, factor, applies):
        structure: Any = jax.tree.structure(masters)
        mask = self.mask(masters) if callable(self.mask) else self.mask
        if mask is None:
            masks = [True] * structure.num_leaves
        else:
            spread = jax.tree.map(lambda m, part: jax.tree.map(lambda _: m, part), mask, masters)
            masks = structure.flatten_up_to(spread)
        # Saturate the count, because an overflow would make it negative.
        count = jnp.minimum(state.count, jnp.iinfo(jnp.int32).max - 2) + 1
        return _AdamWStep(
            structure,
            masks,
            self._scalars(state.count, count, factor, applies),
            structure.flatten_up_to(gradients),
            structure.flatten_up_to(state.mu),
            structure.flatten_up_to(state.nu),
            jnp.where(applies, count, state.count),
        )

    def _scalars(self, done, count, factor, applies) -> AdamwScalars:
        b1, b2 = self.b1, self.b2
        rate, decay = (
            jnp.asarray(x(done) if callable(x) else x, jnp.float32)
            for x in (self.learning_rate, self.weight_decay)
        )
        count = count.astype(float)  # strict promotion refuses integer powers of floats
        of_mean, of_square = 1 - b1**count, 1 - b2**count
        if self.nesterov:
            mean_rate = rate * b1 / (1 - b1 ** (count + 1))
            gradient_rate = rate * (1 - b1) / of_mean
        else:
            mean_rate, gradient_rate = rate / of_mean, 0.0
        named = AdamwScalars(
            applies=applies,
            gradient_factor=factor,
            mean_decay=b1,
            mean_share=1 - b1,
            square_decay=b2,
            square_share=1 - b2,
            square_factor=1 / of_square,
            inner_epsilon=self.eps_root,
            epsilon=self.eps,
            mean_rate=mean_rate,
            gradient_rate=gradient_rate,
            decay=rate * decay,
        )
        return AdamwScalars(*(jnp.asarray(x, jnp.float32) for x in named))


@dataclasses.dataclass
class _AdamWStep:
    structure: Any
    masks: list[Any]
    scalars: AdamwScalars
    gradients: list[Any]
    mu: list[Any]
    nu: list[Any]
    count: jax.Array

    def _of(self, leaf: int) -> AdamwScalars:
        return self.scalars._replace(decay=jnp.where(self.masks[leaf], self.scalars.decay, 0))

    def plain(self, leaf, master):
        scalars = self._of(leaf)
        old = self.mu[leaf], self.nu[leaf], master
        new = reference.adamw_step(scalars, self.gradients[leaf], *old)
        kept = [
            jnp.where(scalars.applies != 0, x, y).astype(y.dtype)
            for x, y in zip(new, old, strict=True)
        ]
        self.mu[leaf], self.nu[leaf], master = kept
        return master

    def fused(self, leaf, weights, options):
        gradient, mu, nu = (x[leaf] for x in (self.gradients, self.mu, self.nu))
        self.mu[leaf], self.nu[leaf], weights = fused.adamw(
            jnp.stack(self._of(leaf)), _readable(gradient), mu, nu, weights, options
        )
        return weights

    def end(self):
        return AdamWState(
            self.count, self.structure.unflatten(self.mu), self.structure.unflatten(self.nu)
        )


def _readable(x: jax.Array) -> jax.Array:
    """Returns a gradient or update in a dtype that the kernels read."""
    return x if x.dtype in MOMENT_DTYPES else x.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Transformed:
    """The rule of an Optax transformation."""

    transformation: Any

    def init(self, masters: Any) -> Any:
        return self.transformation.init(masters)

    def begin(self, masters, gradients, state, factor, applies):
        # Widen gradients to the weights' dtype: Optax would add up squares of 16 bits in 16 bits.
        scaled = jax.tree.map(
            lambda g, w: g.astype(w.dtype) * factor.astype(w.dtype), gradients, masters
        )
        updates, new = self.transformation.update(scaled, state, masters)
        kept = jax.tree.map(lambda a, b: jnp.where(applies, a, b), new, state)
        structure: Any = jax.tree.structure(masters)
        return _TransformedStep(structure.flatten_up_to(updates), kept, applies)


@dataclasses.dataclass
class _TransformedStep:
    updates: list[Any]
    state: Any
    applies: jax.Array

    def plain(self, leaf, master):
        return jnp.where(self.applies, (master + self.updates[leaf]).astype(master.dtype), master)

    def fused(self, leaf, weights, options):
        applies = self.applies.astype(jnp.float32)[None]
        return fused.apply(applies, _readable(self.updates[leaf]), weights, options)

    def end(self):
        return self.state
