"""The primitive that dequantises. `explain` lists it. Differentiating weights raises an error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import stacked
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.quantized import call, plan
from jax_grouped_gemm._src.quantized.format import Format, Matrix, Parts, functions_of
from jax_grouped_gemm._src.quantized.plan import DequantizeProblem

FROZEN = (
    "quantised weights are frozen; differentiate x or adapters, or use the array that "
    "dequantize() returns as the weights"
)


@jax.custom_jvp
def frozen(arrays: Any) -> Any:
    """Returns the arrays; differentiating them raises an error."""
    return arrays


@frozen.defjvp
def _(primals, tangents):
    raise TypeError(FROZEN)


def dequantize(
    parts: Parts, format: Format, matrix: Matrix, dtype: np.dtype, reason: str = ""
) -> jax.Array:
    """Returns [g, k, n] of `dtype` from parts [g, ...]. `reason` says why no kernel reads parts."""
    given = {name: x for name, x in parts._asdict().items() if x is not None}
    return DEQUANTIZE.bind(
        *given.values(),
        names=tuple(given),
        format=format,
        matrix=matrix,
        dtype=np.dtype(dtype),
        reason=reason,
        implementation=None,
    )


def _aval(*operands, matrix, dtype, **params):
    return DEQUANTIZE.unsharded_aval(operands, (operands[0].shape[0], *matrix), dtype)


def _reference(*operands, names, format, matrix, dtype):
    functions = functions_of(format)

    def of_one(*parts):
        return functions.dequantize(
            Parts(**dict(zip(names, parts, strict=True))), format, matrix, dtype
        )

    if not operands[0].shape[0]:
        return jnp.zeros((0, *matrix), dtype)
    return jax.vmap(of_one)(*operands)


def _dims(operands, results, **params) -> Dims:
    letters = iter("abcdefhijklopqrstuvwxyz")
    specs = ["g" + "".join(next(letters) for _ in x.shape[1:]) for x in operands]
    to = "gmn"
    return Dims.of(*specs, to=to, whole="".join({*"".join(specs), *to} - {"g"}))


def _batched(operands, dims, **params):
    """Dequantises the matrices of the whole batch as one stack."""
    every = stacked(operands, dims)
    size, count = every[0].shape[:2]
    out = DEQUANTIZE.bind(*(x.reshape(size * count, *x.shape[2:]) for x in every), **params)
    return out.reshape(size, out.shape[0] // size, *out.shape[1:]), 0


def _jvp(primals, tangents, **params):
    raise TypeError(FROZEN)


def _call(plan: Plan[DequantizeProblem], *operands: jax.Array) -> jax.Array:
    problem = plan.problem
    return call.unpack(
        dict(zip(problem.names, operands, strict=True)),
        problem.format.name,
        problem.format.group_size,
        problem.matrix,
    )


DEQUANTIZE = Op(
    name="dequantize_weights",
    operand_ranks=None,
    targets=(call.UNPACK,),
    avals=_aval,
    planner=plan.plan_dequantize,
    planned=("reason",),
    call=_call,
    reference=_reference,
    dims=_dims,
    is_matmul=False,
    is_listed=True,
)
DEQUANTIZE.def_jvp(_jvp)
DEQUANTIZE.def_batching(_batched)
