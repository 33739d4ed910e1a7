"""The primitive of a layer of few tokens.

JAX differentiates and vectorises `sorted_mlp`, the operations on sorted rows, in its place.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fallback import with_policy
from jax_grouped_gemm._src.mlp.decode import call
from jax_grouped_gemm._src.mlp.decode.plan import plan_decode
from jax_grouped_gemm._src.mlp.operands import DecodeOperands, Groups, MlpOperands, Rows, named
from jax_grouped_gemm._src.mlp.packed import api as packed
from jax_grouped_gemm._src.mlp.plan import planner
from jax_grouped_gemm._src.mlp.primitive import Options, bind, with_one_bias
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.mlp.rows import combine
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims, own_letters
from jax_grouped_gemm._src.plan import COMPOSED
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.rows.permutation import permute_rows
from jax_grouped_gemm._src.rows.primitive import sort_by_expert
from jax_grouped_gemm._src.tile_choices import OPTIONS

LETTERS = dict(
    x="TD", chosen="Tk", scores="Tk", wi="gDU", wi_0="gDF", wi_1="gDF", b0="gF", b1="gF",
    wo="gFY", bo="gY", offset="o",
)  # fmt: skip
"""The dimensions of operands by name."""


def is_taken(given: DecodeOperands, num_experts: int, options: Options) -> bool:
    """Whether kernels of the layer sort tokens themselves. The answer follows from shapes alone,
    because a program is traced before its device is known."""
    params = with_policy(dict(vars(options), num_experts=num_experts), per_row=True)
    problem = MlpProblem("decode_mlp", given, params)
    return plan_decode(problem, H200).kernel != COMPOSED


def mlp(given: DecodeOperands, num_experts: int, options: Options) -> jax.Array:
    """Returns y [T, D]: for each token, the sum over its experts."""
    return bind(DECODE, given, num_experts=num_experts, **vars(options))


def sorted_mlp(
    function: str, given: DecodeOperands, num_experts: int, options: Options
) -> jax.Array:
    """Returns y [T, D], by operations of rows that are sorted by expert."""
    operands = sorted_operands(given, num_experts, options.implementation)
    y = packed.mlp(function, options, operands.aligned())
    return combine(checkpoint_name(y, "mlpwo"), operands.rows)


def sorted_operands(given: DecodeOperands, num_experts: int, implementation: Any) -> MlpOperands:
    """Sorts rows by expert in a separate operation."""
    order, inverse, sizes = sort_by_expert(
        given.chosen.reshape(-1), num_experts=num_experts, implementation=implementation
    )
    inverse = inverse.reshape(given.chosen.shape)
    rows = Rows(given.x, order // given.chosen.shape[1], inverse)
    weights = permute_rows(given.scores.reshape(-1), order, inverse.reshape(-1))
    return MlpOperands(rows, given.experts, weights, Groups(sizes, given.offset))


def _reference(*leaves: jax.Array, tree: Any, num_experts: int, **options: Any) -> jax.Array:
    return sorted_mlp("dropless_mlp", tree.unflatten(leaves), num_experts, Options(**options))


def _aval(*leaves: Any, tree: Any, **_: Any) -> Any:
    given: DecodeOperands = tree.unflatten(leaves)
    assert given.experts.wo is not None
    columns = given.experts.wo.shape[2]
    return DECODE.unsharded_aval(leaves, (given.x.shape[0], columns), given.x.dtype)


def _dims(operands: Any, *_: Any, tree: Any, **params: Any) -> Dims:
    """Names dimensions: unpacked arrays may be split by columns of hidden and of the result."""
    whole, specs = [*"TDkgoU"], []
    for name, place in named(tree.unflatten(range(tree.num_leaves))).items():
        for i in jax.tree.leaves(place):
            spec = [*LETTERS[name]]
            if isinstance(place, QuantizedArray):
                whole += (spec := own_letters(i, operands[i]))
            specs.append(spec)
    return Dims.of(*specs, to="TY", whole=whole)


DECODE = Op(
    name="decode_mlp",
    per_row=True,
    operand_ranks=None,
    targets=(call.TARGET, call.PACKED_TARGET),
    avals=_aval,
    planner=planner("decode_mlp", plan_decode),
    planned=OPTIONS,
    call=call.decode,
    reference=_reference,
    dims=_dims,
    localizer=with_one_bias,
)
DECODE.follow_reference()
