"""Lists of products on the FP64 tensor cores against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.lists import fp64 as fp64_kernels
from jax_grouped_gemm._src.lists.grouped_gemm import plan_fp64 as grouped_gemm_plan_fp64
from tests.support.products import List, cutlass_like, draw, random_list
from tests.support.products_on_gpu import (
    FORMS,
    any_list,
    check_in_a_scan,
    check_repeats,
    check_transposed,
    map_over_stacks,
    on_gpu,
    poison_memory,
    update_in_place,
)

F64, C64, C128 = np.float64, np.complex64, np.complex128

DTYPES = pytest.mark.parametrize("dtype", [F64, C64, C128], ids=lambda dtype: dtype.__name__)
KERNELS = pytest.mark.parametrize(
    "dtype, kernel",
    [(dtype, kernel) for dtype, kernels in fp64_kernels.KERNELS.items() for kernel in kernels],
    ids=lambda x: str(getattr(x, "tile", x)),
)
# Around the edges of both tiles, even and odd.
SIDES = (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 191, 256, 258, 389)
# Less than a step, fewer steps than stages, and many, odd and even.
DEPTHS = (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 48, 64, 100, 511, 1024)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def only(monkeypatch):
    """Leaves the plan no other tile than one."""

    def choose(dtype, kernel):
        monkeypatch.setitem(fp64_kernels.KERNELS, np.dtype(dtype), (kernel,))
        grouped_gemm_plan_fp64.simulated.cache_clear()

    yield choose
    grouped_gemm_plan_fp64.simulated.cache_clear()


def check(problems: List, dtype, **options) -> None:
    poison_memory(problems, itemsize=16)
    outs = problems(**options, **on_gpu)
    assert all(out.dtype == dtype for out in outs)
    problems.check_double(outs)


def number(rng, dtype):
    """A Python number, complex where it may be, that the kernel takes as it is."""
    return draw(rng, (), dtype).astype(dtype).item()


@KERNELS
@FORMS
class TestEveryKernel:
    @pytest.mark.parametrize("with_c", [False, True])
    def test_odd_and_even_sizes(
        self, dtype, kernel, transpose_lhs, transpose_rhs, with_c, only, rng
    ):
        only(dtype, kernel)
        shapes = [
            *zip(rng.choice(SIDES, 40), rng.choice(DEPTHS, 40), rng.choice(SIDES, 40), strict=True),
            (3, 65, 17, 131),
        ]
        problems = random_list(
            rng,
            [tuple(int(x) for x in shape) for shape in shapes],
            dtype,
            c_dtype=dtype if with_c else None,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            alpha=number(rng, dtype),
            beta=number(rng, dtype),
        )
        check(problems, dtype)

    def test_multiples_of_16_bytes(self, dtype, kernel, transpose_lhs, transpose_rhs, only, rng):
        """Which are copied so: in the test above some operand never is one."""
        only(dtype, kernel)
        shapes = [tuple(int(2 * x) for x in rng.integers(1, 150, 3)) for _ in range(40)]
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        check(random_list(rng, shapes, dtype, **options), dtype)

    def test_many_tiles_for_each_block(
        self, dtype, kernel, transpose_lhs, transpose_rhs, only, rng
    ):
        only(dtype, kernel)
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        shapes = [(2600, 40, 2300), (3, 1031, 137, 900)]
        check(random_list(rng, shapes, dtype, c_dtype=dtype, beta=0.5, **options), dtype)

    def test_nothing_leaks_between_neighbours(
        self, dtype, kernel, transpose_lhs, transpose_rhs, only, rng
    ):
        """NaN in one matrix of a stack, or one problem of a list, stays there."""
        only(dtype, kernel)
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        shapes = [(3, 77, 21, 71), (72, 40, 72), (199, 101, 137)]
        problems = random_list(rng, shapes, dtype, **options)
        problems.lhs[0][1], problems.rhs[1][:] = np.nan, np.nan
        outs = [np.asarray(out) for out in problems(**on_gpu)]
        assert np.isnan(outs[0][1]).all() and np.isnan(outs[1]).all()
        rest = List(
            [problems.lhs[0][::2], problems.lhs[2]],
            [problems.rhs[0][::2], problems.rhs[2]],
            None,
            transposes={name: [x] * 2 for name, x in options.items()},
        )
        rest.check_double([outs[0][::2], outs[2]])


@DTYPES
@pytest.mark.parametrize("sort_problems", [False, True])
@pytest.mark.parametrize("multiple", [8, 1])
@pytest.mark.parametrize("count", [1, 24, 128, 300])
def test_lists(count, multiple, sort_problems, dtype, rng):
    """As in CUTLASS's tests, every layout, with stacks and empty problems among them."""
    problems = any_list(
        rng,
        count,
        multiple,
        dtype,
        alpha=[number(rng, dtype) for _ in range(count)],
        beta=[float(x) for x in rng.choice([0.0, 1.0, -0.5], count)],
    )
    check(problems, dtype, sort_problems=sort_problems)


@DTYPES
def test_more_matrices_than_a_launch_takes(dtype, rng):
    """Launches begin inside of a stack; each matrix has scales of its own."""
    shapes = [(300, 5, 7, 9), (100, 33, 3, 20), (2, 66, 70, 65)]
    problems = random_list(
        rng,
        shapes,
        dtype,
        c_dtype=dtype,
        alpha=[draw(rng, g, dtype) for g, *_ in shapes],
        beta=[draw(rng, g, dtype) for g, *_ in shapes],
    )
    call = jax.jit(
        lambda lhs, rhs, c, alpha, beta: jgg.grouped_gemm(
            lhs, rhs, c, alpha=alpha, beta=beta, **on_gpu
        )
    )
    poison_memory(problems, itemsize=16)
    operands = problems.lhs, problems.rhs, problems.c, problems.alpha, problems.beta
    problems.check_double(call(*operands))


@DTYPES
def test_beta_zero_never_reads_c(dtype, rng):
    shapes = [(137, 71, 200), (2, 24, 8, 15)]
    problems = random_list(rng, shapes, dtype)
    poison = [np.full((*g, m, n), np.nan, dtype) for *g, m, k, n in shapes]
    call = jax.jit(partial(jgg.grouped_gemm, **on_gpu))
    problems.check_double(call(problems.lhs, problems.rhs, poison, beta=jnp.zeros(())))


def test_c_without_a_product(rng):
    """k is zero: the result is beta C, exactly, beside a problem with a product."""
    problems = random_list(rng, [(30, 0, 7), (30, 5, 7)], C128, c_dtype=C128, beta=2.0j)
    outs = problems(**on_gpu)
    np.testing.assert_array_equal(outs[0], 2.0j * problems.c[0])
    problems.check_double(outs)


@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize("alpha", [0, 1, -1, 1j, 0.6 - 0.8j, 1e-30 + 1e-25j])
def test_complex_alpha(alpha, dtype, rng):
    problems = random_list(rng, [(130, 40, 65)], dtype, alpha=dtype(alpha))
    check(problems, dtype)


def test_a_number_and_an_array_give_the_same_bits(rng):
    problems = random_list(rng, [(137, 71, 200), (2, 24, 8, 15)], F64, c_dtype=F64)
    operands = problems.lhs, problems.rhs, problems.c
    call = jax.jit(partial(jgg.grouped_gemm, **on_gpu))
    for out, other in zip(
        jax.jit(partial(jgg.grouped_gemm, alpha=0.3, beta=-1.7, **on_gpu))(*operands),
        call(*operands, alpha=jnp.asarray(0.3), beta=jnp.asarray(-1.7)),
        strict=True,
    ):
        np.testing.assert_array_equal(out, other)


@DTYPES
def test_stored_transposed_gives_the_same_bits(dtype, rng):
    check_transposed(draw(rng, (137, 71), dtype), draw(rng, (71, 201), dtype))


@DTYPES
def test_donated_c_is_updated_in_place(dtype, rng):
    problems = random_list(rng, [(137, 71, 201)], dtype, c_dtype=dtype, beta=0.5)
    problems.check_double(update_in_place(problems))


@DTYPES
def test_repeats_bitwise(dtype, rng):
    check_repeats(random_list(rng, cutlass_like(rng, 60, 5), dtype), 10)


@FORMS
@pytest.mark.parametrize("dtype", [F64, C128])
def test_gradients(dtype, transpose_lhs, transpose_rhs, rng):
    """Those of the kernel against those of the reference."""
    shapes = [(137, 71, 200), (2, 64, 41, 263), (24, 0, 16)]
    transposes = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    problems = random_list(rng, shapes, dtype, c_dtype=dtype, **transposes)
    weights = [draw(rng, x.shape, dtype) for x in problems.c]

    def loss(implementation, lhs, rhs, c, alpha, beta):
        outs = jgg.grouped_gemm(
            lhs, rhs, c, alpha=alpha, beta=beta, implementation=implementation, **transposes
        )
        return sum(jnp.vdot(w, out).real for out, w in zip(outs, weights, strict=True))

    gradient = jax.jit(jax.grad(loss, (1, 2, 3, 4, 5)), static_argnums=0)
    operands = problems.lhs, problems.rhs, problems.c
    got = jax.tree.leaves(gradient("cuda", *operands, 0.5, -2.0))
    want = jax.tree.leaves(gradient("reference", *operands, 0.5, -2.0))
    for x, y in zip(got, want, strict=True):
        scale = max(np.abs(y).max(), 1) if y.size else 1
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11 * scale)


def test_vmap(rng):
    outs, every = map_over_stacks(random_list(rng, [(5, 137, 71, 200), (5, 64, 40, 73)], C128))
    every.check_double(outs)


def test_in_a_scan(rng):
    check_in_a_scan(random_list(rng, [(63, 63, 63), (137, 137, 137)], F64))
