"""CUTLASS's grouped kernels on JAX's buffers: lists of products, updates, ragged products.

Sizes and pointers are written to the device before anything is timed, and schedules made.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cutlass
from benchmarks.harness.cases import Problem, row_ranges
from benchmarks.harness.peer import Call, EnqueuedCall, NotOffered, Role, without_gpu

# What example 24 runs, then what example 57 does, with the tiles that suit 16-bit operands.
PRODUCTS = {
    "kDeviceOnly": "gemm_sm80_device",
    "kHostPrecompute": "gemm_sm80_host",
    "SM90 cooperative": "gemm_sm90_cooperative_nn",
    "SM90 ping-pong": "gemm_sm90_pingpong_nn",
}
UPDATES = {
    "float64": {
        "cutlass_32x32": "syr2k_f64_32x32",  # example 38's
        "cutlass_128x128": "syr2k_f64_128x128",
    },
    "complex128": {
        "cutlass_64x64": "her2k_c128_64x64",
        "cutlass_128x64": "her2k_c128_128x64",
    },
}


def unavailable_reason() -> str | None:
    """Why the kernels cannot run here, or None."""
    return without_gpu() or cutlass.unavailable_reason()


class CutlassList:
    """A kernel of `PRODUCTS` on lists, with the problems in the caller's order or sorted by k."""

    role = Role.GROUPED
    slow = False

    def __init__(self, kernel: str, sort: bool):
        self.name = f"CUTLASS {kernel} {'sorted' if sort else 'unsorted'}"
        self._kernel, self._sort = kernel, sort

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return unavailable_reason()

    def prepare(self, problem, lhs: Sequence[jax.Array], rhs: Sequence[jax.Array]) -> Call:
        """Binds the list to the kernel."""
        if lhs[0].dtype != jnp.bfloat16:
            raise NotOffered("built for bfloat16")
        return products(self._kernel, lhs, rhs, self._sort)


def products(kernel: str, lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], sort: bool) -> Call:
    """Bfloat16 lhs [m, k] times rhs [k, n] of each pair, with a kernel of `PRODUCTS`.

    It writes its own results [m, n] again and again.
    """
    # From the host, because XLA would compile a program for every shape. NaN, so that nothing
    # unwritten looks right.
    outs = [
        jnp.asarray(np.full((a.shape[0], b.shape[1]), np.nan, a.dtype))
        for a, b in zip(lhs, rhs, strict=True)
    ]
    pointers = _pointers([*lhs, *rhs, *outs])
    count = len(outs)
    problems = [
        cutlass.Problem(a.shape[0], b.shape[1], a.shape[1], *pointers[i::count])
        for i, (a, b) in enumerate(zip(lhs, rhs, strict=True))
    ]
    return _call(PRODUCTS[kernel], problems, outs, (lhs, rhs), sort)


class CutlassRank2k:
    """A kernel of `UPDATES` on stacks."""

    role = Role.GROUPED
    slow = False

    def __init__(self, name: str):
        self.name = name

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return unavailable_reason()

    def prepare(self, update, a: jax.Array, b: jax.Array) -> Call:
        """Binds the stacks to the kernel."""
        return updates(self.name, a, b)


def updates(kernel: str, a: jax.Array, b: jax.Array) -> Call:
    """Lower triangles of A B^H + B A^H for stacks [g, n, k], with a kernel of `UPDATES`."""
    g, n, k = a.shape
    out = jnp.full((g, n, n), jnp.nan, a.dtype)
    operands = [
        [start + i * x.nbytes // g for i in range(g)]
        for start, x in zip(_pointers([a, b, out]), (a, b, out), strict=True)
    ]
    problems = [cutlass.Problem(n, n, k, *found) for found in zip(*operands, strict=True)]
    return _call(UPDATES[str(a.dtype)][kernel], problems, out, (a, b))


class CutlassGrouped:
    """Example 57's kernels on ragged products: group sizes and pointers are on the device.

    A caller whose sizes were computed on the device would need another kernel before this one, to
    write shapes, pointers and strides.
    """

    role = Role.GROUPED
    slow = False

    def __init__(self, schedule: str):
        """Either schedule of the kernels: cooperative or pingpong."""
        self.name = f"cutlass_{schedule}"
        self._schedule = schedule

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return unavailable_reason()

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Lists the groups."""
        if (problem.dtype, problem.out_dtype) != ("bfloat16", "bfloat16"):
            raise NotOffered("built for bfloat16 operands and results")
        if problem.k % 8 or problem.n % 8:
            raise NotOffered("rows have to be multiples of 16 bytes")
        layout = "tn" if problem.contracting else "nt" if problem.transpose_rhs else "nn"
        out = jnp.full(problem.out_shape, jnp.nan, lhs.dtype)
        problems = ragged_problems(problem, lhs, rhs, out, np.asarray(group_sizes))
        return _call(f"gemm_sm90_{self._schedule}_{layout}", problems, out, (lhs, rhs))


def ragged_problems(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, out: jax.Array, group_sizes: np.ndarray
) -> list[cutlass.Problem]:
    """The products of the groups that have rows.

    Raises:
      NotOffered: if there is nothing to contract in a group, whose result would have to be zero.
    """
    if problem.contracting and not group_sizes.all():
        raise NotOffered("leaves the results of empty groups as they were")
    a, b, c = _pointers([lhs, rhs, out])
    listed = []
    for group, (start, end) in enumerate(row_ranges(group_sizes)):
        rows, width = end - start, lhs.dtype.itemsize
        lhs_rows = a + start * lhs.shape[1] * width
        if problem.contracting:
            shape = problem.k, problem.n, rows
            memory = lhs_rows, b + start * rhs.shape[1] * width, c + group * out.nbytes // len(out)
        else:
            shape = rows, problem.n, problem.k
            memory = lhs_rows, b + group * rhs.nbytes // len(rhs), c + start * problem.n * width
        if rows:
            listed.append(cutlass.Problem(*shape, *memory))
    return listed


def _pointers(arrays: Sequence[jax.Array]) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.block_until_ready(arrays)]


def _call(kernel: str, problems: list, out, operands, sort: bool = False) -> Call:
    plan = cutlass.Plan(kernel, problems, sort)

    def run():
        plan.run()
        return out

    # The plan has pointers of arrays that have to live as long as it does.
    run.kept = operands
    call = EnqueuedCall(run, kernel)
    call.wait(call.run())
    return call
