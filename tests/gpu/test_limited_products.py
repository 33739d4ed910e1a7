"""Products that leave part of the chip to other kernels give the same results."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.mlp.operands import Groups, PairedWeightsOperands, Rows
from jax_grouped_gemm._src.mlp.primitive import PAIRED_WEIGHTS, Options, bind
from jax_grouped_gemm._src.ragged.call import NONCONTRACTING_TARGET
from jax_grouped_gemm._src.ragged.primitive import ragged_contracting, ragged_noncontracting
from tests.support import mlp_on_gpu as mlp
from tests.support.ops import random

SIZES = [700, 0, 129, 64, 900, 1]
M, D, F = sum(SIZES), 520, 392
LIMITS = [1, 2, 7, 116, 1000]
OPTIONS = dict(transpose_lhs=False, transpose_rhs=False, precision=None, implementation="cuda")


def indices():
    return mlp.indices(SIZES, 0).values()


def assert_close(got, want):
    """Checks that results are close. Cuts of large groups' tiles depend on the number of blocks."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-8 * np.abs(want).max())


@pytest.mark.parametrize("max_sms", LIMITS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_products(max_sms, dtype, rng):
    x, dy = random(rng, (M, D), dtype), random(rng, (M, F), dtype)
    w = mlp.matrices(rng, (len(SIZES), D, F), dtype)

    @partial(jax.jit, static_argnums=0)
    def both(most):
        options = dict(OPTIONS, preferred_element_type=np.dtype(dtype), max_sms=most)
        rows = ragged_noncontracting(x, w, *indices(), **options)
        return rows, ragged_contracting(x, dy, *indices(), num_groups=len(SIZES), **options)

    (rows, weights), (want_rows, want_weights) = both(max_sms), both(None)
    np.testing.assert_array_equal(rows, want_rows)
    assert_close(weights, want_weights)


@pytest.mark.parametrize("max_sms", LIMITS)
def test_both_weight_gradients(max_sms, rng):
    dtype = jnp.bfloat16
    x = random(rng, (M, D), dtype)
    gradients = [random(rng, (M, F), dtype) for _ in range(2)]

    @partial(jax.jit, static_argnums=0)
    def both(most):
        options = Options.of(as_activation("silu"), None, "cuda", max_sms=most)
        operands = PairedWeightsOperands(Rows(x), *gradients, Groups(*indices()))
        return bind(PAIRED_WEIGHTS, operands, num_groups=len(SIZES), **options.of_products)

    for got, want in zip(both(max_sms), both(None), strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(
    "max_sms, message",
    [
        (np.int32(0), "max_sms has to be positive, got 0"),
        (np.int32(-1), "max_sms has to be positive, got -1"),
        (np.int64(8), "max_sms: Wrong scalar data type: expected S32 but got S64"),
        (True, "max_sms: Wrong scalar data type: expected S32 but got PRED"),
    ],
)
def test_what_is_no_limit_is_refused(max_sms, message, rng):
    x, w = random(rng, (M, D), jnp.bfloat16), mlp.matrices(rng, (len(SIZES), D, F), jnp.bfloat16)
    results = (
        jax.ShapeDtypeStruct((M, F), jnp.bfloat16),
        jax.ShapeDtypeStruct((16,), jnp.uint8),
    )
    attributes = dict(transpose_lhs=False, transpose_rhs=False, zeroes_unowned=True)
    sizes = dict(tile_m=np.int32(128), tile_n=np.int32(256), cluster=np.int32(2))
    call = jax.ffi.ffi_call(NONCONTRACTING_TARGET, results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(
            jax.jit(
                lambda *operands: call(
                    *operands,
                    **attributes,
                    **sizes,
                    kind="cooperative",
                    terms=np.int32(0),
                    max_sms=max_sms,
                )
            )(x, w, *indices())
        )
