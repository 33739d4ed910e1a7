"""Quantisers, FP8 products and MLPs in FP8."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.formats import IN_BLOCKS
from jax_grouped_gemm._src.fp8.quantize import primitive as quantizers
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.fp8.scaled import primitive as scaled
from tests.gpu.sanitizer import SIZES, G, K, M, N
from tests.support import fp8_oracle, mlp
from tests.support.fp8_decode import check_bits
from tests.support.fp8_mlp_on_gpu import check_elementwise_steps
from tests.support.ops import random


def fp8_products(rng: np.random.Generator, sizes: np.ndarray) -> int:
    """Quantises and multiplies; returns the number of launches."""
    on_gpu = dict(implementation="cuda")
    shapes = (M, K), (G, K, N), (M, N)
    lhs, rhs, cotangent = (random(rng, shape, jnp.bfloat16) for shape in shapes)
    rows, cotangents = (jgg.quantize_ragged(x, sizes, **on_gpu) for x in (lhs, cotangent))
    weights = jgg.quantize_weights(rhs, **on_gpu)
    for got, want in zip(
        (*rows, *jgg.quantize_blockwise(lhs, **on_gpu)),
        (
            *fp8_oracle.quantize(lhs, (1, 128), jnp.float8_e4m3fn),
            *fp8_oracle.quantize_groups(lhs, sizes, jnp.float8_e4m3fn),
            *fp8_oracle.quantize(lhs, (1, 128), jnp.float8_e4m3fn),
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(np.float32(got), np.float32(want))
    out = jgg.scaled_ragged_dot(*rows[:2], *weights[2:], sizes, transpose_rhs=True, **on_gpu)
    fp8_oracle.check(out, fp8_oracle.noncontracting(*rows[:2], *weights[:2], sizes))
    columns = *rows[2:], *cotangents[2:]
    out = jgg.scaled_ragged_dot_contracting(*columns, sizes, num_rows=M, **on_gpu)
    columns = [np.asarray(x) for x in columns]
    fp8_oracle.check(out, fp8_oracle.contracting(*columns, sizes, M))
    # Another kernel takes matrices of more than two tiles of 256 x 256 for each processor.
    many = random(rng, (34, 512, 1024), jnp.bfloat16)
    values, scales = fp8_oracle.quantize(many[-1], (128, 128), jnp.float8_e4m3fn)
    for got, want in zip(
        jgg.quantize_weights(many, **on_gpu), (values, scales, values.T, scales.T), strict=True
    ):
        np.testing.assert_array_equal(np.float32(got[-1]), np.float32(want))
    return 7


def fp8_configurations(rng: np.random.Generator, sizes: np.ndarray) -> int:
    """Runs every compiled configuration of the FP8 products; returns the number of launches."""
    offset = np.zeros(1, np.int32)
    options = dict(preferred_element_type=np.dtype(jnp.bfloat16), implementation="cuda")
    forward = dict(transpose_rhs=True, **IN_BLOCKS)
    launches = 0
    for k in (K, 496):  # scales are read one step at a time, or four steps at a time
        lhs, rhs = (random(rng, shape, jnp.bfloat16) for shape in ((M, k), (G, k, N)))
        rows, weights = jgg.quantize_ragged(lhs, sizes), jgg.quantize_weights(rhs)
        exact = fp8_oracle.noncontracting(*rows[:2], *weights[:2], sizes)
        operands = *rows[:2], *weights[2:], sizes, offset
        for tile in (choice.tile for choice in plan_fp8.NONCONTRACTING_KERNELS[1:]):
            out = scaled.scaled_ragged_noncontracting(*operands, **forward, **options, tile=tile)
            fp8_oracle.check(out, exact)
            launches += 1
    columns = [np.asarray(x) for x in 2 * rows[2:]]
    exact = fp8_oracle.contracting(*columns, sizes, M)
    for tile in (choice.tile for choice in plan_fp8.CONTRACTING_KERNELS[1:]):
        out = scaled.scaled_ragged_contracting(
            *columns, sizes, offset, num_rows=M, num_groups=G, **options, tile=tile
        )
        fp8_oracle.check(out, exact)
        launches += 1
    return launches


def rows_of_tokens(rng: np.random.Generator) -> int:
    """Quantises tokens for rows, some of which have no token; returns the number of launches."""
    widths = 1, K, 496
    for width in widths:
        x = random(rng, (61, width), jnp.bfloat16)
        rows = rng.integers(-2, len(x) + 2, M).astype(np.int32)
        exists = (rows >= 0) & (rows < len(x))
        got = quantizers.quantize_tokens(
            x, rows, dtype=np.dtype(jnp.float8_e4m3fn), power_of_two=False, implementation="cuda"
        )
        copies = np.where(exists[:, None], x[rows % len(x)], np.zeros((), x.dtype))
        want = fp8_oracle.quantize(copies, (1, 128), jnp.float8_e4m3fn)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.float32(one), np.float32(other))
    return len(widths)


def fp8(rng: np.random.Generator) -> int:
    launches = rows_of_tokens(rng)
    for sizes in np.array(SIZES, np.int32):
        launches += fp8_products(rng, sizes) + fp8_configurations(rng, sizes)
    return launches


def fp8_mlps(rng: np.random.Generator) -> int:
    """Runs elementwise steps on whole and partial blocks, and whole layers with gradients."""
    launches = 0
    for activation, (rows, columns) in product(
        ("silu", "swiglu_oai"), ((1, 128), (129, 200), (65, 203), (300, 256))
    ):
        check_elementwise_steps(rng, activation, rows, columns, jnp.bfloat16, jgg.Recipe())
        launches += 2
    case = mlp.case(rng, tokens=64, top_k=3, embed=136, hidden=200, experts=5, dtype=jnp.bfloat16)
    for recipe in (jgg.Recipe(), jgg.Recipe(wgrad="bf16")):
        results = {}
        for name in ("cuda", "xla"):
            layer = partial(case.run, jgg.ragged_mlp, recipe=recipe, implementation=name)
            y, vjp = jax.vjp(layer, *case.factors)
            results[name] = y, *vjp(jnp.ones_like(y))
        for one, other in zip(*map(jax.tree.leaves, results.values()), strict=True):
            assert fp8_oracle.relative_error(one, other) < 3e-2
        launches += 1
    return launches


def fp8_layers_of_few_tokens(rng: np.random.Generator) -> int:
    """Runs layers whose kernels begin early, with partial blocks and experts of other devices."""
    shapes = (
        (24, 1, 8, 128, 128),
        (24, 11, 3, 272, 208),
        (96, 32, 4, 144, 400),
        (96, 128, 1, 16, 16),
    )
    for experts, tokens, top_k, embed, hidden in shapes:
        check_bits(
            rng,
            experts=experts,
            local=experts // 3,
            tokens=tokens,
            top_k=top_k,
            embed=embed,
            hidden=hidden,
            power_of_two=tokens > 1,
        )
    return 3 * len(shapes)
