"""A small set of kernel launches to run under compute-sanitizer:

compute-sanitizer --tool memcheck python -m tests.gpu.sanitizer_smoke
compute-sanitizer --tool racecheck python -m tests.gpu.sanitizer_smoke fp8 fp64

Arguments name the parts to run, all by default: each is minutes of work for a sanitizer, and parts
in processes of their own can run side by side. Every buffer is its own allocation, so that an
access past the end of one is seen, and XLA's autotuning is off, so that nearly all kernels seen are
ours. Exits with an error on a wrong result.
"""

import os
import sys
from itertools import product

os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
    # The sanitizer itself crashed now and then while XLA compiled.
    + " --xla_gpu_force_compilation_parallelism=1"
)

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.fp8 import plan as plan_fp8
from jax_grouped_gemm._src.fp8 import primitive as fp8_primitive
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged import primitive as ragged
from jax_grouped_gemm._src.ragged.plan import FLOAT32_FEW_ROWS_TILE, PINGPONG_TILE, STREAM_K_TILE
from tests.support import (
    fp8_oracle,
    oracle,
)
from tests.support import rows as rows_oracle
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.mlp_on_gpu import check_gated, check_gradient, check_paired
from tests.support.ops import (
    CONTRACTING,
    NONCONTRACTING,
    OPS,
    contracting,
    noncontracting,
    random,
    swap,
)
from tests.support.products import random_list
from tests.support.updates import SYR2K, SYRK, UPDATES, check_double, check_real

M, K, N, G = 392, 136, 264, 5
SIZES = [
    [129, 0, 64, 1, 150],  # a tail, an empty group, boundaries off the tile
    [-3, 392, 0, 2**31 - 1, 7],  # out of range: clamped, never an access out of bounds
    [0, 0, 0, 0, 0],
]
OFFSETS = [None, 2, -4]


def ragged_products(rng) -> int:
    launches = 0
    for op, transpose_lhs, transpose_rhs in product(OPS, (False, True), (False, True)):
        lhs, rhs, _ = (random(rng, shape, jnp.bfloat16) for shape in op.shapes(M, K, N, G))
        outputs = zip((jnp.bfloat16, jnp.float32, jnp.bfloat16), OFFSETS, strict=True)
        runs = list(product(outputs, (DEFAULT_TILE,)))
        if op is CONTRACTING and not transpose_lhs and not transpose_rhs:
            runs += product(zip([jnp.float32] * 3, OFFSETS, strict=True), (PINGPONG_TILE,))
        for (out_dtype, offset), tile in runs:
            for sizes in np.array(SIZES, np.int32):
                out = op.call(
                    swap(lhs, transpose_lhs),
                    swap(rhs, transpose_rhs),
                    sizes,
                    offset,
                    tile=tile,
                    transpose_lhs=transpose_lhs,
                    transpose_rhs=transpose_rhs,
                    preferred_element_type=out_dtype,
                    implementation="cuda",
                )
                oracle.check(out, op.exact(lhs, rhs, sizes, offset or 0))
                launches += 1
        lhs, rhs, _ = (random(rng, shape, jnp.float32) for shape in op.shapes(M, K, N, G))
        for precision, offset in zip(("default", "highest", "highest"), OFFSETS, strict=True):
            for sizes in np.array(SIZES, np.int32):
                out = op.call(
                    swap(lhs, transpose_lhs),
                    swap(rhs, transpose_rhs),
                    sizes,
                    offset,
                    transpose_lhs=transpose_lhs,
                    transpose_rhs=transpose_rhs,
                    precision=precision,
                    implementation="cuda",
                )
                exact = op.exact(lhs, rhs, sizes, offset or 0)
                oracle.check(out, exact, product_error=2.0**-10)
                launches += 1
    return launches


def products_added_in_place(rng) -> int:
    launches = 0
    for transpose_lhs, transpose_rhs in product((False, True), repeat=2):
        lhs, rhs, accumulator = (
            random(rng, shape, jnp.bfloat16) for shape in CONTRACTING.shapes(M, K, N, G)
        )
        accumulator = accumulator.astype(np.float32)
        for sizes, offset in zip(np.array(SIZES, np.int32), OFFSETS, strict=True):
            out = jgg.ragged_dot_accumulate(
                accumulator,
                swap(lhs, transpose_lhs),
                swap(rhs, transpose_rhs),
                sizes,
                group_offset=offset,
                transpose_lhs=transpose_lhs,
                transpose_rhs=transpose_rhs,
                implementation="cuda",
            )
            exact = CONTRACTING.exact(lhs, rhs, sizes, offset or 0)
            oracle.check(out, oracle.accumulated(accumulator, exact))
            launches += 1
    return launches


def expert_mlps(rng) -> int:
    launches = 0
    for weighted, activation in product((False, True), ("silu", "swiglu_oai")):
        for sizes, offset in zip(np.array(SIZES, np.int32), OFFSETS, strict=True):
            options = dict(m=M, embed=K, hidden=N, offset=offset or 0)
            operands, results = check_gated(
                rng, sizes, weighted=weighted, activation=activation, **options
            )
            check_gradient(rng, operands, results, sizes, offset or 0, activation)
            check_paired(rng, sizes, **options)
            launches += 4
    return launches


def products_with_a_cut_last_wave(rng) -> int:
    """Five units of work at most, each of them cut into four along K."""
    launches, k = 0, 1544
    lhs, rhs = (random(rng, shape, jnp.bfloat16) for shape in ((M, k), (G, k, N)))
    for sizes in np.array(SIZES, np.int32):
        for transpose_rhs, out_dtype in product((False, True), (jnp.bfloat16, jnp.float32)):
            out = ragged.ragged_noncontracting(
                lhs,
                swap(rhs, transpose_rhs),
                sizes,
                np.zeros(1, np.int32),
                transpose_lhs=False,
                transpose_rhs=transpose_rhs,
                preferred_element_type=np.dtype(out_dtype),
                precision=None,
                implementation="cuda",
                tile=STREAM_K_TILE,
            )
            oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes))
            launches += 1
    return launches


def long_tiles(rng) -> int:
    """Clusters that begin their tiles together: two turns and a part of one."""
    m, k, n, columns = 4500, 2568, 2056, slice(1000, 1016)
    lhs, rhs, _ = (random(rng, shape, jnp.bfloat16) for shape in NONCONTRACTING.shapes(m, k, n, 3))
    for sizes in np.array(((1300, 1921, 1279), (1, 4400, 0)), np.int32):
        out = noncontracting(lhs, rhs, sizes, implementation="cuda")
        oracle.check(out[:, columns], oracle.ragged_noncontracting(lhs, rhs[..., columns], sizes))
    return 2


def gradients_of_unequal_groups(rng) -> int:
    """Tiles cut along their rows, zeros of empty groups, and whole tiles by the same kernel."""
    launches, m = 0, 4400
    lhs, rhs = (random(rng, shape, jnp.bfloat16) for shape in ((m, K), (m, N)))
    for sizes in np.array([[0, 4200, 100, 0, 0], [0, 0, 0, 0, m], [900, 900, 900, 900, 800]]):
        for out_dtype in (jnp.bfloat16, jnp.float32):
            out = contracting(
                lhs,
                rhs,
                sizes.astype(np.int32),
                preferred_element_type=out_dtype,
                implementation="cuda",
            )
            oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes))
            launches += 1
    return launches


def symmetric_updates(rng) -> int:
    launches = 0
    for update, transpose, uplo in product((SYRK, SYR2K), (False, True), ("lower", "upper")):
        shape = (3, K, N) if transpose else (3, N, K)
        a, b = random(rng, shape, jnp.bfloat16), random(rng, shape, jnp.bfloat16)
        for dtype, symmetrize in product((jnp.bfloat16, jnp.float32), (False, True)):
            for c in (None, random(rng, (3, N, N), dtype)):
                options = dict(alpha=0.5, beta=-2.0, uplo=uplo, transpose=transpose)
                out = update(
                    a,
                    b,
                    c,
                    symmetrize_output=symmetrize,
                    preferred_element_type=dtype,
                    implementation="cuda",
                    **options,
                )
                check_real(update, out, a, b, c, symmetrize=symmetrize, **options)
                launches += 1
    return launches


def lists_of_products(rng) -> int:
    launches = 0
    shapes = [(M, K, N), (8, 8, 8), (3, 72, 200, 40), (64, 520, 264), (24, 0, 8), (37, 51, 29)]
    for transpose_lhs, transpose_rhs in product((False, True), (False, True)):
        for dtype, scheduler in product(
            (jnp.bfloat16, jnp.float32), ("device", "host_precomputed")
        ):
            for c_dtype in (None, dtype):
                problems = random_list(
                    rng,
                    shapes * (1 if c_dtype else 20),  # tiles of either size
                    jnp.bfloat16,
                    c_dtype=c_dtype,
                    transpose_lhs=transpose_lhs,
                    transpose_rhs=transpose_rhs,
                    alpha=0.5,
                    beta=-2.0,
                )
                options = dict(scheduler=scheduler, preferred_element_type=dtype)
                problems.check(problems(implementation="cuda", **options))
                launches += 1
    return launches


def float32_products_of_few_rows(rng) -> int:
    """Both precisions and majors of the weights, K and N off the tile."""
    launches = 0
    tile = FLOAT32_FEW_ROWS_TILE
    for transpose_rhs, precision in product((False, True), PRODUCT_ERROR):
        for sizes, offset in zip(SIZES, OFFSETS, strict=True):
            shapes = NONCONTRACTING.shapes(M, K + 4, N + 4, G)
            lhs, rhs, _ = (random(rng, shape, jnp.float32) for shape in shapes)
            sizes = np.array(sizes, np.int32)
            out = noncontracting(
                lhs,
                swap(rhs, transpose_rhs),
                sizes,
                offset,
                transpose_rhs=transpose_rhs,
                precision=precision,
                implementation="cuda",
                tile=tile,
            )
            exact = oracle.ragged_noncontracting(lhs, rhs, sizes, offset or 0)
            oracle.check(out, exact, product_error=PRODUCT_ERROR[precision])
            launches += 1
    return launches


def float32_updates(rng) -> int:
    """Both precisions, with rows that have to be padded and rows that need not."""
    launches = 0
    for update, transpose, precision in product((SYRK, SYR2K), (False, True), PRODUCT_ERROR):
        for (n, k), uplo in (((N, K), "lower"), ((197, 53), "upper")):
            shape = (3, k, n) if transpose else (3, n, k)
            a, b, c = (random(rng, s, jnp.float32) for s in (shape, shape, (3, n, n)))
            symmetrize = uplo == "upper"
            old = None if symmetrize else c
            options = dict(alpha=0.5, beta=-2.0, uplo=uplo, transpose=transpose)
            out = update(
                a,
                b,
                old,
                symmetrize_output=symmetrize,
                precision=precision,
                implementation="cuda",
                **options,
            )
            errors = dict(product_error=PRODUCT_ERROR[precision])
            check_real(update, out, a, b, old, symmetrize=symmetrize, **options, **errors)
            launches += 1
    return launches


def float32_lists_of_products(rng) -> int:
    """Both precisions and tiles of either size."""
    launches = 0
    shapes = [(M, K, N), (8, 8, 8), (3, 72, 200, 40), (64, 520, 264), (24, 0, 8), (37, 51, 29)]
    for transpose_lhs, transpose_rhs in product((False, True), (False, True)):
        for precision, c_dtype in zip(PRODUCT_ERROR, (None, jnp.float32), strict=True):
            problems = random_list(
                rng,
                shapes * (1 if c_dtype else 20),
                jnp.float32,
                c_dtype=c_dtype,
                transpose_lhs=transpose_lhs,
                transpose_rhs=transpose_rhs,
                alpha=0.5,
                beta=-2.0,
            )
            outs = problems(precision=precision, implementation="cuda")
            problems.check(outs, product_error=PRODUCT_ERROR[precision])
            launches += 1
    return launches


def fp64_updates(rng) -> int:
    """Odd sizes, so that no copy may be wider than an element."""
    launches = 0
    n, k = 197, 53
    for update, transpose, uplo in product(UPDATES, (False, True), ("lower", "upper")):
        shape = (2, k, n) if transpose else (2, n, k)
        for dtype, symmetrize in product((np.float64, np.complex64, np.complex128), (False, True)):
            a, b, c = (rng.standard_normal(s).astype(dtype) for s in (shape, shape, (2, n, n)))
            if np.iscomplexobj(a):
                a, b = a * (0.6 + 0.8j), b * (0.8 - 0.6j)
            options = dict(alpha=0.5, beta=-2.0, uplo=uplo, transpose=transpose)
            for old in (None, c):
                out = update(
                    a, b, old, symmetrize_output=symmetrize, implementation="cuda", **options
                )
                check_double(update, out, a, b, old, symmetrize=symmetrize, **options)
                launches += 1
    return launches


def fp64_lists_of_products(rng) -> int:
    """Odd sizes, which are copied element by element, even ones, and more than a launch takes."""
    launches = 0
    odd = [(197, 53, 131), (1, 1, 1), (3, 65, 17, 7), (24, 0, 8), (130, 2, 1, 3)]
    even = [(198, 52, 130), (2, 64, 136, 66)]
    for transpose_lhs, transpose_rhs in product((False, True), (False, True)):
        for dtype, shapes in product((np.float64, np.complex64, np.complex128), (odd, even)):
            for c_dtype in (None, dtype):
                problems = random_list(
                    rng,
                    shapes if c_dtype else [*shapes, (1500, 20, 1700)],  # tiles of either size
                    dtype,
                    c_dtype=c_dtype,
                    transpose_lhs=transpose_lhs,
                    transpose_rhs=transpose_rhs,
                    alpha=0.5,
                    beta=-2.0,
                )
                problems.check_double(problems(implementation="cuda"))
                launches += 1
    return launches


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
    # More than two tiles of 256 x 256 for each processor, which take a kernel of their own.
    many = random(rng, (34, 512, 1024), jnp.bfloat16)
    values, scales = fp8_oracle.quantize(many[-1], (128, 128), jnp.float8_e4m3fn)
    for got, want in zip(
        jgg.quantize_weights(many, **on_gpu), (values, scales, values.T, scales.T), strict=True
    ):
        np.testing.assert_array_equal(np.float32(got[-1]), np.float32(want))
    return 7


def fp8_configurations(rng: np.random.Generator, sizes: np.ndarray) -> int:
    """Every compiled configuration of the FP8 products; returns the number of launches."""
    offset = np.zeros(1, np.int32)
    options = dict(preferred_element_type=np.dtype(jnp.bfloat16), implementation="cuda")
    forward = dict(transpose_rhs=True, lhs_scaling="1x128", rhs_scaling="128x128")
    launches = 0
    for k in (K, 496):  # whose scales are read one at a time, and four
        lhs, rhs = (random(rng, shape, jnp.bfloat16) for shape in ((M, k), (G, k, N)))
        rows, weights = jgg.quantize_ragged(lhs, sizes), jgg.quantize_weights(rhs)
        exact = fp8_oracle.noncontracting(*rows[:2], *weights[:2], sizes)
        operands = *rows[:2], *weights[2:], sizes, offset
        for tile in (choice.tile for choice in plan_fp8.NONCONTRACTING[1:]):
            out = fp8_primitive.scaled_ragged_noncontracting(
                *operands, **forward, **options, tile=tile
            )
            fp8_oracle.check(out, exact)
            launches += 1
    columns = [np.asarray(x) for x in 2 * rows[2:]]
    exact = fp8_oracle.contracting(*columns, sizes, M)
    for tile in (choice.tile for choice in plan_fp8.CONTRACTING[1:]):
        out = fp8_primitive.scaled_ragged_contracting(
            *columns, sizes, offset, num_rows=M, num_groups=G, **options, tile=tile
        )
        fp8_oracle.check(out, exact)
        launches += 1
    return launches


def fp8(rng: np.random.Generator) -> int:
    return sum(
        fp8_products(rng, sizes) + fp8_configurations(rng, sizes)
        for sizes in np.array(SIZES, np.int32)
    )


def fp64(rng: np.random.Generator) -> int:
    with jax.enable_x64(True):
        return fp64_updates(rng) + fp64_lists_of_products(rng)


def rows(rng: np.random.Generator) -> int:
    """Sorts in one launch and in two, and every move, in vectors and element by element."""
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


PARTS = {
    "ragged": ragged_products,
    "accumulate": products_added_in_place,
    "mlp": expert_mlps,
    "stream_k": products_with_a_cut_last_wave,
    "long_tiles": long_tiles,
    "skew": gradients_of_unequal_groups,
    "updates": symmetric_updates,
    "lists": lists_of_products,
    "float32_few_rows": float32_products_of_few_rows,
    "float32_updates": float32_updates,
    "float32_lists": float32_lists_of_products,
    "fp64": fp64,
    "fp8": fp8,
    "rows": rows,
}


def main(names: list[str]) -> None:
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        launches = PARTS[name](np.random.default_rng(0))
        print(f"{name}: {launches} launches, all results right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
