"""The launches of expert MLPs and layers, in 16 bits."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.mlp.kernels import FEW_ROWS_TILE
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from tests.gpu.sanitizer import OFFSETS, SIZES, K, M, N
from tests.support import group_sizes as sizes_of
from tests.support import rows as rows_oracle
from tests.support.few_rows_on_gpu import check_random
from tests.support.mlp_on_gpu import (
    check_gated,
    check_gradient,
    check_paired,
    check_paired_weights,
)
from tests.support.ops import (
    random,
)


def expert_mlps(rng: np.random.Generator) -> int:
    """Runs gradients in wide and narrow tiles, and weight gradients of rows and of tokens."""
    launches = 0
    for (weighted, hidden), activation in product(
        ((False, N), (True, 200)), ("silu", "swiglu_oai", "gelu")
    ):
        for sizes, offset in zip(np.array(SIZES, np.int32), OFFSETS, strict=True):
            options = dict(m=M, embed=K, hidden=hidden, offset=offset or 0)
            operands, results = check_gated(
                rng, sizes, weighted=weighted, activation=activation, **options
            )
            check_gradient(rng, operands, results, sizes, offset or 0, activation)
            check_paired(rng, sizes, **options)
            check_paired_weights(rng, sizes, tokens=40 if weighted else None, **options)
            launches += 6
    sizes = np.array(SIZES, np.int32)[0]
    options = dict(m=M, embed=K, hidden=200, activation="relu2", with_up=False)
    operands, results = check_gated(rng, sizes, **options)
    check_gradient(rng, operands, results, sizes, 0, "relu2")
    # With one long group, tiles are cut, and other warps write zeros.
    for tokens in (None, 40):
        check_paired_weights(
            rng, sizes_of.one_hot(5000, 4, 2), m=5000, embed=264, hidden=200, tokens=tokens
        )
    return launches + 7


def expert_mlps_of_few_rows(rng: np.random.Generator) -> int:
    """Runs both tiles of forward kernels, with and without biases, gathered rows and weights."""
    launches = 0
    for tile in (FEW_ROWS_TILE, DEFAULT_TILE):
        for sizes, offset in zip(np.array(SIZES, np.int32), OFFSETS, strict=True):
            options = dict(embed=K, hidden=N, offset=offset or 0)
            check_random(rng, tile, sizes, M, **options)
            launches += 3
        few = np.array([3, 0, 1, 17, 8], np.int32)
        check_random(rng, tile, few, 40, embed=K, hidden=192)
        launches += 3
    return launches


def packed_weights(rng: np.random.Generator) -> int:
    """Multiplies by packed weights, streamed or decoded, and unpacks weights."""
    launches = 0
    formats = "mxfp4", "int4", "int8", "fp8", "fp8_128x128"
    for format, zero_points in (*((format, False) for format in formats), ("int4", True)):
        dense = jnp.asarray(rng.standard_normal((4, 200, 136)), jnp.float32)
        q = jgg.quantize(dense, format, zero_points=zero_points)
        w = np.asarray(jax.jit(jgg.dequantize)(q), np.float64)
        for sizes in ([3, 0, 17, 2], [100, 0, 140, 9], [300, 0, 340, 9]):
            m = sum(sizes) + 2
            x = jnp.asarray(rng.standard_normal((m, 200)), jnp.bfloat16)
            y = jgg.ragged_dot(x, q, jnp.asarray(sizes, jnp.int32), implementation="cuda")
            of_rows = np.repeat(w, sizes, axis=0)
            want = np.einsum("mk,mkn->mn", np.asarray(x, np.float64)[: m - 2], of_rows)
            scale = np.abs(want).max()
            np.testing.assert_allclose(np.asarray(y[:-2], np.float64), want, atol=2**-7 * scale)
            assert not np.asarray(y[-2:]).any()
            launches += 1
        launches += 1
    # Gate and up in tiles of 256 rows, two thread blocks in a cluster.
    sizes, x = [70, 1500], jnp.asarray(rng.standard_normal((1600, 72)), jnp.bfloat16)
    for format in ("mxfp4", "fp8_128x128"):
        gate, up = (
            jgg.quantize(jnp.asarray(rng.standard_normal((2, 72, 2056)) / 8, jnp.float32), format)
            for _ in range(2)
        )
        hidden = jgg.gated_ragged_dot(x, gate, up, jnp.asarray(sizes, jnp.int32))
        (plan,) = jgg.explain(jgg.gated_ragged_dot, x, gate, up, jnp.asarray(sizes)).plans
        assert plan.kernel.name == "decoded_256x128"
        rows = np.split(np.asarray(x, np.float64)[:1570], [70])
        of_gate, of_up = (
            np.concatenate([a @ b for a, b in zip(rows, np.asarray(w, np.float64), strict=True)])
            for w in (jax.jit(jgg.dequantize)(q) for q in (gate, up))
        )
        want = of_gate / (1 + np.exp(-of_gate)) * of_up
        scale = np.abs(want).max()
        np.testing.assert_allclose(np.asarray(hidden[:1570], np.float64), want, atol=2**-7 * scale)
        assert not np.asarray(hidden[1570:]).any()
        launches += 1
    return launches


def rows(rng: np.random.Generator) -> int:
    """Sorts in one launch and in two, and moves rows in vectors and element by element."""
    launches = 0
    for pairs, experts in ((1, 1), (700, 24), (9001, 24), (9001, 4096)):
        values = rng.integers(-2, experts + 2, pairs).astype(np.int32)
        result = moe.sort_by_expert(values, experts, implementation="cuda")
        rows_oracle.check_sorted(result, values, experts)
        launches += 1 if pairs <= 4096 else 2
    for width, dtype, counted in product(
        (24, 37, 1032), (jnp.bfloat16, jnp.float32), (False, True)
    ):
        pairs = rows_oracle.Pairs.random(rng, 61, 9, 570, counted=counted)
        x, y = (random(rng, (size, width), dtype) for size in (61, 570))
        options = dict(implementation="cuda")
        want = rows_oracle.gather(x, pairs.token_of_row(), pairs.valid)
        for inverse in (None, pairs.row_of_pair):
            got = moe.gather_rows(x, pairs.token_of_row(), pairs.count, inverse=inverse, **options)
            np.testing.assert_array_equal(got[: pairs.valid], want)

        def weighted(y, weights, pairs=pairs, options=options):
            return moe.combine(
                y,
                pairs.row_of_pair,
                weights=weights,
                order=pairs.pair_of_row,
                count=pairs.count,
                **options,
            )

        got, vjp = jax.vjp(weighted, y, pairs.weights)
        exact = rows_oracle.combine(y, pairs, pairs.weights)
        assert np.linalg.norm(np.float64(got) - exact) <= 2.0**-8 * np.linalg.norm(exact)
        jax.block_until_ready(vjp(got))
        launches += 5
    return launches
