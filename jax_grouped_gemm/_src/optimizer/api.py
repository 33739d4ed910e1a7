"""Optimisers whose state has the FP8 weights of the next forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import register_namedtuple_serialization
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    canonical_dtype,
    checked_boolean,
    checked_implementation,
)
from jax_grouped_gemm._src.fp8.recipe import Recipe, checked_recipe
from jax_grouped_gemm._src.mlp.fp8.weights import check_is_fused
from jax_grouped_gemm._src.optimizer.fused import Options, Weights
from jax_grouped_gemm._src.optimizer.rules import MOMENT_DTYPES, AdamW, Rule, Transformed
from jax_grouped_gemm._src.optimizer.weights import (
    Member,
    Select,
    as_container,
    as_forms,
    at,
    experts,
    groups_of,
    nested,
    path_of,
)

Schedule = Callable[[jax.Array], ArrayLike]


class OptimizerState(NamedTuple):
    """The state of an `Optimizer`."""

    inner: Any  # an `AdamWState`, or the state of the Optax transformation
    master: Any  # float32 copies of parameters of 16 bits, None for other parameters
    quantized: Any  # nested dictionaries with the names of the parameters


register_namedtuple_serialization(
    OptimizerState, serialized_name="jax_grouped_gemm.optim.OptimizerState"
)


# Optimisers are compared by identity, because numbers may be arrays and masks may be trees.
@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """An optimiser whose steps write the FP8 weights of the next forward pass.

    It has `step` instead of Optax's `update`, because `update` returns differences, which separate
    passes would have to add to the weights before quantising the result:

        optimizer = optim.adamw(1e-3, recipe=recipe)
        state = optimizer.init(params)
        gradients = jax.grad(loss)(optimizer.compute_params(params), state.quantized, batch)
        params, state = optimizer.step(params, gradients, state)

    Donate `params` and `state` to `jax.jit`: the kernels update both in place.

    `state.quantized` has the quantised weights in nested dictionaries, under the names of the
    parameters. If leaves wi_0, wi_1 (optional) and wo of one node have matching shapes, the node
    becomes a `QuantizedMlp`, which `moe.dropless_mlp` and `ragged_mlp` take. Every other selected
    leaf becomes a `QuantizedWeights`. The bits are the same as those that `quantize_mlp` and
    `quantize_weights` return for the float32 weights.

    Attributes:
      rule: how weights change.
      recipe: recipe of the layers.
      select: a function of two arguments: the path of a leaf (a tuple of names) and the leaf. It
        returns whether the leaf is quantised. Other leaves are updated in the same step.
      max_norm: if given, gradients are scaled down to this global norm, as
        `optax.clip_by_global_norm` does.
      skip_nonfinite: whether a step changes nothing if a gradient is infinite or NaN.
      implementation: None takes the CUDA kernels where they can run, and pure JAX elsewhere. "cuda"
        raises an error where the kernels cannot run. "xla" always takes pure JAX.
    """

    rule: Rule
    recipe: Recipe
    select: Select = experts
    max_norm: ArrayLike | None = None
    skip_nonfinite: bool = False
    implementation: Implementation = None

    def __post_init__(self):
        recipe = checked_recipe(self.recipe)
        check_is_fused("optim", recipe)
        if not callable(self.select):
            raise TypeError(f"optim: select must be callable, got {self.select!r}")
        checked_boolean("skip_nonfinite", self.skip_nonfinite)
        object.__setattr__(self, "implementation", checked_implementation(self.implementation))

    def init(self, params: Any) -> OptimizerState:
        """Returns the state for `params`.

        Parameters of 16 bits get a float32 copy in the state, and steps optimise this copy.

        Raises:
          TypeError: a leaf that `select` chooses is not [..., k, n], or is not float32, bfloat16 or
            float16.
        """
        master = jax.tree.map(lambda x: x.astype(jnp.float32) if _is_short(x) else None, params)
        masters = _masters(params, master)
        return OptimizerState(self.rule.init(masters), master, self._quantized(params, masters))

    def quantize(self, params: Any, state: OptimizerState | None = None) -> Any:
        """Returns `state.quantized` for `params`, for a checkpoint that was saved without it.

        Args:
          params: the parameters.
          state: the state with the float32 copies of 16-bit parameters, or None if all parameters
            are float32.
        """
        return self._quantized(params, params if state is None else _masters(params, state.master))

    def compute_params(self, params: Any, dtype: DTypeLike = jnp.bfloat16) -> Any:
        """Returns `params` for `jax.grad`, with the leaves that `select` chooses cast to `dtype`.

        The gradients of these leaves then have `dtype` too, so the step reads fewer bytes. XLA
        removes the casts themselves, because layers read the quantised weights.
        """
        dtype = canonical_dtype("dtype", dtype)

        def cast(keys, leaf):
            is_quantized = self.select(path_of(keys), leaf)
            return leaf.astype(dtype) if is_quantized else leaf

        return jax.tree_util.tree_map_with_path(cast, params)

    def step(
        self,
        params: Any,
        gradients: Any,
        state: OptimizerState,
        *,
        factor: ArrayLike = 1.0,
        applies: ArrayLike = True,
    ) -> tuple[Any, OptimizerState]:
        """Returns the parameters and the state after one step.

        Args:
          params: the parameters.
          gradients: shaped like `params`, of any floating-point dtype. Kernels read bfloat16 and
            float32; other dtypes are converted first.
          state: from `init` or the last step.
          factor: gradients are first multiplied by this number, such as the inverse of a loss scale
            or of the number of microbatches. May be traced.
          applies: whether to take the step; otherwise nothing changes. May be traced.

        Raises:
          TypeError: a gradient has another shape than its parameter, or is not floating.
          ValueError: `state.quantized` lacks a parameter that `select` chooses.
        """
        structure: Any
        leaves, structure = jax.tree.flatten(params)
        masters = _masters(params, state.master)
        grads = structure.flatten_up_to(gradients)
        _check_gradients(leaves, grads)
        conditions = self._conditions(grads, factor, applies)
        taken = self.rule.begin(masters, structure.unflatten(grads), state.inner, *conditions)
        old = [
            Weights(master, (), leaf if _is_short(leaf) else None)
            for leaf, master in zip(leaves, structure.flatten_up_to(masters), strict=True)
        ]
        new: dict[int, Weights] = {}
        quantized = {}
        for group in groups_of(params, self.select):
            found = []
            forms = as_forms(at(state.quantized, group.path))
            for members, of_matrix in zip(group.members, forms, strict=True):
                for member in members:
                    weights = old[member.leaf]._replace(forms=of_matrix)
                    new[member.leaf] = weights = taken.fused(
                        member.leaf, weights, self._options(member)
                    )
                    of_matrix = weights.forms
                found.append(of_matrix)
            quantized[group.path] = as_container(found)
        for i, (leaf, weights) in enumerate(zip(leaves, old, strict=True)):
            if i not in new:
                master = taken.plain(i, weights.master)
                copy = None if weights.copy is None else master.astype(leaf.dtype)
                new[i] = Weights(master, (), copy)
        every = [new[i] for i in range(len(leaves))]
        return (
            structure.unflatten([x.master if x.copy is None else x.copy for x in every]),
            OptimizerState(
                taken.end(),
                structure.unflatten([None if x.copy is None else x.master for x in every]),
                nested(quantized),
            ),
        )

    def _options(self, member: Member) -> Options:
        """Returns the options for the step of one leaf."""
        return Options(
            self.recipe.power_of_two_scales, self.implementation, member.part, member.parts
        )

    def _quantized(self, params: Any, masters: Any) -> Any:
        leaves = jax.tree.leaves(masters)
        return nested(
            {
                group.path: group.quantized(leaves, self.recipe, self.implementation)
                for group in groups_of(params, self.select)
            }
        )

    def _conditions(
        self, gradients: Sequence[jax.Array], factor: ArrayLike, applies: ArrayLike
    ) -> tuple[jax.Array, jax.Array]:
        factor = jnp.asarray(factor, jnp.float32)
        applies = jnp.asarray(applies, jnp.bool_)
        if self.skip_nonfinite:
            for g in gradients:
                applies = applies & jnp.all(jnp.isfinite(g))
        if self.max_norm is not None:
            squares = [jnp.sum(jnp.square(g.astype(jnp.float32) * factor)) for g in gradients]
            norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
            most = jnp.asarray(self.max_norm, jnp.float32)
            factor = factor * jnp.where(norm < most, 1, most / norm)
        return factor, applies


def _is_short(x: jax.Array) -> bool:
    return x.dtype in (np.dtype(jnp.bfloat16), np.dtype(np.float16))


def _masters(params: Any, master: Any) -> Any:
    """Returns the weights to optimise: each leaf's float32 copy if it has one, else the leaf."""
    return jax.tree.map(lambda p, m: p if m is None else m, params, master)


def _check_gradients(leaves: Sequence[Any], gradients: Sequence[Any]) -> None:
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient.shape != leaf.shape or not jnp.issubdtype(gradient.dtype, jnp.floating):
            raise TypeError(
                "optim: a gradient must be floating and of the shape of its parameter, "
                f"{leaf.shape}, got {gradient.dtype} of shape {gradient.shape}"
            )


def adamw(
    learning_rate: ArrayLike | Schedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ArrayLike | Schedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    recipe: Recipe = Recipe(),  # noqa: B008 - immutable
    select: Select = experts,
    nu_dtype: DTypeLike | None = None,
    max_norm: ArrayLike | None = None,
    skip_nonfinite: bool = False,
    implementation: Implementation = None,
) -> Optimizer:
    """Returns an AdamW optimiser that writes FP8 weights in the same pass as the update.

    It takes the arguments of `optax.adamw`. One kernel reads gradient, moments and float32 weights,
    and writes moments, weights and FP8 weights. The FP8 weights add two bytes for each parameter. A
    separate pass would also have to read the weights again.

    Float32 results equal those of `optax.adamw` up to rounding. Moments are summed in float32.

    Args:
      learning_rate: a number or a function of the number of earlier steps. All numbers may be
        traced.
      b1, b2: decay rates of the mean of gradients and of the mean of their squares.
      eps, eps_root: `eps` is added to the root of the mean square, and `eps_root` to the mean
        square under the root.
      mu_dtype: dtype of the mean of gradients, float32 (None) or bfloat16.
      weight_decay: a number or a function of the number of earlier steps. A step subtracts
        `weight_decay * learning_rate` times the float32 weights.
      mask: says which leaves decay: a tree of booleans whose structure is a prefix of the
        parameters', or a function of the parameters that returns such a tree. None means all.
      nesterov: whether to use Nesterov momentum.
      recipe: the recipe of the layers, with `forward` and `dgrad` in FP8.
      select: the leaves to quantise, see `Optimizer`. By default leaves named wi_0, wi_1 and wo
        with three dimensions or more.
      nu_dtype: dtype of the mean of squares, float32 (None) or bfloat16.
      max_norm, skip_nonfinite, implementation: see `Optimizer`.

    Raises:
      TypeError: `recipe` is not a `Recipe`, a dtype is neither float32 nor bfloat16, or an option
        is not a boolean.
      ValueError: `recipe` has forward or dgrad in bf16.
    """
    dtypes = {}
    for name, dtype in (("mu_dtype", mu_dtype), ("nu_dtype", nu_dtype)):
        dtypes[name] = canonical_dtype(name, jnp.float32 if dtype is None else dtype)
        if dtypes[name] not in MOMENT_DTYPES:
            raise TypeError(f"{name} must be float32 or bfloat16, got {dtypes[name]}")
    rule = AdamW(
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        weight_decay=weight_decay,
        mask=mask,
        nesterov=checked_boolean("nesterov", nesterov),
        **dtypes,
    )
    return Optimizer(rule, recipe, select, max_norm, skip_nonfinite, implementation)


def quantized(
    transformation: Any,
    *,
    recipe: Recipe = Recipe(),  # noqa: B008 - immutable
    select: Select = experts,
    max_norm: ArrayLike | None = None,
    skip_nonfinite: bool = False,
    implementation: Implementation = None,
) -> Optimizer:
    """Returns an optimiser that adds Optax updates and writes FP8 weights in one pass.

    The transformation may be any of Optax's or a chain of them, such as `optax.MultiSteps`,
    `optax.inject_hyperparams` or `muon`. XLA computes the updates. One kernel reads the updates and
    the float32 weights, and writes the weights and the FP8 weights. `adamw` is faster, because it
    does not write updates to memory.

        optimizer = optim.quantized(optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4)))

    Args:
      transformation: has `init(params)` and `update(gradients, state, params)`.
      recipe, select, max_norm, skip_nonfinite, implementation: see `adamw`.

    Raises:
      TypeError: `transformation` lacks one of these functions; see also `adamw`.
      ValueError: see `adamw`.
    """
    for name in ("init", "update"):
        if not callable(getattr(transformation, name, None)):
            raise TypeError(
                f"quantized: transformation must have init and update, got {transformation!r}"
            )
    rule = Transformed(transformation)
    return Optimizer(rule, recipe, select, max_norm, skip_nonfinite, implementation)
