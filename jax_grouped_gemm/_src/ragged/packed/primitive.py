"""The primitive of products whose kernels read packed matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.call import DECODED, STREAMED
from jax_grouped_gemm._src.quantized.plan import PackedProblem, plan_packed
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.ragged.packed import call, reference
from jax_grouped_gemm._src.tile_choices import PRODUCT_OPTIONS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedOperands:
    """Rows [m, k], matrices [g, k, n], group sizes [G] and the group of the first matrix [1]."""

    x: jax.Array
    rhs: QuantizedArray
    sizes: jax.Array
    offset: jax.Array

    def problem(self, dtype: np.dtype) -> PackedProblem:
        """Returns the problem of the product with a result of `dtype`."""
        sizes = self.x.shape[0], self.sizes.shape[0]
        return PackedProblem.of(self.x.dtype.name, self.rhs, np.dtype(dtype).name, *sizes)


def _aval(*leaves: Any, tree: Any, preferred_element_type: Any, **_: Any) -> Any:
    given: PackedOperands = tree.unflatten(leaves)
    shape = given.x.shape[0], given.rhs.shape[2]
    return PACKED_DOT.unsharded_aval(leaves, shape, preferred_element_type)


def _plan(avals: Sequence[Any], params: Mapping[str, Any], target: Any) -> Plan[PackedProblem]:
    given: PackedOperands = params["tree"].unflatten(avals)
    problem = given.problem(params["preferred_element_type"])
    return plan_packed(problem, target, params["implementation"])


def _dims(operands: Sequence[Any], *_: Any, **params: Any) -> Dims:
    """Returns the dimensions. Devices may split rows or groups; k and n are gathered if split."""
    letters = iter("acdefhijklnpqrstuvwxyz")
    x, *parts, sizes, offset = operands
    inner = ["".join(next(letters) for _ in part.shape[1:]) for part in parts]
    of_parts = [f"g{spec}" for spec in inner]
    return Dims.of("mK", *of_parts, "G", "o", to="mN", whole="KNGo" + "".join(inner))


PACKED_DOT = Op(
    name="packed_ragged_dot",
    function="ragged_dot(lhs)",
    per_row=True,
    operand_ranks=None,
    targets=(STREAMED, DECODED),
    avals=_aval,
    planner=_plan,
    planned=PRODUCT_OPTIONS,
    call=call.dot,
    reference=reference.dot,
    dims=_dims,
    localizer=slices.of_groups,
)
PACKED_DOT.follow_reference()
