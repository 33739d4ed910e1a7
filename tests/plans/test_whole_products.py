"""The symmetric updates that go to XLA because its products of whole matrices are faster."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import BF16, C64, C128, F32, F64
from tests.support.plans import how

pytestmark = pytest.mark.plans_as_users_get_them


def plan(function, shape, dtype, *, count=1, **options):
    x = [jax.ShapeDtypeStruct(shape, dtype)] * count
    operands = (x, x) if "2" in function.__name__ else (x,)
    with jax.enable_x64(True):
        (found,) = jgg.explain(lambda *a: function(*a, **options), *operands).plans
    return found


# Stacks [g, n, k]. For the first list, cuBLAS took less than .8 of the kernel's time on an H200.
# For the second list it took longer. tests/benchmarks/test_fit.py has all measured stacks.
FASTER_IN_XLA = [
    (jgg.grouped_syrk, (8, 88, 1536), BF16),
    (jgg.grouped_syrk, (8, 48, 80), BF16),
    (jgg.grouped_syr2k, (128, 32, 3200), BF16),
    (jgg.grouped_syrk, (4, 88, 768), F32),
    (jgg.grouped_syr2k, (16, 1024, 1024), F32),
    (jgg.grouped_her2k, (16, 72, 192), C128),
]
FASTER_IN_OURS = [
    (jgg.grouped_syrk, (64, 256, 1024), BF16),
    # k is no multiple of 64, so XLA pads the operands that it cuts: 67 us against 27 us.
    (jgg.grouped_syrk, (16, 192, 4104), BF16),
    (jgg.grouped_syr2k, (64, 1392, 312), BF16),
    (jgg.grouped_syr2k, (8, 2048, 2048), F32),
    (jgg.grouped_syr2k, (16, 1024, 1024), F64),
    (jgg.grouped_her2k, (8, 2048, 2048), C128),
]


@pytest.mark.parametrize("function, shape, dtype", FASTER_IN_XLA)
def test_xla_multiplies_what_it_was_measured_to_multiply_faster(function, shape, dtype):
    found = plan(function, shape, dtype)
    assert how(found) == "xla" and "XLA's products of whole matrices" in found.reason
    assert "us" in str(found)


@pytest.mark.parametrize("function, shape, dtype", FASTER_IN_OURS)
def test_kernels_run_where_they_were_measured_to_be_faster(function, shape, dtype):
    assert how(plan(function, shape, dtype)) == "kernel"


@pytest.mark.parametrize("function, shape, dtype", FASTER_IN_XLA)
def test_cuda_is_always_a_kernel(function, shape, dtype):
    assert how(plan(function, shape, dtype, implementation="cuda")) == "kernel"


def test_exact_float32_products_are_slow_in_xla():
    found = plan(jgg.grouped_syr2k, (16, 1024, 1024), F32, precision="highest")
    assert how(found) == "kernel" and found.terms == 3


def test_a_kernel_has_one_launch_for_a_list():
    """XLA launches kernels for every matrix, so it is slower for a list of twenty."""
    assert how(plan(jgg.grouped_syrk, (88, 1536), BF16)) == "xla"
    assert how(plan(jgg.grouped_syrk, (88, 1536), BF16, count=20)) == "kernel"


def test_complex64_at_the_highest_precision_is_added_up_in_float64():
    """XLA would add up the products in float32, so the kernel runs."""
    found = plan(jgg.grouped_her2k, (4, 64, 64), C64, precision="highest")
    assert how(found) == "kernel"


def test_results_are_those_of_the_kernel(h200, rng):
    """If XLA computes an update, the program calls no kernel of ours, and has the same result."""
    x = jax.ShapeDtypeStruct((8, 88, 1536), jnp.bfloat16)
    assert h200.compile(jgg.grouped_syrk, x).kernels == {}
    a = rng.standard_normal((2, 24, 40)).astype(np.float32)
    out = np.asarray(jgg.grouped_syrk(a))
    np.testing.assert_allclose(out, np.tril(a @ a.swapaxes(1, 2)), rtol=1e-5, atol=1e-4)
