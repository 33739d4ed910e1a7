"""Symmetric updates and lists of products."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from tests.gpu.sanitizer import K, M, N
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.ops import (
    random,
)
from tests.support.products import random_list
from tests.support.updates import SYMM, SYR2K, SYRK, UPDATES, check_double, check_real


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
    return launches + short_updates(rng)


def short_updates(rng) -> int:
    """Runs updates with fewer steps than the kernel has stages, with as many, and with more.

    A thread block may end before the other one of its cluster, which must then neither copy to it
    nor arrive at its barriers (`csrc/sm90/mainloop/fine.h`).
    """
    most = 9
    for update, steps in product((SYRK, SYR2K), range(1, most + 1)):
        a, b = (random(rng, (1, 264, 64 * steps), jnp.bfloat16) for _ in range(2))
        out = update(a, b, None, symmetrize_output=True, implementation="cuda")
        check_real(update, out, a, b, None, symmetrize=True)
    return 2 * most


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


def symmetric_products(rng) -> int:
    """Computes one triangle of each product, and adds a diagonal and C or the first factor."""
    forms = list(product((SYRK, SYR2K, SYMM), (False, True), ("lower", "upper"), (False, True)))
    for update, transpose, uplo, own in forms:
        symmetric_product(rng, update, (3, N, N), jnp.bfloat16, transpose, uplo, own)
    return len(forms)


def float32_symmetric_products(rng) -> int:
    """Computes only short sums, because racecheck needs minutes for six products a step."""
    forms = list(product((SYRK, SYR2K, SYMM), (False, True)))
    for update, transpose in forms:
        symmetric_product(rng, update, (1, N, 72), jnp.float32, transpose, "lower", False)
        symmetric_product(rng, update, (1, 136, 136), jnp.float32, transpose, "upper", True)
    return 2 * len(forms)


def symmetric_product(rng, update, shape, dtype, transpose, uplo, own) -> None:
    """Checks one product. With `own`, the shape is square, and C is the first factor."""
    g, n, k = shape
    a, b = (random(rng, (g, k, n) if transpose else shape, dtype) for _ in range(2))
    c = a if own else random(rng, (g, n, n), dtype)
    options = dict(alpha=0.5, beta=-2.0, diagonal=3.0, uplo=uplo, transpose=transpose)
    out = update(
        *(a, b, c),
        symmetrize_output=True,
        precision="highest",
        implementation="cuda",
        **options,
    )
    if dtype == jnp.float32:
        options |= dict(product_error=PRODUCT_ERROR["highest"])
    check_real(update, out, a, b, c, symmetrize=True, **options)


def float32_updates(rng) -> int:
    """Runs both precisions, with rows that need padding and rows that do not."""
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
    """Multiplies lists in both precisions, with tiles of either size."""
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
    """Runs updates of odd sizes, so that no copy may be wider than an element."""
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
    """Multiplies lists of odd sizes, which are copied element by element, and of even sizes."""
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


def fp64(rng: np.random.Generator) -> int:
    with jax.enable_x64(True):
        return fp64_updates(rng) + fp64_lists_of_products(rng)
