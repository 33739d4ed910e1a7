"""CUTLASS's grouped kernels on JAX's buffers, for lists of products and for updates.

Sizes, pointers and schedules are on the device before anything is timed.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cutlass
from benchmarks.harness.peer import Call, EnqueuedCall, NotOffered, Peer, Role, once, without_gpu

# The kernels of CUTLASS's examples 24 and 57, with tiles that suit 16-bit operands.
PRODUCTS = {
    "kDeviceOnly": "gemm_sm80_device",
    "kHostPrecompute": "gemm_sm80_host",
    "SM90 cooperative": "gemm_sm90_cooperative_nn",
    "SM90 ping-pong": "gemm_sm90_pingpong_nn",
}
UPDATES = {
    "float64": {
        "cutlass_32x32": "syr2k_f64_32x32",  # of example 38
        "cutlass_128x128": "syr2k_f64_128x128",
    },
    "complex128": {"cutlass_64x64": "her2k_c128_64x64", "cutlass_128x64": "her2k_c128_128x64"},
}


class CutlassPeer(Peer):
    role = Role.GROUPED

    def unavailable_reason(self):
        return without_gpu() or cutlass.unavailable_reason()


class CutlassList(CutlassPeer):
    """A kernel of `PRODUCTS`, with the problems in the caller's order or sorted by k."""

    def __init__(self, kernel: str, sort: bool):
        self.name = f"CUTLASS {kernel} {'sorted' if sort else 'unsorted'}"
        self._kernel, self._sort = kernel, sort

    def prepare(self, problem, lhs, rhs):
        """Returns a call that writes the same results [m, n] in every run."""
        if lhs[0].dtype != jnp.bfloat16:
            raise NotOffered("built for bfloat16")
        # Fill results with NaN, so that an unwritten element is wrong. Copy them from the host,
        # because XLA would compile a program for every shape.
        outs = [
            jnp.asarray(np.full((a.shape[0], b.shape[1]), np.nan, a.dtype))
            for a, b in zip(lhs, rhs, strict=True)
        ]
        pointers, count = _pointers([*lhs, *rhs, *outs]), len(outs)
        problems = [
            cutlass.Problem(a.shape[0], b.shape[1], a.shape[1], *pointers[i::count])
            for i, (a, b) in enumerate(zip(lhs, rhs, strict=True))
        ]
        return _call(PRODUCTS[self._kernel], problems, outs, (lhs, rhs), self._sort)


class CutlassRank2k(CutlassPeer):
    """Lower triangles of A B^H + B A^H for stacks [g, n, k], with a kernel of `UPDATES`."""

    def __init__(self, name: str):
        self.name = name

    def prepare(self, update, a, b):
        g, n, k = a.shape
        out = jnp.full((g, n, n), jnp.nan, a.dtype)
        operands = [
            [start + i * x.nbytes // g for i in range(g)]
            for start, x in zip(_pointers([a, b, out]), (a, b, out), strict=True)
        ]
        problems = [cutlass.Problem(n, n, k, *found) for found in zip(*operands, strict=True)]
        return _call(UPDATES[str(a.dtype)][self.name], problems, out, (a, b))


def _pointers(arrays: Sequence[jax.Array]) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.block_until_ready(arrays)]


def _call(kernel: str, problems: list, out, operands, sort: bool = False) -> Call:
    plan = cutlass.Plan(kernel, problems, sort)

    def run():
        plan.run()
        return out

    # The arrays have to live as long as the plan, which has pointers to them.
    run.kept = operands
    return once(EnqueuedCall(run, kernel))
