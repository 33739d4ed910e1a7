"""Measures quantisers of rows, of weights and their transpose, and of ragged rows."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import jax_grouped_gemm as jgg
from benchmarks.fp8.cases import of_bf16
from benchmarks.harness import check
from benchmarks.harness.bandwidth import Bandwidth, copy_call
from benchmarks.harness.cases import Case
from benchmarks.harness.inputs import Inputs
from benchmarks.harness.measure import Workload, described
from benchmarks.harness.peer import Call, JaxPeer, Peer, Role, pinned_implementation

Quantizer = Callable[..., Sequence[jax.Array]]

# On a GPU, XLA divides by `rcp.approx`. The inverse of a scale may be off by a unit in the last
# place, so about one element in 10^7 lies on the other side of a tie. Scales are products and have
# to be equal. The tests compare every bit with NumPy's.
MOST_DIFFERING = 1e-6


def quantizer(op: str, implementation: str) -> Quantizer:
    """Returns the function of (x, group sizes), or of (x,) alone, that is measured."""
    functions = {
        "quantize_rows": jgg.quantize_blockwise,
        "quantize_weights": jgg.quantize_weights,
        "quantize_ragged": jgg.quantize_ragged,
    }
    return functools.partial(functions[op], implementation=implementation)


def operands(case: Case, inputs: Inputs) -> tuple[jax.Array, ...]:
    """Returns the array that the case quantises, the weights or the rows of a forward product."""
    x, w, sizes = inputs.operands(of_bf16(case, "forward"))
    of = {"quantize_rows": (x,), "quantize_weights": (w,), "quantize_ragged": (x, sizes)}
    return of[case.op.name]


@jax.jit
def differing_share(results: Sequence[jax.Array], expected: Sequence[jax.Array]) -> jax.Array:
    """Returns the share of quantised elements whose bits differ, or 1 if any scale differs."""
    differing, count, same_scales = 0, 0, True
    for ours, theirs in zip(results, expected, strict=True):
        differs = _bits(ours) != _bits(theirs)
        if theirs.dtype == jnp.float32:
            same_scales &= ~jnp.any(differs)
        else:
            differing, count = differing + jnp.sum(differs), count + theirs.size
    return jnp.where(same_scales, differing / count, 1.0)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def peers(op: str) -> list[Peer]:
    ours = quantizer(op, pinned_implementation())
    return [JaxPeer("ours", Role.OURS, ours), Bandwidth("copy", copy_call)]


def work(case: Case, inputs: Inputs) -> Workload:
    given = operands(case, inputs)
    expected = tuple(jax.jit(quantizer(case.op.name, "xla"))(*given))

    def judge(call: Call) -> tuple[check.Error, bool]:
        share = float(differing_share(tuple(call.run()), expected))
        return check.Error(share), share <= MOST_DIFFERING

    written = sum(x.nbytes for x in expected)
    return Workload(
        case.name,
        case.op.name,
        given,
        judge,
        description=described(case, out_dtype=str(expected[0].dtype)),
        flops=0,
        bytes=given[0].nbytes + written,
        written_bytes=written,
        seed=case.seed,
    )
