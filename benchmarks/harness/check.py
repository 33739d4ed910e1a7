"""Whether a peer computed the right thing, before any of its times count."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.cases import Problem, row_ranges

# Rows of one step of the reference. It only sets how much of a step is wasted on small groups.
TILE_ROWS = 256
TF32_EPS = 2.0**-10
# Of sums that are promoted to float32 every 128 terms.
FP8_ERROR = 1e-3


@dataclass(frozen=True)
class Error:
    """Relative errors ||out - reference|| / ||reference||: of the whole result, of its worst row.

    The worst row is there because one wrong tile of thousands hardly moves the norm of the whole.
    Suites that judge otherwise have what they judge by as `total`, and no worst row.
    """

    total: float
    worst_row: float | None = None

    def acceptable(self, problem: Problem, tolerance: float = 0.0) -> bool:
        """Whether rounding the result and accumulating in float32 explain the error; NaN does not.

        Rounding to nearest alone leaves about a quarter of `total`'s bound for a 16-bit result, and
        so does rounding both operands to TF32. FP8 tensor cores keep about 14 bits of a sum.
        `tolerance` is allowed whatever the problem.
        """
        bound = max(float(jnp.finfo(problem.out_dtype).eps) / 2, 1e-4)
        if problem.dtype == "float32" and problem.precision == "default":
            bound = max(bound, TF32_EPS)
        if problem.dtype.startswith("float8"):
            bound = max(bound, FP8_ERROR)
        return self.within(max(bound, tolerance))

    def within(self, bound: float) -> bool:
        """Whether the whole is within a bound, and the worst row within twice as much."""
        return self.total <= bound and (self.worst_row is None or self.worst_row <= 2 * bound)


def reference(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """The result in float32, from plain dots over tiles of rows that each lie within one group."""
    return _reference(problem, lhs, rhs, *_row_tiles(problem, np.asarray(group_sizes)))


def compare(out: jax.Array, expected: jax.Array) -> Error:
    """How far `out` is from the float32 result of `reference`."""
    total, worst_row = _relative_errors(out, expected)
    return Error(float(total), float(worst_row))


def _row_tiles(problem: Problem, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group, first row and number of rows of each tile.

    Empty tiles at the end make their number depend on static shapes only, so that all distributions
    of group sizes share one compilation.
    """
    tiles = [
        (group, row, min(TILE_ROWS, end - row))
        for group, (start, end) in enumerate(row_ranges(sizes))
        for row in range(start, end, TILE_ROWS)
    ]
    padded = np.zeros((problem.m // TILE_ROWS + problem.groups, 3), np.int32)
    padded[: len(tiles)] = np.reshape(tiles, (-1, 3))
    return padded[:, 0], padded[:, 1], padded[:, 2]


@functools.partial(
    jax.jit,
    static_argnums=0,
    # One default algorithm is good enough here, and autotuning would take seconds a problem.
    compiler_options={"xla_gpu_autotune_level": 0},
)
def _reference(problem, lhs, rhs, tile_group, tile_start, tile_rows):
    dot = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    # A tile's window may reach past the last row.
    lhs = jnp.pad(lhs, ((0, TILE_ROWS), (0, 0)))

    def rows(x, i):
        window = jax.lax.dynamic_slice_in_dim(x, tile_start[i], TILE_ROWS)
        inside = jnp.arange(TILE_ROWS)[:, None] < tile_rows[i]
        return jnp.where(inside, window, 0), inside

    def noncontracting(i, out):
        window, inside = rows(lhs, i)
        equation = "mk,nk->mn" if problem.transpose_rhs else "mk,kn->mn"
        product = dot(equation, window, rhs[tile_group[i]])
        kept = jax.lax.dynamic_slice_in_dim(out, tile_start[i], TILE_ROWS)
        tile = jnp.where(inside, product, kept)
        return jax.lax.dynamic_update_slice_in_dim(out, tile, tile_start[i], 0)

    def contracting(i, out):
        product = dot("mk,mn->kn", rows(lhs, i)[0], rows(rhs, i)[0])
        return out.at[tile_group[i]].add(product)

    if problem.contracting:
        rhs = jnp.pad(rhs, ((0, TILE_ROWS), (0, 0)))
        out = jnp.zeros(problem.out_shape, jnp.float32)
        return jax.lax.fori_loop(0, len(tile_group), contracting, out)
    out = jnp.zeros((problem.m + TILE_ROWS, problem.n), jnp.float32)
    return jax.lax.fori_loop(0, len(tile_group), noncontracting, out)[: problem.m]


@jax.jit
def _relative_errors(out, expected):
    difference = out.astype(jnp.float32) - expected

    def relative(axis):
        error = jnp.linalg.norm(difference, axis=axis)
        scale = jnp.linalg.norm(expected, axis=axis)
        # What must be exactly zero has no scale, and the square of a tiny error is zero.
        exact = jnp.all(difference == 0, axis=axis)
        return jnp.where(scale > 0, error / scale, jnp.where(exact, 0.0, jnp.inf))

    return relative(None), relative(-1).max()
