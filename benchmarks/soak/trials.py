"""Random products of all operations: compiled once, run with many group sizes, judged in float64.

A trial is one program. Its operands stay the same, what it is given besides (group sizes, offsets,
scales, experts) is drawn anew for each run, so that few programs make many products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import fp8_oracle, mlp, oracle
from tests.support import group_sizes as sizes_of
from tests.support import rows as rows_oracle
from tests.support.dtypes import BF16, C64, E4M3, E5M2, F16, F32
from tests.support.families import FAMILIES, SIXTEEN_BITS, Family
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.fp8_products import fp8, scales
from tests.support.ops import CONTRACTING, OPS, random, swap
from tests.support.products import draw as draw_matrix
from tests.support.products import random_list
from tests.support.updates import UPDATES, triangle

Rng = np.random.Generator
# Operands of ragged products, and the precision of those of float32.
RAGGED_DTYPES = ((BF16, None), (F16, None), (F32, "default"), (F32, "highest"))
# What FP8 operands of three bits cost, in products of normal values.
FP8_ERROR = 0.06


@dataclass(frozen=True)
class Trial:
    """One program and how its results are judged.

    Attributes:
      name: what it computes, for the record of a failure.
      function: of the operands and of what is drawn for a run.
      operands: the same in every run.
      draw: of a generator, gives the other arguments.
      judge: of (drawn, results), raises AssertionError unless the results are right.
      x64: whether it computes in 64 bits.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple
    draw: Callable[[Rng], tuple]
    judge: Callable[[tuple, Any], None]
    x64: bool = False


def side(rng: Rng, most: int, multiple: int = 1) -> int:
    """A size up to `most`: tiny, anything, or at or next to a tile's edge."""
    kind = rng.integers(4)
    if kind == 0:
        size = int(rng.integers(1, 18))
    elif kind == 1:
        size = int(rng.choice([64, 128, 256, 512])) + int(rng.integers(-1, 2))
    else:
        size = int(rng.integers(1, most + 1))
    return max(1, min(size, most) // multiple) * multiple


def pick(rng: Rng, choices):
    """One of them."""
    return choices[rng.integers(len(choices))]


def flip(rng: Rng) -> bool:
    """A coin's."""
    return bool(rng.integers(2))


def pick_family(rng: Rng, implementation: str) -> Family:
    """One of lists and updates; the reference does not add up complex64 in float64."""
    families = FAMILIES + SIXTEEN_BITS
    if implementation == "reference":
        families = tuple(family for family in families if family.dtype != C64)
    return pick(rng, families)


def sizes_and_offset(rng: Rng, m: int, g: int, shifted: bool) -> tuple:
    """Group sizes of any kind, and an offset, mostly one within range."""
    offset = rng.choice([-1, 0, 1, g // 2, g]) if shifted else 0
    return sizes_of.any_kind(rng, m, g), np.array(offset, np.int32)


def shape_of_product(rng: Rng, most: int) -> tuple[int, int, int, int]:
    """m, k, n and the number of groups; rows of half of them fit TMA as they are."""
    multiple = pick(rng, (1, 8))
    m, k, n = side(rng, 2 * most), side(rng, most, multiple), side(rng, most, multiple)
    return m, k, n, int(rng.integers(1, 13))


def ragged(rng: Rng, implementation: str, most: int) -> Trial:
    """Either ragged product, in any layout."""
    op, (dtype, precision) = pick(rng, OPS), pick(rng, RAGGED_DTYPES)
    m, k, n, g = shape_of_product(rng, most)
    lhs, rhs, _ = (random(rng, shape, dtype) for shape in op.shapes(m, k, n, g))
    transposes = dict(transpose_lhs=flip(rng), transpose_rhs=flip(rng))
    shifted, out = flip(rng), pick(rng, (None, F32))

    def function(lhs, rhs, sizes, offset):
        return op.call(
            lhs,
            rhs,
            sizes,
            offset,
            preferred_element_type=out,
            precision=precision,
            implementation=implementation,
            **transposes,
        )

    def judge(drawn, result):
        oracle.check(
            result, op.exact(lhs, rhs, *drawn), product_error=PRODUCT_ERROR.get(precision, 0.0)
        )

    return Trial(
        f"{op} {np.dtype(dtype)} {precision} {(m, k, n, g)} {transposes} {out}",
        function,
        (swap(lhs, transposes["transpose_lhs"]), swap(rhs, transposes["transpose_rhs"])),
        lambda rng: sizes_and_offset(rng, m, g, shifted),
        judge,
    )


def gradient(rng: Rng, implementation: str, most: int) -> Trial:
    """Both cotangents of a ragged product of 16-bit operands."""
    op, dtype = pick(rng, OPS), pick(rng, (BF16, F16))
    m, k, n, g = shape_of_product(rng, most)
    lhs, rhs, cotangent = (random(rng, shape, dtype) for shape in op.shapes(m, k, n, g))

    def function(lhs, rhs, cotangent, sizes, offset):
        return op.cotangents(lhs, rhs, sizes, cotangent, offset, implementation=implementation)

    def judge(drawn, results):
        sizes, offset = drawn
        oracle.check_all(results, op.exact_cotangents(lhs, rhs, sizes, cotangent, offset))

    return Trial(
        f"gradient of {op} {np.dtype(dtype)} {(m, k, n, g)}",
        function,
        (lhs, rhs, cotangent),
        lambda rng: sizes_and_offset(rng, m, g, False),
        judge,
    )


def accumulate(rng: Rng, implementation: str, most: int) -> Trial:
    """A weight gradient added to another."""
    dtype = pick(rng, (BF16, F16))
    m, k, n, g = shape_of_product(rng, most)
    lhs, rhs, total = (random(rng, shape, dtype) for shape in CONTRACTING.shapes(m, k, n, g))
    total = total.astype(np.float32)

    def function(total, lhs, rhs, sizes, offset):
        return jgg.ragged_dot_accumulate(
            total, lhs, rhs, sizes, group_offset=offset, implementation=implementation
        )

    def judge(drawn, result):
        oracle.check(result, oracle.accumulated(total, CONTRACTING.exact(lhs, rhs, *drawn)))

    return Trial(
        f"accumulate {np.dtype(dtype)} {(m, k, n, g)}",
        function,
        (total, lhs, rhs),
        lambda rng: sizes_and_offset(rng, m, g, True),
        judge,
    )


def expert_mlp(rng: Rng, implementation: str, most: int) -> Trial:
    """An MLP of experts, with rows and weights or without."""
    dtype = pick(rng, (BF16, F16))
    activation = pick(rng, mlp.ACTIVATIONS)
    experts, tokens = int(rng.integers(1, 9)), side(rng, min(most // 2, 150))
    case = mlp.case(
        rng,
        tokens=tokens,
        embed=side(rng, most, 8),
        hidden=side(rng, most, 8),
        experts=experts,
        dtype=dtype,
        with_rows=flip(rng),
        with_weights=flip(rng),
    )
    m = len(case.on_rows)

    def function(*operands):
        *factors, sizes = operands
        options = dict(rows=case.rows, activation=activation, implementation=implementation)
        weights = dict(weights=factors[4]) if case.weights is not None else {}
        return jgg.ragged_mlp(*factors[:4], sizes, **options, **weights)

    def judge(drawn, result):
        exact = dataclasses.replace(case, sizes=drawn[0]).exact(activation)
        result = np.asarray(result).astype(np.float64)
        assert not result[~exact.any(axis=1)].any()
        error = np.linalg.norm(result - exact)
        assert error <= 8 * float(jnp.finfo(dtype).eps) * np.linalg.norm(exact), error

    return Trial(
        f"mlp {activation} {np.dtype(dtype)} {m} rows, {case.wi_0.shape}",
        function,
        tuple(case.factors),
        lambda rng: (sizes_of.any_kind(rng, m, experts),),
        judge,
    )


def list_of_products(rng: Rng, implementation: str, most: int) -> Trial:
    """A list of unequal products of any family, alpha and beta drawn for each run."""
    family = pick_family(rng, implementation)
    shapes = [tuple(side(rng, most // 2) for _ in "mkn") for _ in range(int(rng.integers(1, 7)))]
    if flip(rng):
        shapes += [(3, *shapes[0]), (shapes[0][0], 0, shapes[0][2])]
    count = len(shapes)
    with jax.enable_x64(family.is_double):
        problems = random_list(
            rng,
            shapes,
            family.dtype,
            c_dtype=family.dtype if flip(rng) else None,
            transpose_lhs=rng.integers(0, 2, count).astype(bool).tolist(),
            transpose_rhs=rng.integers(0, 2, count).astype(bool).tolist(),
        )
    options = family.options | dict(
        implementation=implementation, scheduler=pick(rng, family.schedulers)
    )

    def function(lhs, rhs, c, alpha, beta):
        scale = dict(alpha=alpha) | ({} if c is None else dict(beta=beta))
        return jgg.grouped_gemm(lhs, rhs, c, **scale, **problems.transposes, **options)

    def judge(drawn, results):
        alpha, beta = drawn
        family.check_list(dataclasses.replace(problems, alpha=alpha, beta=beta), results)

    return Trial(
        f"list of {family} {shapes}",
        function,
        (problems.lhs, problems.rhs, problems.c),
        lambda rng: (family.scales(rng), family.scales(rng)),
        judge,
        x64=family.is_double,
    )


def symmetric_update(rng: Rng, implementation: str, most: int) -> Trial:
    """One of the four updates of a stack of any family."""
    family, update = pick_family(rng, implementation), pick(rng, UPDATES)
    g, n, k = int(rng.integers(1, 5)), side(rng, most), side(rng, most // 2)
    uplo, transpose, symmetrize = pick(rng, ("lower", "upper")), flip(rng), flip(rng)
    shape = (g, k, n) if transpose else (g, n, k)
    a, b = (family.draw(rng, shape) for _ in "ab")
    c = draw_matrix(rng, (g, n, n), family.dtype) if flip(rng) else None
    if c is not None and symmetrize:
        c[:, ~triangle(n, uplo)] = np.nan
    form = dict(uplo=uplo, transpose=transpose)
    options = family.options | dict(implementation=implementation)

    def function(a, b, c, alpha, beta):
        return update(
            a, b, c, alpha=alpha, beta=beta, symmetrize_output=symmetrize, **form, **options
        )

    def draw(rng):
        alpha, beta = family.scales(rng, g), family.scales(rng, g)
        if not update.hermitian:
            return alpha, beta
        return alpha if update.two_operands else alpha.real, beta.real

    def judge(drawn, result):
        alpha, beta = drawn
        family.check_update(
            update, result, a, b, c, alpha=alpha, beta=beta, symmetrize=symmetrize, **form
        )

    return Trial(
        f"{update} of {family} {(g, n, k)} {form} c={c is not None} mirror={symmetrize}",
        function,
        (a, b, c),
        draw,
        judge,
        x64=family.is_double,
    )


def scaled(rng: Rng, implementation: str, most: int) -> Trial:
    """A product of FP8 operands with random scales."""
    m, k, n, g = shape_of_product(rng, most)
    lhs_dtype, rhs_dtype = pick(rng, (E4M3, E5M2)), pick(rng, (E4M3, E5M2))
    out = pick(rng, (BF16, F16, F32))
    lhs, rhs = fp8(rng, (m, k), lhs_dtype), fp8(rng, (g, n, k), rhs_dtype)
    rowwise = flip(rng)
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    # Float16 results stay in range.
    lhs_scale = scales(rng, (m, 1 if rowwise else k_blocks)) / 8
    rhs_scale = scales(rng, (g, n) if rowwise else (g, n_blocks, k_blocks)) / 8

    def function(*operands):
        *operands, sizes, offset = operands
        return jgg.scaled_ragged_dot(
            *operands,
            sizes,
            lhs_scaling="1xk" if rowwise else "1x128",
            transpose_rhs=True,
            preferred_element_type=out,
            group_offset=offset,
            implementation=implementation,
        )

    def judge(drawn, result):
        by_column = rhs_scale[:, :, None] if rowwise else rhs_scale
        swapped = rhs.swapaxes(1, 2), by_column.swapaxes(1, 2)
        fp8_oracle.check(result, fp8_oracle.noncontracting(lhs, lhs_scale, *swapped, *drawn))

    return Trial(
        f"scaled {np.dtype(lhs_dtype)} {np.dtype(rhs_dtype)} {(m, k, n, g)} rowwise={rowwise}",
        function,
        (lhs, lhs_scale, rhs, rhs_scale),
        lambda rng: sizes_and_offset(rng, m, g, True),
        judge,
    )


def scaled_gradient(rng: Rng, implementation: str, most: int) -> Trial:
    """Rows quantised and transposed, then contracted, both by the kernels."""
    m, k, n, g = shape_of_product(rng, most)
    x, dy = (random(rng, shape, BF16) for shape in ((m, k), (m, n)))

    def function(x, dy, sizes):
        options = dict(implementation=implementation)
        rows, cotangents = (jgg.quantize_ragged(y, sizes, **options) for y in (x, dy))
        product = jgg.scaled_ragged_dot_contracting(
            *rows[2:], *cotangents[2:], sizes, num_rows=m, **options
        )
        return rows, cotangents, product

    def judge(drawn, results):
        (sizes,), (rows, cotangents, product) = drawn, results
        for source, quantized in ((x, rows), (dy, cotangents)):
            want = fp8_oracle.quantize(source, (1, 128), E4M3)
            want += fp8_oracle.quantize_groups(source, sizes, E4M3)
            for got, exact in zip(quantized, want, strict=True):
                np.testing.assert_array_equal(np.float32(got), np.float32(exact))
        columns = [np.asarray(y) for y in (*rows[2:], *cotangents[2:])]
        fp8_oracle.check(product, fp8_oracle.contracting(*columns, sizes, m))

    return Trial(
        f"scaled gradient {(m, k, n, g)}",
        function,
        (x, dy),
        lambda rng: (sizes_of.any_kind(rng, m, g),),
        judge,
    )


def fp8_training(rng: Rng, implementation: str, most: int) -> Trial:
    """`fp8_ragged_dot` and both cotangents, to FP8's accuracy."""
    m, k, n, g = shape_of_product(rng, most)
    op = OPS[0]
    lhs, rhs, cotangent = (random(rng, shape, BF16) for shape in op.shapes(m, k, n, g))

    def function(lhs, rhs, cotangent, sizes):
        out, vjp = jax.vjp(
            lambda lhs, rhs: jgg.fp8_ragged_dot(lhs, rhs, sizes, implementation=implementation),
            lhs,
            rhs,
        )
        return out, *vjp(cotangent)

    def judge(drawn, results):
        exact = op.exact(lhs, rhs, *drawn), *op.exact_cotangents(lhs, rhs, *drawn, cotangent)
        for result, want in zip(results, exact, strict=True):
            result = np.asarray(result).astype(np.float64)
            assert not result[want.magnitude == 0].any()
            # Few products do not average out.
            error = np.linalg.norm(result - want.value)
            assert error <= FP8_ERROR * np.linalg.norm(want.magnitude), error

    return Trial(
        f"fp8_ragged_dot {(m, k, n, g)}",
        function,
        (lhs, rhs, cotangent),
        lambda rng: (sizes_of.any_kind(rng, m, g),),
        judge,
    )


def moved_rows(rng: Rng, implementation: str, most: int) -> Trial:
    """A sort by expert, a gather and a weighted sum of rows."""
    tokens, choices = side(rng, most // 2), int(rng.integers(1, 9))
    experts, width = int(rng.integers(1, 65)), side(rng, most)
    dtype = pick(rng, (BF16, F16, F32))
    pairs = rows_oracle.Pairs.random(rng, tokens, choices, tokens * choices)
    x, y = (random(rng, (size, width), dtype) for size in (tokens, tokens * choices))

    def function(x, y, weights, experts_of_pairs):
        options = dict(implementation=implementation)
        rows = moe.gather_rows(x, pairs.token_of_row(), inverse=pairs.row_of_pair, **options)
        total = moe.combine(
            y, pairs.row_of_pair, weights=weights, order=pairs.pair_of_row, **options
        )
        return moe.sort_by_expert(experts_of_pairs, experts, **options), rows, total

    def judge(drawn, results):
        order, rows, total = results
        rows_oracle.check_sorted(order, *drawn, experts)
        want = rows_oracle.gather(x, pairs.token_of_row(), len(pairs.pair_of_row))
        np.testing.assert_array_equal(np.float32(rows), np.float32(want))
        exact = rows_oracle.combine(y, pairs, pairs.weights)
        magnitude = rows_oracle.combine_magnitude(y, pairs, pairs.weights)
        limits = jnp.finfo(dtype)
        allowed = float(limits.eps) * np.abs(exact) + 1e-6 * choices * magnitude
        allowed += float(limits.smallest_subnormal)
        assert (np.abs(np.asarray(total, np.float64) - exact) <= allowed).all()

    return Trial(
        f"rows {np.dtype(dtype)} {(tokens, choices, experts, width)}",
        function,
        (x, y, pairs.weights),
        lambda rng: (rng.integers(-2, experts + 2, tokens * choices).astype(np.int32),),
        judge,
    )


# How many of each come in a row of trials.
FAMILIES_OF_TRIALS = (
    (ragged, 5),
    (gradient, 2),
    (accumulate, 1),
    (expert_mlp, 2),
    (list_of_products, 3),
    (symmetric_update, 3),
    (scaled, 2),
    (scaled_gradient, 1),
    (fp8_training, 1),
    (moved_rows, 1),
)
IN_TURN = [family for family, count in FAMILIES_OF_TRIALS for _ in range(count)]


def trial(seed: int, number: int, implementation: str, most: int) -> tuple[str, Trial]:
    """Trial `number` of a seed and its family's name; sizes are at most `most`, rows twice that."""
    family = IN_TURN[number % len(IN_TURN)]
    return family.__name__, family(np.random.default_rng([seed, number]), implementation, most)
