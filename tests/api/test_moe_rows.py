"""The reference for sorting by expert and moving rows, against loops over rows in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import moe
from tests.support import rows as oracle
from tests.support.rows import Pairs

T, D, E, K = 13, 6, 5, 3


class TestSortByExpert:
    @pytest.mark.parametrize("low, high", [(0, E), (-3, E + 3), (2, 3), (-2, 0)])
    @pytest.mark.parametrize("shape", [(T, K), (2, 3, 4), (1,), (0, K)])
    def test_is_a_stable_sort(self, low, high, shape, rng):
        experts = rng.integers(low, high, shape).astype(np.int32)
        oracle.check_sorted(moe.sort_by_expert(experts, E), experts, E)

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
    def test_any_integers(self, dtype, rng):
        experts = rng.integers(0, E + 2, (T, K)).astype(dtype)
        oracle.check_sorted(moe.sort_by_expert(experts, E), experts, E)

    def test_of_a_routing(self, rng):
        routing = moe.route(jnp.asarray(rng.standard_normal((T, E)), jnp.float32), K)
        oracle.check_sorted(moe.sort_by_expert(routing), routing.experts, E)

    def test_no_experts(self, rng):
        result = moe.sort_by_expert(rng.integers(0, 3, (T, K)), 0)
        np.testing.assert_array_equal(result.order, np.arange(T * K))
        assert result.group_sizes.shape == (0,)

    def test_bad_arguments(self):
        with pytest.raises(TypeError, match="experts must be integers.*float32"):
            moe.sort_by_expert(jnp.zeros((T, K)), E)
        for number, error in ((None, TypeError), (2.0, TypeError), (-1, ValueError)):
            with pytest.raises(error, match=f"num_experts.*{number}"):
                moe.sort_by_expert(jnp.zeros((T, K), jnp.int32), number)
        routing = moe.route(jnp.zeros((T, E)), K)
        with pytest.raises(ValueError, match=f"num_experts.*{E}, got 4"):
            moe.sort_by_expert(routing, 4)
        with pytest.raises(ValueError, match="implementation.*nothing"):
            moe.sort_by_expert(jnp.zeros((T, K), jnp.int32), E, implementation="nothing")


class TestGatherRows:
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8, np.complex64, bool])
    @pytest.mark.parametrize("counted", [False, True])
    def test_copies_bit_by_bit(self, counted, dtype, rng):
        pairs = Pairs.random(rng, T, K, T * K + 4, counted=counted)
        x, rows = rng.integers(-100, 100, (T, D)).astype(dtype), pairs.token_of_row()
        for inverse in (None, pairs.row_of_pair):
            result = moe.gather_rows(x, rows, pairs.count, inverse=inverse)
            assert result.dtype == dtype
            want = oracle.gather(x, rows, pairs.valid)
            np.testing.assert_array_equal(result[: pairs.valid], want)

    def test_nothing_is_computed(self):
        x = np.array([[np.nan, -0.0], [np.inf, 1e-42]], np.float32)
        result = np.asarray(moe.gather_rows(x, np.array([1, -1, 0])))
        np.testing.assert_array_equal(result.view(np.int32)[[0, 2]], x.view(np.int32)[[1, 0]])
        np.testing.assert_array_equal(result[1], 0)

    @pytest.mark.parametrize("shape", [(T,), (T, 2, 3), (T, 0), (0, D)])
    def test_tokens_of_any_shape(self, shape, rng):
        x, rows = rng.standard_normal(shape), rng.integers(-2, T + 2, 20)
        np.testing.assert_array_equal(
            moe.gather_rows(x, rows), oracle.gather(np.float32(x), rows, 20)
        )

    @pytest.mark.parametrize("count", [np.int8(4), 4, jnp.array([4])])
    def test_counts(self, count, rng):
        x, rows = rng.standard_normal((T, D)), rng.integers(0, T, 20)
        result = moe.gather_rows(x, rows, count)
        np.testing.assert_array_equal(result[:4], np.float32(x)[rows[:4]])

    @pytest.mark.parametrize(
        "change, error, message",
        [
            (dict(x=[1.0]), TypeError, r"x must be a JAX or NumPy array"),
            (dict(x=np.float32(1)), TypeError, r"x must be"),
            (dict(rows=np.zeros(3)), TypeError, r"rows must be integers, got dtype float"),
            (dict(rows=np.zeros((3, 2), int)), TypeError, r"rows must be \[m\].*3, 2"),
            (dict(count=1.0), TypeError, r"count must be integers, got"),
            (dict(count=np.zeros(2, int)), TypeError, r"count must be.*\(2,\)"),
            (dict(inverse=np.zeros((4, 2), int)), TypeError, r"inverse.*T = 13.*\(4, 2\)"),
            (dict(implementation="x"), ValueError, r"implementation"),
        ],
    )
    def test_bad_arguments(self, change, error, message):
        arguments = dict(x=np.zeros((T, D), np.float32), rows=np.zeros(5, int)) | change
        with pytest.raises(error, match=message):
            moe.gather_rows(**arguments)


class TestCombine:
    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("counted", [False, True])
    @pytest.mark.parametrize("choices", [1, 2, 9])
    def test_sums_of_rows(self, choices, counted, weighted, rng):
        pairs = Pairs.random(rng, T, choices, T * choices + 4, counted=counted)
        rows = rng.standard_normal((T * choices + 4, D)).astype(np.float32)
        # NaN in rows that have no pair, or are past the count, has no effect.
        used = pairs.row_of_pair[pairs.has_row()]
        rows[np.setdiff1d(np.arange(len(rows)), used)] = np.nan
        weights = np.where(pairs.has_row(), pairs.weights, np.nan) if weighted else None
        result = moe.combine(rows, pairs.row_of_pair, weights=weights, count=pairs.count)
        want = oracle.combine(rows, pairs, weights)
        error = 1e-6 * oracle.combine_magnitude(rows, pairs, weights)
        assert (np.abs(result - want) <= error).all()

    def test_rows_may_have_several_tokens(self, rng):
        inverse = rng.integers(-2, 9, (T, K)).astype(np.int32)
        rows = rng.standard_normal((7, D)).astype(np.float32)
        pairs = Pairs(inverse, np.zeros(7, np.int32), None, None)
        np.testing.assert_allclose(
            moe.combine(rows, inverse), oracle.combine(rows, pairs), atol=1e-5
        )

    def test_half_precision_is_rounded_once(self):
        """256 + 1 + 1 in bfloat16 is 256 if every sum is rounded, 258 if only the last one is."""
        rows = jnp.array([[1.0], [256.0], [1.0]], jnp.bfloat16)
        result = moe.combine(rows, np.array([[1, 0, 2]]))
        assert result.dtype == jnp.bfloat16 and result[0, 0] == 258

    def test_choices_are_added_in_their_order(self, rng):
        rows = (rng.standard_normal((T * K, D)) * 10.0 ** rng.integers(-6, 6, (T * K, 1))).astype(
            np.float32
        )
        inverse = rng.permutation(T * K).reshape(T, K)
        want = np.zeros((T, D), np.float32)
        for choice in range(K):
            want += rows[inverse[:, choice]]
        np.testing.assert_array_equal(moe.combine(rows, inverse), want)

    def test_weights_of_any_precision(self, rng):
        rows = rng.standard_normal((T * K, D)).astype(np.float32)
        inverse = rng.permutation(T * K).reshape(T, K)
        weights = jnp.asarray(rng.standard_normal((T, K)), jnp.bfloat16)
        np.testing.assert_array_equal(
            moe.combine(rows, inverse, weights=weights),
            moe.combine(rows, inverse, weights=weights.astype(jnp.float32)),
        )

    @pytest.mark.parametrize("shape", [(0, D), (T * K, 0), (T * K,), (T * K, 2, 2)])
    def test_rows_of_any_shape(self, shape, rng):
        rows = rng.standard_normal(shape).astype(np.float32)
        inverse = rng.permutation(T * K).reshape(T, K).astype(np.int32)
        pairs = Pairs(inverse, np.zeros(shape[0], np.int32), None, None)
        np.testing.assert_allclose(
            moe.combine(rows, inverse), oracle.combine(rows, pairs), atol=1e-5
        )

    def test_nothing_to_sum(self):
        rows = jnp.ones((T * K, D))
        assert moe.combine(rows, np.zeros((0, K), int)).shape == (0, D)
        np.testing.assert_array_equal(moe.combine(rows, np.zeros((T, 0), int)), np.zeros((T, D)))

    @pytest.mark.parametrize(
        "change, error, message",
        [
            (dict(top_k=2), ValueError, r"top_k.*3, got 2"),
            (dict(top_k=np.ones((T, K))), TypeError, r"top_k must be an integer"),
            (dict(expert_order=np.zeros(T, int)), TypeError, r"\[T, k\].*\(13,\)"),
            (dict(expert_order=np.zeros((T, K))), TypeError, r"expert_order must be integers"),
            (dict(weights=np.ones((T, K), int)), TypeError, r"weights.*floating point, got int"),
            (dict(weights=np.ones((K, T))), TypeError, r"weights.*\(13, 3\).*\(3, 13\)"),
            (dict(order=np.zeros(4, int)), TypeError, r"order must be \[m\] = \(39,\).*\(4,\)"),
        ],
    )
    def test_bad_arguments(self, change, error, message):
        operands = dict(rows=np.zeros((T * K, D), np.float32), expert_order=np.zeros((T, K), int))
        with pytest.raises(error, match=message):
            moe.combine(**operands | change)

    def test_bad_arguments_with_an_expert_order(self, rng):
        order = moe.sort_by_expert(rng.integers(0, E, (T, K)), E)
        rows = jnp.zeros((T * K, D))
        for top_k in (0, 2):
            with pytest.raises(ValueError, match=f"top_k.*3, got {top_k}"):
                moe.combine(rows, order, top_k)
        with pytest.raises(TypeError, match=r"rows must be \[39, ...\].*\(5, 6\)"):
            moe.combine(rows[:5], order)
        with pytest.raises(TypeError, match="rows must be floating point .* got int32"):
            ones = jnp.ones(order.inverse.shape)
            moe.combine(jnp.ones((order.inverse.size, 2), jnp.int32), order, weights=ones)
        with pytest.raises(ValueError, match="order is part of expert_order"):
            moe.combine(rows, order, order=order.order)


class TestDispatch:
    def test_and_combine(self, rng):
        experts = rng.integers(-1, E + 1, (T, K)).astype(np.int32)
        order = moe.sort_by_expert(experts, E)
        x = rng.standard_normal((T, D)).astype(np.float32)
        rows = moe.dispatch(x, order)
        np.testing.assert_array_equal(rows, x[np.asarray(order.order) // K])
        here = ((experts >= 0) & (experts < E)).sum(axis=1, keepdims=True)
        count = order.group_sizes.sum()
        rows = moe.dispatch(x, order, count=count).at[count:].set(np.nan)
        sums = moe.combine(rows, order, count=count)
        np.testing.assert_allclose(sums, here * x, rtol=1e-5)

    def test_no_tokens(self):
        order = moe.sort_by_expert(np.zeros((0, K), np.int32), E)
        assert moe.dispatch(jnp.zeros((0, D)), order).shape == (0, D)

    def test_pairs_of_other_tokens(self, rng):
        order = moe.sort_by_expert(rng.integers(0, E, (T, K)), E)
        with pytest.raises(TypeError, match=r"T = 13 as ordered, got \(12, 6\)"):
            moe.dispatch(jnp.zeros((T - 1, D)), order)


def test_a_routing_that_visits_experts_elsewhere(rng):
    """Pairs whose expert has no matrix in this call add nothing to the layer's result."""
    x = jnp.asarray(rng.standard_normal((T, D)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((T, E)), jnp.float32)
    weights = [
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in [(E, D, 8)] * 2 + [(E, 8, D)]
    ]
    routing = moe.route(logits, K)
    elsewhere = rng.random((T, K)) < 0.4
    changed = routing._replace(experts=jnp.where(elsewhere, -1, routing.experts))
    silent = routing._replace(weights=jnp.where(elsewhere, 0, routing.weights))
    np.testing.assert_allclose(
        moe.dropless_mlp(x, changed, *weights), moe.dropless_mlp(x, silent, *weights), atol=1e-5
    )
