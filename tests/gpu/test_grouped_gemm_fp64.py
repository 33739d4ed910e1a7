"""Lists of products on the FP64 tensor cores: every size, and scales of every kind."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import C128, F64
from tests.support.families import DOUBLE, check_list, each, each_kernel
from tests.support.products import FORMS, random_list

# Sizes around the edges of both tiles, even and odd.
SIDES = (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 191, 256, 258, 389)
# Less than a step, fewer steps than stages, and many steps, odd and even.
DEPTHS = (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 48, 64, 100, 511, 1024)


@each_kernel(*DOUBLE)
@FORMS
class TestEveryKernel:
    @pytest.mark.parametrize("with_c", [False, True])
    def test_odd_and_even_sizes(self, family, transpose_lhs, transpose_rhs, with_c, rng):
        shapes = [
            *zip(rng.choice(SIDES, 40), rng.choice(DEPTHS, 40), rng.choice(SIDES, 40), strict=True),
            (3, 65, 17, 131),
        ]
        problems = random_list(
            rng,
            [tuple(int(x) for x in shape) for shape in shapes],
            family.dtype,
            c_dtype=family.dtype if with_c else None,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            alpha=family.number(rng),
            beta=family.number(rng),
        )
        check_list(family, problems)

    def test_multiples_of_16_bytes(self, family, transpose_lhs, transpose_rhs, rng):
        """All rows are multiples of 16 bytes, so the kernel copies 16 bytes at a time."""
        shapes = [tuple(int(2 * x) for x in rng.integers(1, 150, 3)) for _ in range(40)]
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        check_list(family, random_list(rng, shapes, family.dtype, **options))

    def test_many_tiles_for_each_block(self, family, transpose_lhs, transpose_rhs, rng):
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        shapes = [(2600, 40, 2300), (3, 1031, 137, 900)]
        options |= dict(c_dtype=family.dtype, beta=0.5)
        check_list(family, random_list(rng, shapes, family.dtype, **options))


@each(*DOUBLE)
def test_more_matrices_than_a_launch_takes(family, rng):
    """Some launches begin inside of a stack, and each matrix has scales of its own."""
    shapes = [(300, 5, 7, 9), (100, 33, 3, 20), (2, 66, 70, 65)]
    problems = random_list(
        rng,
        shapes,
        family.dtype,
        c_dtype=family.dtype,
        alpha=[family.scales(rng, g) for g, *_ in shapes],
        beta=[family.scales(rng, g) for g, *_ in shapes],
    )
    check_list(family, problems)


@each(DOUBLE[-1])
def test_c_without_a_product(family, rng):
    """If k is zero, the result is exactly beta C, next to a problem with a product."""
    problems = random_list(rng, [(30, 0, 7), (30, 5, 7)], C128, c_dtype=C128, beta=2.0j)
    outs = check_list(family, problems)
    np.testing.assert_array_equal(outs[0], 2.0j * problems.c[0])


@each(*DOUBLE[1:])
@pytest.mark.parametrize("alpha", [0, 1, -1, 1j, 0.6 - 0.8j, 1e-30 + 1e-25j])
def test_complex_alpha(family, alpha, rng):
    problems = random_list(rng, [(130, 40, 65)], family.dtype, alpha=family.dtype(alpha))
    check_list(family, problems)


@each(DOUBLE[0])
def test_a_number_and_an_array_give_the_same_bits(family, rng):
    problems = random_list(rng, [(137, 71, 200), (2, 24, 8, 15)], F64, c_dtype=F64)
    operands = problems.lhs, problems.rhs, problems.c
    call = jax.jit(partial(jgg.grouped_gemm, **family.options))
    for out, other in zip(
        jax.jit(partial(jgg.grouped_gemm, alpha=0.3, beta=-1.7, **family.options))(*operands),
        call(*operands, alpha=jnp.asarray(0.3), beta=jnp.asarray(-1.7)),
        strict=True,
    ):
        np.testing.assert_array_equal(out, other)
