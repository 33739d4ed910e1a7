"""Every compiled configuration, when `use_tiles` asks for it."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import fp8_oracle, oracle
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import BF16, E4M3, F16, F32
from tests.support.ops import BOTH_OPS, random, swap

M, K, N, G = 776, 264, 520, 8

DTYPES = pytest.mark.parametrize("dtype", [BF16, F16, F32])
MAJORS = pytest.mark.parametrize("majors", list(np.ndindex(2, 2)))


def operands(op, rng, dtype):
    """Returns lhs, rhs, a cotangent and sizes of `op`. Unowned rows are NaN."""
    arrays = [random(rng, shape, dtype) for shape in op.shapes(M, K, N, G)]
    sizes = sizes_of.any_kind(rng, M, G)
    end = max(end for _, end in oracle.group_rows(sizes, 0, G, M))
    for array in arrays:
        if array.shape[0] == M:
            array[end:] = np.nan
    return *arrays, sizes


def options_of(dtype) -> tuple[dict, dict]:
    """Returns the options of a product, and those of the check of its results."""
    if dtype == F32:
        return dict(precision="highest", implementation="cuda"), dict(product_error=2.0**-21)
    return dict(implementation="cuda"), {}


def tiles_called(compiled) -> set[tuple[int, ...]]:
    """Returns tile_m, tile_n and cluster of the kernels that a program calls."""
    target = 'custom_call_target="jax_grouped_gemm.ragged'
    calls = [line for line in compiled.as_text().splitlines() if target in line]
    names = ("tile_m", "tile_n", "cluster")
    return {tuple(int(re.search(rf"\b{n} = (\d+)", call)[1]) for n in names) for call in calls}


def candidates(function, *arguments) -> list[jgg.TileConfig]:
    """Returns the tiles that all products of `function` can take."""
    plans = jgg.explain(function, *arguments).plans
    shared = set.intersection(*(set(plan.candidates) for plan in plans))
    return [tile for tile in plans[0].candidates if tile in shared]


class TestEveryConfiguration:
    @BOTH_OPS
    @DTYPES
    @MAJORS
    def test_of_the_product(self, op, dtype, majors, rng):
        options, tolerance = options_of(dtype)
        transpose_lhs, transpose_rhs = map(bool, majors)
        call = partial(op.call, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, **options)

        # The result takes over the memory of an unused, donated argument.
        @partial(jax.jit, donate_argnums=3, keep_unused=True)
        def into(lhs, rhs, sizes, memory):
            return call(lhs, rhs, sizes, preferred_element_type=memory.dtype)

        lhs, rhs, out, sizes = operands(op, rng, dtype)
        stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
        for tile in candidates(call, *stored, sizes):
            for out_dtype in (dtype, F32):
                lhs, rhs, out, sizes = operands(op, rng, dtype)
                stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
                memory = jnp.full(out.shape, jnp.nan, out_dtype)
                address = memory.unsafe_buffer_pointer()
                with jgg.use_tiles(forward=tile):
                    compiled = into.lower(*stored, sizes, memory).compile()
                    result = into(*stored, sizes, memory)
                assert tiles_called(compiled) == {(tile.tile_m, tile.tile_n, tile.cluster)}
                assert result.unsafe_buffer_pointer() == address
                oracle.check(result, op.exact(lhs, rhs, sizes), **tolerance)

    @BOTH_OPS
    @DTYPES
    def test_of_its_gradients(self, op, dtype, rng):
        options, tolerance = options_of(dtype)

        @partial(jax.jit, donate_argnums=4, keep_unused=True)
        def into(lhs, rhs, sizes, cotangent, memory):
            return op.cotangents(lhs, rhs, sizes, cotangent, **options)

        lhs, rhs, cotangent, sizes = operands(op, rng, dtype)
        tiles = candidates(op.cotangents, lhs, rhs, sizes, cotangent)
        for dgrad, wgrad in zip(tiles, rng.permutation(len(tiles)), strict=True):
            wgrad = tiles[wgrad]
            lhs, rhs, cotangent, sizes = operands(op, rng, dtype)
            memory = [jnp.full(a.shape, jnp.nan, dtype) for a in (lhs, rhs)]
            with jgg.use_tiles(dgrad=dgrad, wgrad=wgrad):
                results = into(lhs, rhs, sizes, cotangent, memory)
            oracle.check_all(results, op.exact_cotangents(lhs, rhs, sizes, cotangent), **tolerance)


class TestEveryScaledConfiguration:
    def test_of_the_product(self, rng):
        @jax.jit
        def run(*operands):
            return jgg.scaled_ragged_dot(*operands, transpose_rhs=True, implementation="cuda")

        def draw():
            sizes = sizes_of.any_kind(rng, M, G)
            lhs = fp8_oracle.quantize(random(rng, (M, K), F32), (1, 128), E4M3)
            rhs = [fp8_oracle.quantize(x, (128, 128), E4M3) for x in random(rng, (G, N, K), F32)]
            return *lhs, *map(np.stack, zip(*rhs, strict=True)), sizes

        for tile in candidates(run, *draw()):
            lhs, lhs_scale, rhs, rhs_scale, sizes = draw()
            with jgg.use_tiles(forward=tile):
                out = run(lhs, lhs_scale, rhs, rhs_scale, sizes)
            swapped = rhs.swapaxes(1, 2), rhs_scale.swapaxes(1, 2)
            fp8_oracle.check(out, fp8_oracle.noncontracting(lhs, lhs_scale, *swapped, sizes))

    def test_of_the_product_that_contracts_rows(self, rng):
        @jax.jit
        def run(*operands):
            return jgg.scaled_ragged_dot_contracting(*operands, num_rows=M, implementation="cuda")

        def draw():
            sizes = sizes_of.any_kind(rng, M, G)
            rows = (random(rng, (M, width), F32) for width in (K, N))
            lhs, rhs = (fp8_oracle.quantize_groups(x, sizes, E4M3) for x in rows)
            return *lhs, *rhs, sizes

        for tile in candidates(run, *draw()):
            *operands, sizes = draw()
            with jgg.use_tiles(forward=tile):
                out = run(*operands, sizes)
            fp8_oracle.check(out, fp8_oracle.contracting(*operands, sizes, M))
