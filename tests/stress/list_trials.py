"""Trials of lists of products, and of symmetric updates."""

import dataclasses

import jax
import numpy as np

import jax_grouped_gemm as jgg
from tests.stress.drawing import (
    Rng,
    Trial,
    flip,
    pick,
    pick_family,
    side,
)
from tests.support.products import draw as draw_matrix
from tests.support.products import random_list
from tests.support.updates import UPDATES, triangle


def list_of_products(rng: Rng, implementation: str, most: int) -> Trial:
    """A list of unequal products of any family, with alpha and beta drawn for each run."""
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
    """One of the four symmetric updates, of stacks of any family."""
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
