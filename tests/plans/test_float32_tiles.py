"""The choice between splitting float32 operands in the kernel and in passes before it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged import split_in_kernel
from jax_grouped_gemm._src.ragged.tiles import SWAPPED_FLOAT32_TILE

# Groups, rows of a group, K and N, and the time of the kernel that splits operands itself, divided
# by the time of the kernel after passes, measured on an H200 at the default precision.
MEASURED = [
    ((128, 256, 2240, 128), 0.31),
    ((128, 256, 104, 152), 0.35),
    ((64, 1024, 448, 88), 0.36),
    ((4, 512, 96, 384), 0.39),
    ((8, 128, 72, 6208), 0.42),
    ((32, 128, 448, 4728), 0.52),
    ((16, 1024, 136, 512), 0.68),
    ((4, 128, 1616, 5504), 0.70),
    ((4, 256, 192, 6720), 0.74),
    ((8, 256, 4992, 88), 0.87),
    ((4, 128, 4864, 2560), 0.87),
    ((32, 1024, 1136, 384), 1.06),
    ((8, 256, 4864, 576), 1.12),
    ((32, 256, 896, 1728), 1.15),
    ((16, 512, 352, 4672), 1.29),
    ((4, 512, 4752, 448), 1.48),
    ((4, 1024, 240, 3456), 1.49),
    ((2, 1024, 576, 5632), 1.96),
]
# The cases of h200_float32_default.json in which both precisions have passes.
LARGE = [(8, 4096, 7168, 4096), (8, 1024, 14336, 4096), (128, 512, 2048, 1536)]


def plan(sizes, precision=None, multiprocessors=132, **options):
    g, r, k, n = sizes
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((g * r, k), (g, k, n)))
    groups = jax.ShapeDtypeStruct((g,), jnp.int32)

    def product(x, w, groups):
        return jgg.ragged_dot(x, w, groups, precision, **options)

    (found,) = jgg.explain(product, x, w, groups, multiprocessors=multiprocessors).plans
    return found


@pytest.mark.parametrize("sizes, ratio", MEASURED)
def test_what_was_measured_to_be_faster(sizes, ratio):
    wanted = SWAPPED_FLOAT32_TILE if ratio < 1 else DEFAULT_TILE
    assert plan(sizes, implementation="cuda").tile == wanted


def test_predicted_times_are_near_the_measured_ones():
    target = Target(132)
    predicted = []
    for sizes, _ in MEASURED:
        problem = plan(sizes, implementation="cuda").kernel_problem
        passes = split_in_kernel.seconds_with_passes(problem, target)
        predicted.append(split_in_kernel.seconds(problem, target) / passes)
    logarithms = np.log([predicted, [ratio for _, ratio in MEASURED]])
    assert np.abs(np.subtract(*logarithms)).mean() < 0.2
    assert np.corrcoef(logarithms)[0, 1] > 0.9


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("sizes", LARGE)
def test_large_products_have_passes(sizes, precision):
    assert plan(sizes, precision).tile == DEFAULT_TILE


def test_the_exact_product_takes_twice_the_steps():
    """Six products of parts, instead of three, take nearly twice as long."""
    assert plan((8, 256, 4992, 88), "default", implementation="cuda").tile != DEFAULT_TILE
    problem = plan((2, 512, 4992, 88), implementation="cuda").kernel_problem
    problems = (dataclasses.replace(problem, terms=terms) for terms in (1, 3))
    three, six = (split_in_kernel.seconds(problem, Target(132)) for problem in problems)
    assert 1.7 < six / three < 2


def test_a_symbolic_number_of_rows_has_passes():
    (m,) = jax.export.symbolic_shape("m")
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, 128), (2, 128, 128)))
    (found,) = jgg.explain(jgg.ragged_dot, x, w, jax.ShapeDtypeStruct((2,), jnp.int32)).plans
    assert found.tile == DEFAULT_TILE
    assert plan((2, 128, 128, 128), implementation="cuda").tile == SWAPPED_FLOAT32_TILE


def test_on_fewer_multiprocessors_waves_are_more():
    sizes = (8, 512, 1024, 512)
    problem = plan(sizes, implementation="cuda").kernel_problem
    times = [split_in_kernel.seconds(problem, Target(count)) for count in (132, 66)]
    assert times[1] > 1.5 * times[0]
