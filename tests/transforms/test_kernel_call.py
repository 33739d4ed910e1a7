"""Custom calls give kernels the right operands and attributes, as a stand-in for a kernel shows.

The stand-in computes only from the operands and attributes of a call. Right results show that these
describe the problem: majors, padding and dtypes. GPU tests check the kernels themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.ragged import call, reference
from tests.support import oracle
from tests.support.ops import NONCONTRACTING, OPS, random, swap

M, K, N, G = 37, 11, 13, 3
SIZES = np.array([9, 0, 21], np.int32)


def stand_in(target, results, input_output_aliases=None):
    out, workspace = results
    assert not input_output_aliases

    def call(
        lhs,
        rhs,
        group_sizes,
        group_offset,
        *,
        transpose_lhs,
        transpose_rhs,
        kind,
        zeroes_unowned=True,
        **tile,
    ):
        assert kind == ("swapped" if tile["tile_m"] == 64 else "cooperative") and zeroes_unowned
        assert tile.keys() == {"tile_m", "tile_n", "cluster", "terms"}
        assert (tile["terms"] in (1, 3)) == (lhs.dtype == jnp.float32)
        assert {type(attribute) for attribute in tile.values()} == {np.int32}
        for x in (lhs, rhs, out):
            assert x.shape[-1] * x.dtype.itemsize % 16 == 0, "TMA cannot address such rows"
        assert out.dtype in (lhs.dtype, jnp.float32)
        options = dict(
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            preferred_element_type=np.dtype(out.dtype),
            precision=None,
        )
        if target == "jax_grouped_gemm.ragged_noncontracting.v4":
            product = reference.ragged_noncontracting
        else:
            assert target == "jax_grouped_gemm.ragged_contracting.v4"
            product, options["num_groups"] = reference.ragged_contracting, out.shape[-3]
        result = product(lhs, rhs, group_sizes, group_offset, **options)
        assert result.shape == out.shape
        return result, jnp.zeros(workspace.shape, workspace.dtype)

    return call


@pytest.mark.parametrize("op", OPS, ids=repr)
@pytest.mark.parametrize("m, k, n", [(M, K, N), (40, 16, 24)])
@pytest.mark.parametrize("transpose_lhs", [False, True])
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_call(op, m, k, n, transpose_lhs, transpose_rhs, dtype, out_dtype, rng, monkeypatch):
    monkeypatch.setattr(jax.ffi, "ffi_call", stand_in)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    lhs, rhs = (random(rng, shape, dtype) for shape in op.shapes(m, k, n, G)[:2])
    operands = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs), SIZES

    def function(*operands):
        return op.call.__wrapped__(*operands, preferred_element_type=out_dtype, **majors)

    (planned,) = jgg.explain(function, *operands).plans
    out = call.ragged(planned, *map(jnp.asarray, operands), jnp.zeros(1, jnp.int32))
    assert out.dtype == out_dtype
    oracle.check(out, op.exact(lhs, rhs, SIZES))


def test_batched_call(rng, monkeypatch):
    monkeypatch.setattr(jax.ffi, "ffi_call", stand_in)
    lhs_shape, rhs_shape, _ = NONCONTRACTING.shapes(M, K, N, G)
    lhs, rhs = random(rng, (2, *lhs_shape), jnp.bfloat16), random(rng, rhs_shape, jnp.bfloat16)
    sizes = rng.multinomial(M, [0.2, 0.3, 0.5], 2).astype(np.int32)
    mapped = jax.vmap(jgg.ragged_dot, (0, None, 0))
    (planned,) = jgg.explain(mapped, lhs, rhs, sizes).plans
    out = call.ragged(planned, *map(jnp.asarray, (lhs, rhs, sizes)), jnp.zeros(1, jnp.int32))
    oracle.check(out, NONCONTRACTING.exact(lhs, rhs, sizes))
