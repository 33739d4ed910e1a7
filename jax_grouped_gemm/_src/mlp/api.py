"""The MLP of experts on rows sorted by expert: `ragged_mlp`, and `gated_ragged_dot`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.activations import Activation, as_activation
from jax_grouped_gemm._src.arguments import (
    Implementation,
    as_array,
    as_indices,
    canonical_offset,
    check_floating,
    check_group_count,
    checked_boolean,
    checked_group_sizes,
    refuse_sharded,
    run_group_checks,
    with_invariance,
)
from jax_grouped_gemm._src.fp8.quantize.api import QuantizedWeights
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.mlp.experts import Experts
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.mlp.operands import (
    BIASES,
    ExpertWeights,
    Groups,
    MlpOperands,
    Rows,
    named,
)
from jax_grouped_gemm._src.mlp.primitive import Options
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.weights import as_weights

Biases = tuple[jax.Array | None, ...]
ActivationLike = str | Callable[[jax.Array], jax.Array] | Activation


def ragged_mlp(
    x: ArrayLike,
    wi_0: ArrayLike | QuantizedArray,
    wi_1: ArrayLike | QuantizedArray | None,
    wo: ArrayLike | QuantizedArray,
    group_sizes: ArrayLike,
    *,
    rows: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    biases: Biases | None = None,
    activation: ActivationLike = "silu",
    precision: lax.PrecisionLike = None,
    group_offset: ArrayLike | None = None,
    implementation: Implementation = None,
    recipe: Recipe | None = None,
    quantized: QuantizedMlp | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Computes the MLPs of experts: weights * ((activation(x wi_0) * (x wi_1)) wo), [m, D].

    The first `group_sizes[0]` rows go through the matrices of expert 0, the next `group_sizes[1]`
    through those of expert 1, and so on. Rows that no group owns are exactly zero in the result and
    in gradients, even if they hold NaN or infinity.

    Operands are promoted to one dtype first. In bfloat16, one kernel computes gate, up and
    activation, biases included. The backward pass has one kernel for the gradients of gate, up and
    weights, one for the gradient of the rows of x, and one for the gradients of wi_0 and wi_1. With
    few rows in each group, as in decoding, kernels read tokens in place and add wo's bias. With up
    to 768 hidden features, the weight gradients of large groups read tokens in place too, and with
    up to 256 the product of gate and up. Calls that no fused kernel can run are composed of ragged
    products, and `explain` says why. Both the fused and the composed
    form round gate and up to the dtype of the operands, compute the hidden layer from the rounded
    values, and round it once. Their results therefore differ only by the accuracy of the
    activation.

    For the backward pass, x, gate, up, weights, rows and the group sizes are kept, but no copied
    rows of x. Gate and up have the names "mlpwi_0" and "mlpwi_1" for policies of `jax.checkpoint`.
    If a policy keeps neither, both are computed again. Second derivatives are composed of ragged
    products.

    Args:
      x: tokens [T, D] with `rows`, else rows [m, D] sorted by expert.
      wi_0, wi_1: gate and up projections [g, D, F]. With `wi_1=None`, `wi_0` may be gate and up
        next to each other [g, D, 2 F], or the gate alone [g, D, F]. F, the number of rows of `wo`,
        tells them apart. With the gate alone, hidden layers are activation(x wi_0).
      wo: down projections [g, F, D]. Each of the three may be a `QuantizedArray`, gate and up of
        one format, see `moe.dropless_mlp`.
      group_sizes: [G] of any integer dtype, rows per expert, see `ragged_dot`.
      rows: integers [m], the token that each row is a copy of; the rows are sorted by expert. A row
        whose token is not in [0, T) is zero.
      weights: [m], the weight of each row, such as the router's; by default ones.
      biases: the biases of wi_0, wi_1 and wo: [g, F], [g, F] and [g, D], each of which may be None.
        The bias of wo is multiplied by the row's weight too.
      activation: "silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai" or "clamped_silu" as in
        `moe.dropless_mlp`; a `moe.Activation`; or an elementwise function of the gate. Kernels fuse
        the named ones only. If a function closes over traced values, which get gradients too, the
        layer is composed of ragged products.
      precision: precision of the products, see `ragged_dot`.
      group_offset: integer scalar or [1], possibly traced: the matrices with index i belong to the
        group `group_offset + i` of `group_sizes`; the rows of all other groups are zero.
      implementation: None takes the CUDA kernels where they apply and the reference elsewhere;
        "cuda" insists on kernels, fused or not; "xla" is the pure JAX implementation.
      recipe: computes the products in FP8. The MLP then has first derivatives in reverse mode only.
        With forward and dgrad in FP8, tokens are quantised before they are copied to rows, and
        gate, up and x are kept for the backward pass as above. Other recipes are composed of
        `fp8_ragged_dot`. The MLP computes in bf16 where bf16 is predicted to be faster, see
        `Recipe`.
      quantized: the result of `quantize_mlp` for these weights and this recipe, to quantise weights
        once for several calls. Gradients still go to `wi_0`, `wi_1` and `wo`. Pass the real weights
        in these three, because the layer reads them where it computes in bf16.
      batch_invariant: whether the bits of a row of the result, and of the gradient of `x`, are
        independent of the other rows of the call, see `ragged_dot` and `fp8_ragged_dot`.

    Returns:
      [m, D], in the dtype to which x and the matrices promote.

    Raises:
      TypeError: an argument has an unsuitable type, dtype or shape.
      ValueError: `activation`, `implementation` or `precision` is invalid, or the number of groups
        does not fit that of the matrices, or a recipe is given together with a precision.
      NotImplementedError: an operand is sharded over explicit mesh axes; or `activation` closes
        over traced values where a recipe has forward and dgrad in FP8; or "cuda" was asked for and
        no kernel can run, which is raised when the function is lowered, with the reason.
    """
    implementation = with_invariance("ragged_mlp", implementation, batch_invariant)
    options = _checked_options(activation, precision, implementation)
    operands = _checked(
        "ragged_mlp", x, rows, wi_0, wi_1, as_weights("wo", wo), biases, weights, group_sizes,
        group_offset,
    )  # fmt: skip
    experts = Experts("ragged_mlp", operands.experts, False, *options, recipe, quantized)
    return _by_plan(experts, operands)


def gated_ragged_dot(
    x: ArrayLike,
    wi_0: ArrayLike | QuantizedArray,
    wi_1: ArrayLike | QuantizedArray | None,
    group_sizes: ArrayLike,
    *,
    rows: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    biases: Biases | None = None,
    activation: ActivationLike = "silu",
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    group_offset: ArrayLike | None = None,
    implementation: Implementation = None,
    recipe: Recipe | None = None,
    quantized: QuantizedWeights | None = None,
    concatenated: bool = False,
    batch_invariant: bool = False,
) -> jax.Array:
    """Computes the hidden layers of experts: weights * activation(x wi_0) * (x wi_1), [m, F].

    This is `ragged_mlp` without its down projection. Use it for inference, and for layers with
    their own backward pass. For training prefer `ragged_mlp`: derivatives of this function are
    composed of ragged products.

    Args:
      x, wi_0, wi_1, group_sizes, rows, weights: see `ragged_mlp`.
      activation, precision, group_offset, implementation: see `ragged_mlp`.
      recipe: see `ragged_mlp`. The hidden layer is not quantised.
      quantized: the field `wi` of the result of `quantize_mlp`.
      biases: the biases of wi_0 and wi_1, [g, F] each. Either may be None.
      concatenated: whether `wi_0` is gate and up next to each other, [g, D, 2 F]; `wi_1` is then
        None.
      preferred_element_type: dtype of the result, by default the dtype to which x and the matrices
        promote. The hidden layer is first rounded to this promoted dtype.
      batch_invariant: see `ragged_mlp`.

    Returns:
      [m, F], exactly zero in rows that no group owns.

    Raises:
      TypeError, ValueError, NotImplementedError: see `ragged_mlp`.
    """
    implementation = with_invariance("gated_ragged_dot", implementation, batch_invariant)
    options = _checked_options(activation, precision, implementation)
    operands = _checked(
        "gated_ragged_dot", x, rows, wi_0, wi_1, None, biases, weights, group_sizes,
        group_offset, checked_boolean("concatenated", concatenated),
    )  # fmt: skip
    experts = Experts("gated_ragged_dot", operands.experts, False, *options, recipe, quantized)
    hidden = _by_plan(experts, operands)
    return hidden if preferred_element_type is None else hidden.astype(preferred_element_type)


def _by_plan(experts: Experts, operands: MlpOperands) -> jax.Array:
    rows, groups = operands.rows, operands.groups
    sizes = rows.num_rows, groups.sizes.shape[0]
    experts, chosen = experts.by_plan(
        rows.x, *sizes, groups.sizes, are_copies=rows.rows is not None
    )
    return experts.mlp(rows, operands.weights, dataclasses.replace(groups, sizes=chosen))


def _checked_options(
    activation: ActivationLike, precision: lax.PrecisionLike, implementation: Implementation
) -> tuple[Activation, lax.PrecisionLike, Implementation]:
    """Returns the options of `Experts`, which are checked before the operands."""
    options = as_activation(activation), precision, implementation
    Options.of(*options)
    return options


def _checked(
    function: str,
    x: ArrayLike,
    rows: ArrayLike | None,
    wi_0: ArrayLike | QuantizedArray,
    wi_1: ArrayLike | QuantizedArray | None,
    wo: ArrayLike | QuantizedArray | None,
    biases: Biases | None,
    weights: ArrayLike | None,
    group_sizes: ArrayLike,
    group_offset: ArrayLike | None,
    concatenated: bool | None = None,
) -> MlpOperands:
    """Returns the operands as arrays of shapes that fit together."""
    tokens = Rows(as_array("x", x), None if rows is None else as_indices("rows", rows))
    wi = as_weights("wi_0", wi_0)
    up, down = (
        None if operand is None else as_weights(name, operand)
        for name, operand in (("wi_1", wi_1), ("wo", wo))
    )
    scales = None if weights is None else as_array("weights", weights)
    b0, b1, bo = _checked_biases(function, biases, with_down=down is not None)
    experts = ExpertWeights(wi_0=wi, wi_1=up, b0=b0, b1=b1, wo=down, bo=bo)
    groups = Groups(checked_group_sizes(group_sizes), canonical_offset(group_offset))
    operands = MlpOperands(tokens, experts, scales, groups)
    arrays = {
        _label(name): operand
        for name, operand in named(operands).items()
        if name not in ("rows", "sizes", "offset")
    }
    check_floating(function, **arrays)
    if tokens.rows is not None:  # a row may need any token
        refuse_sharded(function, rows=tokens.rows, **arrays)
    _check_shapes(function, operands, concatenated)
    if _is_concatenated(experts, concatenated):
        operands = operands.with_experts(wi=wi, wi_0=None)
    check_group_count(f"{function}: wi_0", groups.sizes, experts.count, group_offset)
    run_group_checks(groups.sizes, tokens.num_rows, groups.indices[1], experts.count)
    return operands


def _checked_biases(
    function: str, biases: Biases | None, *, with_down: bool
) -> list[jax.Array | None]:
    """Returns the biases of gate, up and down."""
    number = 2 + with_down
    if biases is None:
        return [None] * 3
    if not isinstance(biases, tuple | list) or len(biases) != number:
        raise TypeError(
            f"{function}: biases must be a tuple of {number}, each an array or None, got "
            f"{type(biases).__name__}"
        )
    every = [*biases, None][:3]
    return [None if x is None else as_array(f"biases[{i}]", x) for i, x in enumerate(every)]


def _label(name: str) -> str:
    """Returns the caller's name of an operand."""
    return f"biases[{BIASES.index(name)}]" if name in BIASES else name


def _is_concatenated(experts: ExpertWeights, asked: bool | None) -> bool:
    """Whether wi_0 holds gate and up. If `asked` is None, the rows of wo tell."""
    wo = experts.wo
    if asked is not None or experts.wi_1 is not None or wo is None or wo.ndim != 3:
        return bool(asked)
    columns = wo.shape[1]
    return columns > 0 and experts.hidden_columns == 2 * columns


def _check_shapes(function: str, operands: MlpOperands, concatenated: bool | None) -> None:
    shapes = {name: x.shape for name, x in named(operands).items()}
    if len(shapes["wi_0"]) != 3:
        raise TypeError(f"{function}: wi_0 must be [g, D, F], got {shapes['wi_0']}")
    if len(shapes["x"]) != 2:
        raise TypeError(f"{function}: x must be [T, D] or [m, D], got {shapes['x']}")
    if len(shapes.get("rows", (0,))) != 1:
        raise TypeError(f"{function}: rows must be [m], got {shapes['rows']}")
    experts, embed, hidden = shapes["wi_0"]
    if is_both := _is_concatenated(operands.experts, concatenated):
        if "wi_1" in shapes:
            raise TypeError(f"{function}: wi_1 must be None where wi_0 has gate and up")
        if hidden % 2:
            raise TypeError(
                f"{function}: wi_0 must be [g, D, 2 F] to have gate and up, got {shapes['wi_0']}"
            )
        hidden //= 2
    expected = dict(
        x=(shapes["x"][0], embed),
        wi_1=(experts, embed, hidden),
        wo=(experts, hidden, embed),
        weights=(operands.num_rows,),
        b0=(experts, hidden),
        b1=(experts, hidden),
        bo=(experts, embed),
    )
    if "b1" in shapes and "wi_1" not in shapes and not is_both:
        raise TypeError(f"{function}: biases[1] must be None where wi_1 is")
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            raise TypeError(
                f"{function}: {_label(name)} must have the shape {shape} to match x "
                f"{shapes['x']} and wi_0 [g, D, F] = {shapes['wi_0']}, got {shapes[name]}"
            )
