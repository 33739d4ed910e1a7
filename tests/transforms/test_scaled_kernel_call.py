"""Calls of FP8 kernels, which cannot multiply two float8_e5m2 operands, with a stand-in.

The stand-in for the kernels computes only from the operands and attributes of each call.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.formats import split_e5m2
from jax_grouped_gemm._src.fp8.scaled import call
from jax_grouped_gemm._src.fp8.scaled import reference as scaled_reference
from tests.support import fp8_oracle
from tests.support.dtypes import E4M3, E5M2

M, K, N, G = 150, 272, 48, 3
TYPES = pytest.mark.parametrize("dtypes", list(product((E4M3, E5M2), repeat=2)))
OFFSET = jnp.zeros(1, jnp.int32)


def test_the_parts_of_e5m2_add_up():
    every = np.arange(256, dtype=np.uint8).view(E5M2)
    parts = split_e5m2(jnp.asarray(every))
    assert {x.dtype for x, _ in parts} == {np.dtype(E4M3)}
    exact = every.astype(np.float64)
    total = sum(np.asarray(x).astype(np.float64) * factor for x, factor in parts)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(total[finite], exact[finite])
    assert np.isnan(total[~finite]).all()


@pytest.fixture
def calls(monkeypatch):
    """The element types of the operands of each call of a kernel."""
    types = []

    def stand_in(target, results, input_output_aliases=None):
        out, workspace = results

        def run(lhs, lhs_scale, rhs, rhs_scale, *groups, **attributes):
            types.append((lhs.dtype, rhs.dtype))
            options = dict(preferred_element_type=out.dtype)
            if target == call.SCALED_NONCONTRACTING_TARGET:
                function = scaled_reference.scaled_ragged_noncontracting
                options |= dict(
                    transpose_rhs=True,
                    lhs_scaling=call.LHS_SCALINGS[attributes["lhs_scaling"]],
                    rhs_scaling=call.RHS_SCALINGS[attributes["rhs_scaling"]],
                    fast_accumulation=False,
                )
            else:
                assert target == call.SCALED_CONTRACTING_TARGET
                function = scaled_reference.scaled_ragged_contracting
                options |= dict(num_rows=int(attributes["m"]), num_groups=out.shape[0])
            result = function(lhs, lhs_scale, rhs, rhs_scale, *groups, **options)
            return result, jnp.zeros(workspace.shape, workspace.dtype)

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", stand_in)
    return types


def check_types(calls, dtypes):
    """Checks that a product of two float8_e5m2 operands becomes two calls of other types."""
    expected = 2 * [(E4M3, E5M2)] if dtypes == (E5M2, E5M2) else [dtypes]
    assert calls == [tuple(map(np.dtype, each)) for each in expected]


def draw(rng, shape, dtype):
    """Returns values over many powers of two."""
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 6, shape))).astype(dtype)


@TYPES
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_of_rows(dtypes, out_dtype, rng, calls):
    lhs, rhs = draw(rng, (M, K), dtypes[0]), draw(rng, (G, N, K), dtypes[1])
    lhs_scale = rng.uniform(0.5, 2, (M, 3)).astype(np.float32)
    rhs_scale = rng.uniform(0.5, 2, (G, 1, 3)).astype(np.float32)
    sizes = rng.multinomial(M - 9, [0.2, 0.3, 0.5]).astype(np.int32)
    operands = lhs, lhs_scale, rhs, rhs_scale, sizes
    function = partial(
        jgg.scaled_ragged_dot,
        transpose_rhs=True,
        preferred_element_type=out_dtype,
        implementation="cuda",
    )
    (plan,) = jgg.explain(function, *operands).plans
    out = call.scaled_noncontracting(plan, *map(jnp.asarray, operands), OFFSET)
    assert out.dtype == out_dtype
    check_types(calls, dtypes)
    rhs, rhs_scale = rhs.swapaxes(1, 2), rhs_scale.swapaxes(1, 2)
    fp8_oracle.check(out, fp8_oracle.noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes))


@TYPES
def test_of_contracted_rows(dtypes, rng, calls):
    sizes = np.array([100, 0, 50], np.int32)
    operands = []
    for columns, dtype in zip((K, N), dtypes, strict=True):
        rows = jgg.quantize_ragged(jnp.asarray(draw(rng, (M, columns), np.float32)), sizes, dtype)
        operands += [rows.values_t, rows.scales_t]
    operands.append(sizes)
    function = partial(jgg.scaled_ragged_dot_contracting, num_rows=M)
    (plan,) = jgg.explain(partial(function, implementation="cuda"), *operands).plans
    out = call.scaled_contracting(plan, *map(jnp.asarray, operands), OFFSET)
    check_types(calls, dtypes)
    want = np.asarray(function(*operands, implementation="xla"))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * abs(want).max())
