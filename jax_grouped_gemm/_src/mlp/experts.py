"""Chooses how the MLPs of a device's experts are computed, for all layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.activations import Activation
from jax_grouped_gemm._src.arguments import as_indices, canonical_offset
from jax_grouped_gemm._src.arrays import at_least_float32, is_static
from jax_grouped_gemm._src.fp8.choice import Choice, bf16_choice
from jax_grouped_gemm._src.fp8.dot.api import fp8_ragged_dot
from jax_grouped_gemm._src.fp8.prediction import Layer
from jax_grouped_gemm._src.fp8.quantize.api import SOURCE_DTYPES
from jax_grouped_gemm._src.fp8.recipe import Recipe, checked_recipe
from jax_grouped_gemm._src.mlp import composed, in_place, layer, plan, primitive
from jax_grouped_gemm._src.mlp.decode import primitive as decode
from jax_grouped_gemm._src.mlp.fp8 import layer as fp8_layer
from jax_grouped_gemm._src.mlp.fp8.decode import primitive as fp8_decode
from jax_grouped_gemm._src.mlp.fp8.weights import check_arrays, checked_quantized, of_arrays
from jax_grouped_gemm._src.mlp.operands import (
    DecodeOperands,
    ExpertWeights,
    Groups,
    MlpOperands,
    Rows,
    named,
)
from jax_grouped_gemm._src.mlp.packed import api as packed
from jax_grouped_gemm._src.mlp.primitive import Options
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.mlp.reference import row_weights
from jax_grouped_gemm._src.mlp.rows import combine, on_rows
from jax_grouped_gemm._src.note.primitive import noted
from jax_grouped_gemm._src.plan import COMPOSED, Plan
from jax_grouped_gemm._src.quantized.weights import abstract_arrays, check_weights, with_arrays
from jax_grouped_gemm._src.ragged.api import ragged_dot
from jax_grouped_gemm._src.ragged.reference import owned_rows

if TYPE_CHECKING:
    from jax_grouped_gemm._src.rows.routing import Routing


WEIGHTS_ON_INPUT = "weights multiply rows of x"


@dataclasses.dataclass(frozen=True)
class UnfusedLayer:
    """A layer whose products run in separate kernels, because no fused kernel computes them."""

    layer: Layer
    reason: str

    op = "expert_mlp"

    def plan(self) -> Plan[UnfusedLayer]:
        """Returns the plan that `explain` shows before the plans of the products."""
        return Plan(self, COMPOSED, self.reason)

    def __str__(self) -> str:
        return str(self.layer)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The matrices of the local experts, and how their MLPs are computed.

    Attributes:
      function: the public function, for messages.
      weights: the matrices and biases.
      weights_on_input: whether a router weight multiplies the input instead of the result.
      activation, precision, implementation, recipe, quantized: see `moe.dropless_mlp`.
      max_sms: the most multiprocessors that products use while gradients of tokens may travel,
        None for all.
      has_values: whether the matrices have values. If not, only `quantized` has their values.
    """

    function: str
    weights: ExpertWeights
    weights_on_input: bool
    activation: Activation
    precision: Any
    implementation: Any
    recipe: Recipe | None
    quantized: Any = None
    max_sms: int | None = None
    has_values: bool = True

    counts_rows: ClassVar[bool] = False
    """Whether only the first rows are computed, as many as a count on the device says. Later rows
    of results are then undefined. If False, rows that no expert owns are zero."""

    def __post_init__(self):
        if self.in_fp8 and (callable(self.implementation) or self.precision is not None):
            raise ValueError(
                f"{self.function}: recipe decides how the matmuls are computed, so that precision "
                f"must be None and implementation no function, got precision={self.precision!r} "
                f"and implementation={self.implementation!r}"
            )
        if self._is_in_rows:
            check_arrays(self.function, self.weights, checked_recipe(self.recipe))
        else:
            refused = dict(recipe=self.recipe, quantized=self.quantized)
            check_weights(self.function, named(self.weights), refused, alike=("wi_0", "wi_1"))

    @property
    def of_rows(self) -> Any:
        """The implementation of operations that move rows."""
        return None if callable(self.implementation) else self.implementation

    @property
    def options(self) -> Options:
        """The parameters of primitives."""
        # Rows that no expert owns may stay undefined if nothing reads them. Moves of rows end at
        # the last valid row, but biases read later rows.
        some = self.counts_rows and not self.reads_every_row and not self.weights.has_biases
        return Options.of(
            self.activation,
            self.precision,
            self.implementation,
            zeroes_unowned=not some,
            max_sms=self.max_sms,
        )

    @property
    def in_fp8(self) -> bool:
        """Whether there is a recipe."""
        return self.recipe is not None or self.quantized is not None

    @property
    def _is_in_rows(self) -> bool:
        """Whether all matrices have the layout that products of two FP8 operands read."""
        given = self.weights.quantized.values()
        of_recipe = self.recipe is not None and self.quantized is None
        return of_recipe and len(given) == len(self.weights.matrices)

    @property
    def reads_every_row(self) -> bool:
        """Whether rows that no expert owns must be finite, because FP8 scales depend on all rows,
        or because another library's product may multiply these rows by zero."""
        return self.in_fp8 or callable(self.implementation)

    def by_plan(
        self, x: Any, rows: int, groups: int, sizes: jax.Array, *, are_copies: bool
    ) -> tuple[Self, jax.Array]:
        """Returns these experts, without their recipe where bf16 is predicted to train faster.

        If weights are quantised already, the forward pass alone must be faster in bf16 too. If bf16
        is faster for only one of these (training, the forward pass alone), `fp8_layer.mlp` chooses
        for each. Experts whose weights exist in FP8 only keep their recipe.

        Args:
          x: tokens, or rows.
          rows: number of rows of all experts, of which these experts get a proportional share.
          groups: groups of the rows.
          sizes: an operand of the layer, such as the group sizes.
          are_copies: whether rows are copies of tokens.

        Returns:
          The experts, and `sizes`, marked so that `explain` finds the choice.
        """
        if self.recipe is None or self._is_in_rows:
            return self, sizes
        recipe, given = checked_recipe(self.recipe), self.quantized is not None
        of = self.weights.layer(x, rows, groups, are_copies=are_copies)
        dtypes = [x.dtype, *(matrix.dtype for matrix in self.weights.matrices)]
        trained, alone = (
            bf16_choice(Choice(of, recipe, training, given), dtypes, self.implementation)
            for training in (True, False)
        )
        if trained is None or (given and alone is None):
            return self, sizes
        if given:
            matrices = *self.weights.halves, self.weights.wo
            checked_quantized(self.function, self.quantized, *matrices, recipe)
        return dataclasses.replace(self, recipe=None, quantized=None), noted(sizes, trained)

    def takes_tokens(self, rows: Rows, weights: jax.Array, groups: Groups) -> bool:
        """Whether `mlp` takes tokens themselves; if not, `on_rows` takes copies of tokens."""
        if callable(self.implementation) or self.weights_on_input:
            return False
        if self.in_fp8 or self.counts_rows:
            return True
        return plan.is_fused(self._hidden(rows, weights, groups))

    def _hidden(self, rows: Rows, weights: jax.Array | None, groups: Groups) -> MlpProblem:
        """Returns the hidden layer as a problem for `plan.is_fused`."""
        arrays = dataclasses.replace(self, weights=abstract_arrays(self.weights, rows.x.dtype))
        given = arrays._operands(rows, weights, groups).with_experts(wo=None, bo=None)
        return MlpProblem(primitive.GATED.name, given, vars(self.options))

    def sums_rows(self, rows: Rows, weights: jax.Array, groups: Groups) -> bool:
        """Whether `mlp`, which takes tokens, sums up the rows of each token."""
        if self.in_fp8:
            return True
        if self.weights.quantized or self.weights.wo is None or self.counts_rows:
            return False
        return in_place.of_dy(self._operands(rows, weights, groups), vars(self.options))

    def decoded(self, x: jax.Array, routing: Routing, offset: jax.Array) -> jax.Array | None:
        """Computes the layer of few tokens x [T, D]; returns None if rows must be sorted first."""
        if callable(self.implementation) or self.weights_on_input:
            return None
        chosen = as_indices("routing.experts", routing.experts)
        chosen = chosen.reshape(x.shape[0], chosen.shape[-1])
        scores = routing.weights.reshape(chosen.shape)
        scores = scores.astype(at_least_float32(self.weights.result_dtype(x)))
        given = DecodeOperands(x, chosen, scores, self.weights, offset)
        sizes = routing.logits.shape[-1], self.options
        if self.in_fp8:
            return self._decoded_in_fp8(given, sizes[0])
        return decode.mlp(given, *sizes) if decode.is_taken(given, *sizes) else None

    def _decoded_in_fp8(self, given: DecodeOperands, num_experts: int) -> jax.Array | None:
        """Computes `decoded` by a recipe, if weights are quantised before the call."""
        recipe, of_experts = self.recipe, self.weights
        if self._is_in_rows:
            of_experts, quantized = of_arrays(of_experts, given.x.dtype)
        elif recipe is None or self.quantized is None or of_experts.quantized:
            return None
        elif any(x.dtype != jnp.bfloat16 for x in (given.x, *of_experts.matrices)):
            return None
        else:
            matrices = *of_experts.halves, of_experts.wo
            quantized = checked_quantized(self.function, self.quantized, *matrices, recipe)
        gate, up = of_experts.halves
        of_experts = dataclasses.replace(of_experts, wi=None, wi_0=gate, wi_1=up)
        given = dataclasses.replace(given, experts=of_experts)
        static = fp8_layer.layer_of(
            checked_recipe(recipe),
            self.activation,
            self.options.implementation,
            given.of_rows(num_experts),
            combines=True,
            has_values=not self._is_in_rows,
            has_quantized=True,
        )
        operands = fp8_decode.Fp8DecodeOperands(given, quantized), num_experts, static
        return fp8_decode.mlp(*operands) if fp8_decode.is_taken(*operands) else None

    def on_rows(self, x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
        """Computes the MLPs of rows [m, D], sorted by expert, with weights [m]: rows [m, D]."""
        reason = ""
        if self.weights.quantized and not (self.in_fp8 or callable(self.implementation)):
            given = self._operands(Rows(x), weights, groups)
            reason = packed.dequantized_reason(given, vars(self.options))
            if not reason and not self.weights_on_input:
                return self.mlp(Rows(x), weights, groups)
            reason = reason or WEIGHTS_ON_INPUT
        else:
            groups = self._with_note(x, weights, groups)
        compute = functools.partial(Experts._on_rows, x=x, weights=weights, groups=groups)
        return self._with_arrays(x, compute, reason)

    def _with_note(self, x: jax.Array, weights: jax.Array, groups: Groups) -> Groups:
        """Returns `groups`, marked so that `explain` says why no kernel fuses the layer of x."""
        is_asked = callable(self.implementation) or self.implementation == "xla"
        if is_asked or self.in_fp8 or self.counts_rows or not is_static(*x.shape):
            return groups
        reason = WEIGHTS_ON_INPUT
        if not self.weights_on_input:
            reason = plan.unfused_reason(self._hidden(Rows(x), weights, groups))
        if not reason:
            return groups
        of = self.weights.layer(x, x.shape[0], groups.sizes.shape[0], are_copies=False)
        return dataclasses.replace(groups, sizes=noted(groups.sizes, UnfusedLayer(of, reason)))

    def _on_rows(self, x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
        of_result: jax.Array | None = weights
        if self.weights_on_input:
            dtype = jnp.promote_types(at_least_float32(x.dtype), weights.dtype)
            x = (x.astype(dtype) * weights.astype(dtype)[:, None]).astype(x.dtype)
            of_result = None
        if callable(self.implementation):
            matmul = functools.partial(self.implementation, precision=self.precision)
        elif self.in_fp8 or self.counts_rows:
            return self.mlp(Rows(x), of_result, groups)
        else:
            options = dict(precision=self.precision, implementation=self.implementation)
            matmul = functools.partial(ragged_dot, **options)
        operands = self._operands(Rows(x), of_result, groups)
        return composed.mlp(matmul, self.activation, operands)

    def mlp(
        self,
        rows: Rows,
        weights: jax.Array | None,
        groups: Groups,
        *,
        combines: bool = False,
    ) -> jax.Array:
        """Computes `ragged_mlp` of tokens or rows: [m, D], or the hidden layer [m, F] without wo.

        Args:
          rows, weights, groups: checked operands.
          combines: whether the rows of each token are summed up, where `sums_rows` allows it.
        """
        given = rows, weights, Groups(groups.sizes, canonical_offset(groups.offset))
        if combines and not self.in_fp8:
            operands = self._operands(*given).aligned()
            return layer.mlp(self.options, operands.promoted(), combines=True)
        if not self.in_fp8:
            return packed.mlp(self.function, self.options, self._operands(*given).aligned())
        return self._with_arrays(rows.x, lambda experts: experts._mlp_in_fp8(*given, combines))

    def _mlp_in_fp8(
        self,
        rows: Rows,
        row_scales: jax.Array | None,
        groups: Groups,
        combines: bool,
    ) -> jax.Array:
        """Computes the MLP by the fused layer, or as a composition for other recipes."""
        operands, options = self._operands(rows, row_scales, groups).aligned(), self.options
        if self.recipe is None:
            raise ValueError(f"{self.function}: quantized needs the recipe that it was made with")
        recipe = checked_recipe(self.recipe)
        # Quantise each half separately, as `quantize_mlp` does.
        wi_0, wi_1 = operands.experts.halves
        operands = operands.with_experts(wi=None, wi_0=wi_0, wi_1=wi_1)
        for name, x in named(operands).items():
            if name in ("x", "wi_0", "wi_1", "wo") and x.dtype not in SOURCE_DTYPES:
                raise TypeError(
                    f"{self.function}: {name} must be bfloat16, float16 or float32 for a recipe, "
                    f"got {x.dtype}"
                )
        quantized = self.quantized
        if quantized is not None:
            matrices = wi_0, wi_1, operands.experts.wo
            quantized = checked_quantized(self.function, quantized, *matrices, recipe)
        implementation = options.implementation
        if (recipe.forward, recipe.dgrad) == ("fp8", "fp8"):
            if layer.closes_over_traced(options, operands):
                raise NotImplementedError(
                    f"{self.function}: activation closes over traced values, such as arrays made "
                    "under jax.jit, which a recipe with forward='fp8' and dgrad='fp8' cannot have; "
                    "take Python numbers or NumPy arrays, or another recipe"
                )
            static = recipe, self.activation, implementation
            return fp8_layer.mlp(
                *static, operands, quantized, combines=combines, has_values=self.has_values
            )
        matmul = functools.partial(fp8_ragged_dot, recipe=recipe, implementation=implementation)
        # Copy all rows, because rows past the count must be finite, see `reads_every_row`.
        given_rows = dataclasses.replace(operands.rows, count=None)
        rows = Rows(on_rows(given_rows))
        owned = owned_rows(*operands.groups.indices, self.weights.count, rows.num_rows)
        weights = row_weights(operands.weights, owned, rows.x)
        copied = dataclasses.replace(operands, rows=rows, weights=weights)
        y = composed.mlp(matmul, self.activation, copied)
        return combine(y, given_rows) if combines else y

    def _with_arrays(
        self, x: jax.Array, compute: Callable[[Any], jax.Array], reason: str = ""
    ) -> jax.Array:
        """Runs `compute` with dequantised matrices, and notes the reason."""

        if self._is_in_rows:
            weights, quantized = of_arrays(self.weights, x.dtype)
            return compute(
                dataclasses.replace(self, weights=weights, quantized=quantized, has_values=False)
            )
        return with_arrays(
            self.function,
            lambda weights: compute(dataclasses.replace(self, weights=weights)),
            self.weights,
            x=x,
            reason=reason,
        )

    def _operands(self, rows: Rows, weights: jax.Array | None, groups: Groups) -> MlpOperands:
        operands = MlpOperands(rows, self.weights, weights, groups)
        if weights is None:
            return operands
        weights = weights.astype(at_least_float32(operands.dtype))
        return dataclasses.replace(operands, weights=weights)
