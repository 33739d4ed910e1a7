"""The kernels that sort and move rows, against loops over rows in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import moe
from tests.support import rows as oracle
from tests.support.rows import Pairs

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16, F32])
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-23}
# Rows have one element, an odd width, fewer vectors of 16 bytes than a warp has threads, or more
# than a thread block has.
WIDTHS = [1, 13, 24, 96, 520, 2048, 2880, 4104, 7167]
CASES = 6  # random pairs for the shape that a test draws


def cases(rng, width, dtype, number=CASES, *, counted=True):
    """Yields tokens, rows that are NaN where nothing may read them, and their pairs."""
    choices = int(rng.integers(1, 20))
    tokens = int(rng.integers(1, min(600, max(2, 400_000 // (width * choices)))))
    num_rows = tokens * choices + int(rng.integers(0, 70))
    for _ in range(number):
        pairs = Pairs.random(rng, tokens, choices, num_rows, counted=counted)
        x = rng.standard_normal((tokens, width)).astype(dtype)
        rows = rng.standard_normal((num_rows, width)).astype(dtype)
        rows[np.setdiff1d(np.arange(num_rows), pairs.row_of_pair[pairs.has_row()])] = np.nan
        yield x, rows, pairs


def weights_of(pairs):
    return np.where(pairs.has_row(), pairs.weights, np.nan).astype(np.float32)


def assert_close(got, exact, magnitude, dtype, terms):
    """Allows one rounding of the result, and a float32 rounding of each partial sum."""
    assert got.dtype == dtype
    error = ROUNDING[dtype] * np.abs(exact) + terms * 2.0**-23 * magnitude + 1e-7
    assert (np.abs(np.asarray(got, np.float64) - exact) <= error).all()


class TestSort:
    @pytest.mark.parametrize("pairs", [1, 8, 1000, 4096, 4097, 65536, 200_001])
    @pytest.mark.parametrize("experts", [1, 8, 128, 1000, 4096, 16384])
    def test_sizes(self, pairs, experts, rng):
        for low, high in ((0, experts), (-experts, 2 * experts), (experts // 2, experts // 2 + 1)):
            values = rng.integers(low, high, (pairs, 1)).astype(np.int32)
            result = moe.sort_by_expert(values, experts, implementation="cuda")
            oracle.check_sorted(result, values, experts)

    def test_random_sizes(self, rng):
        for _ in range(40):
            pairs, experts = int(rng.integers(1, 30_000)), int(rng.integers(1, 700))
            values = rng.integers(-3, experts + 3, pairs).astype(np.int32)
            values[rng.random(pairs) < 0.1] = rng.choice([-(2**31), 2**31 - 1])
            result = moe.sort_by_expert(values, experts, implementation="cuda")
            oracle.check_sorted(result, values, experts)

    @pytest.mark.parametrize("experts", [128, 4096])
    def test_a_million_pairs(self, experts, rng):
        values = rng.integers(0, experts, 65536 * 16).astype(np.int32)
        oracle.check_sorted(
            moe.sort_by_expert(values, experts, implementation="cuda"), values, experts
        )

    def test_nobody_is_here(self):
        values = np.full(5000, -1, np.int32)
        oracle.check_sorted(moe.sort_by_expert(values, 8, implementation="cuda"), values, 8)

    @pytest.mark.parametrize("pairs", [300, 9000])
    def test_vmap(self, pairs, rng):
        values = rng.integers(-1, 65, (5, pairs, 1)).astype(np.int32)
        run = jax.vmap(partial(moe.sort_by_expert, num_experts=64, implementation="cuda"))
        result = run(values)
        for i in range(5):
            oracle.check_sorted(jax.tree.map(lambda x, i=i: x[i], result), values[i], 64)

    def test_same_bits_every_time(self, rng):
        values = rng.integers(0, 64, 100_000).astype(np.int32)
        run = jax.jit(partial(moe.sort_by_expert, num_experts=64, implementation="cuda"))
        first = [np.asarray(x) for x in run(values)]
        for _ in range(50):
            for one, other in zip(run(values), first, strict=True):
                np.testing.assert_array_equal(one, other)


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
class TestMoves:
    def test_gather(self, width, dtype, rng):
        for x, _, pairs in cases(rng, width, dtype):
            rows = pairs.token_of_row()
            want = oracle.gather(x, rows, pairs.valid)
            for inverse in (None, pairs.row_of_pair):
                options = dict(inverse=inverse, implementation="cuda")
                got = moe.gather_rows(x, rows, pairs.count, **options)
                np.testing.assert_array_equal(got[: pairs.valid], want)

    def test_rows_past_the_count_are_not_written(self, width, dtype, rng):
        """The result takes over memory full of NaN."""

        @partial(jax.jit, donate_argnums=4, keep_unused=True, static_argnums=5)
        def into(x, rows, inverse, count, memory, known):
            inverse = inverse if known else None
            return moe.gather_rows(x, rows, count, inverse=inverse, implementation="cuda")

        for known, (x, rows, pairs) in zip((False, True), cases(rng, width, dtype, 2), strict=True):
            memory = jnp.full(rows.shape, jnp.nan, dtype)
            address = memory.unsafe_buffer_pointer()
            operands = x, pairs.token_of_row(), pairs.row_of_pair, np.int32(pairs.count)
            got = into(*operands, memory, known)
            assert got.unsafe_buffer_pointer() == address
            assert np.isnan(np.asarray(got[pairs.valid :], np.float32)).all()
            assert not np.isnan(np.asarray(got[: pairs.valid], np.float32)).any()

    @pytest.mark.parametrize("weighted", [False, True])
    def test_combine(self, weighted, width, dtype, rng):
        for _, rows, pairs in cases(rng, width, dtype):
            weights = weights_of(pairs) if weighted else None
            options = dict(weights=weights, count=pairs.count, implementation="cuda")
            got = moe.combine(rows, pairs.row_of_pair, **options)
            exact = oracle.combine(rows, pairs, weights)
            magnitude = oracle.combine_magnitude(rows, pairs, weights)
            assert_close(got, exact, magnitude, dtype, pairs.choices + 1)

    def test_gradients_of_a_weighted_sum(self, width, dtype, rng):
        for ct, rows, pairs in cases(rng, width, dtype):
            weights = weights_of(pairs)

            def run(rows, weights, pairs=pairs):
                options = dict(order=pairs.pair_of_row, count=pairs.count, implementation="cuda")
                return moe.combine(rows, pairs.row_of_pair, weights=weights, **options)

            rows_bar, weights_bar = jax.vjp(run, rows, weights)[1](jnp.asarray(ct))
            exact = np.zeros((pairs.valid, width))
            dots, magnitude = np.zeros(weights.shape), np.zeros(weights.shape)
            for token, choice in np.argwhere(pairs.has_row()):
                row, one = pairs.row_of_pair[token, choice], np.asarray(ct[token], np.float64)
                exact[row] = one * weights[token, choice]
                other = np.asarray(rows[row], np.float64)
                dots[token, choice], magnitude[token, choice] = (
                    one @ other,
                    np.abs(one) @ abs(other),
                )
            assert_close(rows_bar[: pairs.valid], exact, np.abs(exact), dtype, 1)
            assert_close(weights_bar, dots, magnitude, F32, width)

    def test_same_bits_every_time(self, width, dtype, rng):
        ((_, rows, pairs),) = cases(rng, width, dtype, 1, counted=False)

        @jax.jit
        def run(rows, inverse, weights):
            return moe.combine(rows, inverse, weights=weights, implementation="cuda")

        first = np.asarray(run(rows, pairs.row_of_pair, pairs.weights))
        for _ in range(20):
            again = np.asarray(run(rows, pairs.row_of_pair, pairs.weights))
            assert again.tobytes() == first.tobytes()


def test_more_tokens_than_the_cache_holds(rng):
    """Tokens that do not fit into the cache are gathered some columns at a time."""
    x = rng.standard_normal((20_000, 1040)).astype(BF16)
    rows = rng.integers(-1, 20_001, 30_000).astype(np.int32)
    got = moe.gather_rows(x, rows, implementation="cuda")
    exists = (rows >= 0) & (rows < len(x))
    want = np.where(exists[:, None], x[np.where(exists, rows, 0)], np.zeros((), BF16))
    np.testing.assert_array_equal(got, want)


AXES = [(0, 0, 0, 0, 0), (None, 0, 0, 0, 0), (0, None, None, None, None), (None, 0, 0, None, 0)]


@pytest.mark.parametrize("axes", AXES)
def test_vmap(axes, rng):
    cases = [Pairs.random(rng, 50, 3, 160, counted=True) for _ in range(4)]
    arrays = (
        [rng.standard_normal((160, 72)).astype(BF16) for _ in cases],
        [case.row_of_pair for case in cases],
        [case.pair_of_row for case in cases],
        [case.weights for case in cases],
        [np.int32(case.count) for case in cases],
    )
    operands = [x[0] if axis is None else np.stack(x) for x, axis in zip(arrays, axes, strict=True)]

    def both(implementation):
        """Returns sums and cotangents. Cotangents of shared rows are summed over the batch."""

        def run(rows, weights):
            def one(rows, inverse, order, weights, count):
                options = dict(order=order, count=count, implementation=implementation)
                return moe.combine(rows, inverse, weights=weights, **options)

            return jax.vmap(one, axes)(rows, *operands[1:3], weights, operands[4])

        out, vjp = jax.vjp(run, operands[0], operands[3])
        rows_bar, weights_bar = vjp(out)
        if axes[0] == 0:  # rows past the count are undefined
            count = np.broadcast_to(operands[4], 4)[:, None, None]
            rows_bar = jnp.where(np.arange(160)[:, None] < count, rows_bar, 0)
        return out, rows_bar, weights_bar

    for got, want in zip(both("cuda"), both("xla"), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        assert np.linalg.norm(got - want) <= 2.0**-7 * np.linalg.norm(want)


def test_command_buffers_see_the_routing_of_the_day(rng, tmp_path):
    """XLA records the program in a CUDA graph and replays it while the experts change."""
    tokens, choices, experts, width = 700, 4, 16, 264
    table = rng.integers(-1, experts + 1, (12, tokens, choices)).astype(np.int32)
    x = rng.standard_normal((tokens, width)).astype(BF16)

    def run(x, table, index):
        chosen = jax.lax.dynamic_index_in_dim(table, index, keepdims=False)
        order = moe.sort_by_expert(chosen, experts, implementation="cuda")
        count = order.group_sizes.sum()
        rows = moe.dispatch(x, order, count=count, implementation="cuda")
        return moe.combine(rows * 2, order, choices, count=count, implementation="cuda")

    options = {"xla_gpu_graph_min_graph_size": 1, "xla_dump_to": str(tmp_path)}
    program = jax.jit(run).lower(x, table, 0).compile(compiler_options=options)
    thunks = [path.read_text() for path in tmp_path.glob("*thunk*")]
    assert any("kCommandBuffer" in text for text in thunks), "XLA recorded nothing"
    inputs = jnp.asarray(x), jnp.asarray(table)
    results = [program(*inputs, jnp.int32(i)) for i in range(len(table))]
    for chosen, result in zip(table, results, strict=True):
        here = ((chosen >= 0) & (chosen < experts)).sum(axis=1, keepdims=True)
        exact = 2 * here * np.asarray(x, np.float64)
        np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=2.0**-8)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_layer_with_and_without_kernels(dtype, rng):
    tokens, embed, hidden, experts, top_k = 300, 264, 136, 16, 4
    shapes = [(tokens, embed), (experts, embed, hidden), (experts, embed, hidden)]
    x, wi_0, wi_1 = (rng.standard_normal(s) / np.sqrt(s[-2]) for s in shapes)
    wo = rng.standard_normal((experts, hidden, embed)) / np.sqrt(hidden)
    logits = jnp.asarray(rng.standard_normal((tokens, experts)), F32)
    operands = [jnp.asarray(a, dtype) for a in (x * np.sqrt(tokens), wi_0, wi_1, wo)]

    @partial(jax.jit, static_argnames="implementation")
    def run(x, wi_0, wi_1, wo, implementation):
        def layer(x, wi_0, wi_1, wo):
            routing = moe.route(logits, top_k)
            options = dict(implementation=implementation, precision="highest")
            return moe.dropless_mlp(x, routing, wi_0, wi_1, wo, **options)

        out, vjp = jax.vjp(layer, x, wi_0, wi_1, wo)
        return out, vjp(out)

    for got, want in zip(
        *(jax.tree.leaves(run(*operands, i)) for i in ("cuda", "xla")), strict=True
    ):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= 8 * ROUNDING[dtype] * np.linalg.norm(want)
