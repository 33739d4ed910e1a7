"""Checks the result of a peer before its times count."""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.harness.cases import Problem
from benchmarks.peers.ours import product

TF32_EPS = 2.0**-10
# The error of sums that are promoted to float32 every 128 terms.
FP8_ERROR = 1e-3


@dataclass(frozen=True)
class Error:
    """Relative errors ||out - reference|| / ||reference|| of the whole result and its worst row.

    The worst row detects a single wrong tile, which hardly changes the norm of the whole result.
    Suites with another measure of error store it as `total`, and have no worst row.
    """

    total: float
    worst_row: float | None = None

    def acceptable(self, problem: Problem, tolerance: float = 0.0) -> bool:
        """Returns whether rounding and accumulating in float32 explain the error. NaN fails.

        Rounding a 16-bit result to nearest uses about a quarter of the bound for `total`, and so
        does rounding both operands to TF32. FP8 tensor cores keep about 14 bits of a sum. The bound
        is at least `tolerance`.
        """
        bound = max(float(jnp.finfo(problem.out_dtype).eps) / 2, 1e-4)
        if problem.dtype == "float32" and problem.precision == "default":
            bound = max(bound, TF32_EPS)
        if problem.dtype.startswith("float8"):
            bound = max(bound, FP8_ERROR)
        return self.within(max(bound, tolerance))

    def within(self, bound: float) -> bool:
        """Returns whether the total is at most `bound`, and the worst row at most twice that."""
        return self.total <= bound and (self.worst_row is None or self.worst_row <= 2 * bound)


def reference(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Returns the result in float32 by the package's pure JAX reference."""
    exact = dataclasses.replace(problem, precision="highest", out_dtype="float32")
    return _reference(exact, lhs, rhs, jnp.asarray(group_sizes))


@functools.partial(
    jax.jit,
    static_argnums=0,
    # Do not autotune, because autotuning takes seconds for each problem.
    compiler_options={"xla_gpu_autotune_level": 0},
)
def _reference(problem, *operands):
    return product(problem, "xla")(*operands)


def compare(out: jax.Array, expected: jax.Array) -> Error:
    """Returns the error of `out` relative to the float32 result of `reference`."""
    total, worst_row = _relative_errors(out, expected)
    return Error(float(total), float(worst_row))


@jax.jit
def _relative_errors(out, expected):
    difference = out.astype(jnp.float32) - expected

    def relative(axis):
        error = jnp.linalg.norm(difference, axis=axis)
        scale = jnp.linalg.norm(expected, axis=axis)
        # Compare exactly if the expected result is zero, because squares of tiny errors are zero.
        exact = jnp.all(difference == 0, axis=axis)
        return jnp.where(scale > 0, error / scale, jnp.where(exact, 0.0, jnp.inf))

    return relative(None), relative(-1).max()
