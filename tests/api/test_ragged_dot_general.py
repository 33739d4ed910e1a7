"""Dimension numbers with batches and in any order, against `jax.lax.ragged_dot_general`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_grouped_gemm as jgg
from tests.support.ops import random

SIZE = dict(a=2, b=3, c=2, k=4, l=3, m=11, n=5, o=2, g=3)


def numbers(lhs: str, rhs: str, contracting: str, batch: str) -> lax.RaggedDotDimensionNumbers:
    """Returns dimension numbers for named dimensions; m is ragged, and g counts groups."""
    dot = tuple(
        (tuple(lhs.index(d) for d in names), tuple(rhs.index(d) for d in names))
        for names in (contracting, batch)
    )
    groups = [dim for dim, name in enumerate(rhs) if name == "g"]
    return lax.RaggedDotDimensionNumbers(dot, [lhs.index("m")], groups)


def operands(rng, lhs: str, rhs: str, sizes: str):
    """Returns random operands. Groups own all rows, because JAX leaves other rows undefined."""
    lhs, rhs = (random(rng, [SIZE[d] for d in names], np.float32) for names in (lhs, rhs))
    weights = np.full(SIZE["g"], 1 / SIZE["g"])
    return lhs, rhs, rng.multinomial(SIZE["m"], weights, [SIZE[d] for d in sizes[:-1]])


def assert_same(ours, jaxs):
    assert ours.dtype == jaxs.dtype
    np.testing.assert_allclose(ours, jaxs, rtol=1e-5, atol=1e-5)


class TestNoncontracting:
    @pytest.mark.parametrize(
        "lhs, rhs, contracting, batch, sizes",
        [
            ("mk", "kgn", "k", "", "g"),
            ("km", "nkg", "k", "", "g"),
            ("bmk", "gbkn", "k", "b", "g"),
            ("bmk", "bgkn", "k", "b", "bg"),
            ("mbk", "gknb", "k", "b", "bg"),
            ("abmk", "bgakn", "k", "ba", "bag"),
            ("amk", "gkn", "k", "", "ag"),
            ("amck", "gkn", "k", "", "g"),
            ("bamk", "gbkn", "k", "b", "bag"),
            ("mkl", "glkn", "kl", "", "g"),
            ("lmk", "gkln", "kl", "", "g"),
            ("mk", "gokn", "k", "", "g"),
            ("mk", "gk", "k", "", "g"),
            ("m", "gn", "", "", "g"),
        ],
    )
    def test_result_and_gradients(self, lhs, rhs, contracting, batch, sizes, rng):
        dims = numbers(lhs, rhs, contracting, batch)
        lhs, rhs, sizes = operands(rng, lhs, rhs, sizes)
        ours, our_vjp = jax.vjp(lambda *x: jgg.ragged_dot_general(*x, sizes, dims), lhs, rhs)
        jaxs, jax_vjp = jax.vjp(lambda *x: lax.ragged_dot_general(*x, sizes, dims), lhs, rhs)
        assert_same(ours, jaxs)
        cotangent = random(rng, ours.shape, np.float32)
        for our_gradient, jax_gradient in zip(our_vjp(cotangent), jax_vjp(cotangent), strict=True):
            assert_same(our_gradient, jax_gradient)

    @pytest.mark.parametrize("lhs", ["mk", "km"])
    @pytest.mark.parametrize("rhs", ["gkn", "gnk", "bgkn"])
    def test_majors_reach_the_primitive(self, lhs, rhs):
        batch = "b" * ("b" in rhs)
        dims = numbers(batch + lhs, rhs, "k", batch)
        shapes = [
            jax.ShapeDtypeStruct([SIZE[d] for d in names], jnp.float32)
            for names in (batch + lhs, rhs)
        ]
        sizes = jax.ShapeDtypeStruct((SIZE["g"],), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda *x: jgg.ragged_dot_general(*x, dims))(*shapes, sizes)
        assert "transpose[" not in str(jaxpr)


class TestContracting:
    @pytest.mark.parametrize(
        "lhs, rhs, batch, sizes",
        [
            ("mk", "nm", "", "g"),
            ("bmk", "bmn", "b", "bg"),
            ("mbk", "nmb", "b", "g"),
            ("abmk", "bman", "ab", "abg"),
            ("amk", "mno", "", "g"),
            ("m", "mn", "", "g"),
            ("mk", "m", "", "g"),
        ],
    )
    def test_result(self, lhs, rhs, batch, sizes, rng):
        dims = numbers(lhs, rhs, "m", batch)
        inputs = operands(rng, lhs, rhs, sizes)
        assert_same(jgg.ragged_dot_general(*inputs, dims), lax.ragged_dot_general(*inputs, dims))

    def test_only_one_contracting_dimension(self, rng):
        dims = numbers("mlk", "mln", "ml", "")
        with pytest.raises(NotImplementedError, match="contracting"):
            jgg.ragged_dot_general(*operands(rng, "mlk", "mln", "g"), dims)


class TestRaggedBatch:
    def test_result(self, rng):
        dims = numbers("bmk", "bmkn", "k", "bm")
        inputs = operands(rng, "bmk", "bmkn", "bg")
        assert_same(jgg.ragged_dot_general(*inputs, dims), lax.ragged_dot_general(*inputs, dims))

    @pytest.mark.parametrize("options", [dict(group_offset=0), dict(implementation="cuda")])
    def test_unsupported(self, options, rng):
        dims = numbers("mk", "mkn", "k", "m")
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            jgg.ragged_dot_general(*operands(rng, "mk", "mkn", "g"), dims, **options)
