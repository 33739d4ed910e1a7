"""The MLP of experts whose matrices are packed, by kernels that read packed matrices."""

from __future__ import annotations

from typing import Any

import jax

from jax_grouped_gemm._src.mlp import plan
from jax_grouped_gemm._src.mlp.operands import MlpOperands, named
from jax_grouped_gemm._src.mlp.packed import call, reference
from jax_grouped_gemm._src.mlp.primitive import LETTERS, OF_ROWS
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims, own_letters
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.call import DECODED, STREAMED
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.tile_choices import OPTIONS


def _aval(*leaves: Any, tree: Any, **_: Any) -> Any:
    given: MlpOperands = tree.unflatten(leaves)
    experts = given.experts
    columns = experts.hidden_columns if experts.wo is None else experts.wo.shape[2]
    return PACKED_MLP.unsharded_aval(leaves, (given.num_rows, columns), given.rows.x.dtype)


def _dims(operands: Any, *_: Any, tree: Any, **params: Any) -> Dims:
    """Names dimensions. Rows are split unless they are copies; packed matrices are gathered."""
    given = named(tree.unflatten(range(tree.num_leaves)))
    whole, specs = [*"KDFGTok"], []
    letters = LETTERS | (OF_ROWS if "rows" in given else {})
    if "rows" in given:
        whole += "m"
    for name, place in given.items():
        for i in jax.tree.leaves(place):
            of_matrix = isinstance(place, QuantizedArray)
            spec = own_letters(i, operands[i]) if of_matrix else [*letters[name]]
            whole += [letter for letter in spec if letter != "m"]
            specs.append(spec)
    return Dims.of(*specs, to="mD", whole=whole)


PACKED_MLP = Op(
    name="packed_mlp",
    per_row=True,
    operand_ranks=None,
    targets=(STREAMED, DECODED),
    avals=_aval,
    planner=plan.planner("packed_mlp", plan.plan_packed),
    planned=OPTIONS,
    call=call.mlp,
    reference=reference.mlp,
    dims=_dims,
    localizer=slices.of_groups,
)
PACKED_MLP.follow_reference()
