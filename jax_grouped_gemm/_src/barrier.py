"""An optimisation barrier whose operands may vary over different manual mesh axes.

`jax.lax.optimization_barrier` refuses such operands. Casting them would change the types of the
results, and under `jax.vmap(spmd_axis_name=...)` no cast is possible. The barrier here only orders
the operations of one device, so each of its results can have the type of its operand.
"""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.interpreters import ad, batching, mlir, xla

from jax_grouped_gemm._src.autodiff import is_zero
from jax_grouped_gemm._src.op import Primitive

Tree = TypeVar("Tree")


def barrier(operands: Tree) -> Tree:
    """Returns `operands`. XLA makes each available only after it has computed all of them.

    A barrier orders tangents and cotangents in the same way.
    """
    leaves, structure = jax.tree.flatten(operands)
    return jax.tree.unflatten(structure, _barrier.bind(*leaves) if leaves else [])


_barrier = Primitive("grouped_gemm_barrier")
_barrier.multiple_results = True


@_barrier.def_abstract_eval
def _avals(*operands):
    return list(operands)


def _jvp(primals, tangents):
    return _barrier.bind(*primals), _of_nonzero(tangents)


def _transpose(cotangents, *operands):
    return _of_nonzero(cotangents)


def _of_nonzero(tangents):
    given = [t for t in tangents if not is_zero(t)]
    ordered = iter(_barrier.bind(*given) if given else [])
    return [t if is_zero(t) else next(ordered) for t in tangents]


def _batch(operands, dims):
    return _barrier.bind(*operands), dims


def _lower(ctx, *operands):
    from jax.extend.mlir.dialects import stablehlo

    return stablehlo.OptimizationBarrierOp(operands).results


_barrier.def_impl(lambda *operands: xla.apply_primitive(_barrier, *operands))
ad.primitive_jvps[_barrier] = _jvp
ad.primitive_transposes[_barrier] = _transpose
batching.primitive_batchers[_barrier] = _batch
mlir.register_lowering(_barrier, _lower)
