"""Poisoned memory and neighbours, and repeated, recorded and concurrent runs."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F32
from tests.support.ops import BOTH_OPS, MAJORS, NONCONTRACTING, OPS, random, swap

M, K, N, G = 776, 264, 520, 8
# An empty group, groups shorter and longer than a tile, and a tail.
SIZES = np.array([130, 0, 1, 255, 64, 63, 200, 7], np.int32)
TAIL = slice(int(SIZES.sum()), M)


def operands(op, rng, dtype=BF16, *, k=K, n=N, g=G):
    return [random(rng, shape, dtype) for shape in op.shapes(M, k, n, g)]


def run(op, lhs, rhs, sizes, cotangent, *, tile, transpose_lhs, transpose_rhs):
    """Returns the result and, with the default tile, both cotangents, all in the default majors."""
    options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, implementation="cuda")
    stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs), sizes
    out = np.asarray(op.call(*stored, tile=tile, **options))
    if tile != DEFAULT_TILE:
        return (out,)
    d_lhs, d_rhs = op.cotangents(*stored, cotangent, **options)
    return out, swap(d_lhs, transpose_lhs), swap(d_rhs, transpose_rhs)


@MAJORS
@BOTH_OPS
class TestPoisonedNeighbours:
    """NaN and Inf of one group, or of the tail, change no bit of the results of other groups."""

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_in_the_tail(self, op, poison, transpose_lhs, transpose_rhs, tile, rng):
        flags = dict(tile=tile, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        lhs, rhs, cotangent = operands(op, rng)
        clean = run(op, lhs, rhs, SIZES, cotangent, **flags)
        for array in (lhs, rhs, cotangent):
            if len(array) == M:
                array[TAIL] = poison
        for a, b in zip(run(op, lhs, rhs, SIZES, cotangent, **flags), clean, strict=True):
            np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_of_one_group(self, op, poison, transpose_lhs, transpose_rhs, tile, rng):
        flags = dict(tile=tile, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        arrays = operands(op, rng)
        clean = run(op, *arrays[:2], SIZES, arrays[2], **flags)
        ends = np.cumsum(SIZES)
        for group in range(G):
            rows = slice(ends[group] - SIZES[group], ends[group])
            lhs, rhs, cotangent = (a.copy() for a in arrays)
            for array in (lhs, rhs, cotangent):
                array[rows if len(array) == M else group] = poison
            for a, b in zip(run(op, lhs, rhs, SIZES, cotangent, **flags), clean, strict=True):
                a, b = a.copy(), b.copy()
                own = rows if len(a) == M else group
                if SIZES[group]:
                    assert not np.isfinite(a[own].astype(np.float32)).any()
                    a[own] = b[own] = 0
                np.testing.assert_array_equal(a, b)


class TestPoisonedResults:
    """The memory of a result holds NaN at first, so an element that a kernel forgets is noticed."""

    @BOTH_OPS
    @MAJORS
    @pytest.mark.parametrize("dtype", [BF16, F32])
    def test_every_element_is_written(self, op, dtype, transpose_lhs, transpose_rhs, tile, rng):
        options = dict(
            tile=tile,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            preferred_element_type=dtype,
            implementation="cuda",
        )

        # The result takes over the memory of an unused, donated argument.
        @partial(jax.jit, donate_argnums=3, keep_unused=True)
        def into(lhs, rhs, sizes, memory):
            return op.call(lhs, rhs, sizes, **options)

        lhs, rhs, out = operands(op, rng)
        stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
        for _ in range(12):
            sizes = sizes_of.any_kind(rng, M, G)
            memory = jnp.full(out.shape, jnp.nan, dtype)
            address = memory.unsafe_buffer_pointer()
            result = into(*stored, sizes, memory)
            assert result.unsafe_buffer_pointer() == address
            oracle.check(result, op.exact(lhs, rhs, sizes))

    @BOTH_OPS
    def test_every_element_of_a_gradient_is_written(self, op, rng):
        @partial(jax.jit, donate_argnums=4, keep_unused=True)
        def into(lhs, rhs, sizes, cotangent, memory):
            return op.cotangents(lhs, rhs, sizes, cotangent, implementation="cuda")

        lhs, rhs, cotangent = operands(op, rng)
        for _ in range(12):
            sizes = sizes_of.any_kind(rng, M, G)
            memory = [jnp.full(a.shape, jnp.nan, BF16) for a in (lhs, rhs)]
            addresses = {a.unsafe_buffer_pointer() for a in memory}
            results = into(lhs, rhs, sizes, cotangent, memory)
            assert {a.unsafe_buffer_pointer() for a in results} == addresses
            oracle.check_all(results, op.exact_cotangents(lhs, rhs, sizes, cotangent))

    def test_temporaries_are_written(self, rng):
        """Between two ops the result lies in XLA's arena, which is full of NaN beforehand."""
        lhs, rhs, _ = operands(NONCONTRACTING, rng, n=K)

        @jax.jit
        def two(lhs, rhs, sizes):
            return NONCONTRACTING.call(
                NONCONTRACTING.call(lhs, rhs, sizes, implementation="cuda"),
                rhs,
                sizes,
                implementation="cuda",
                preferred_element_type=F32,
            )

        for _ in range(12):
            sizes = sizes_of.any_kind(rng, M, G)
            jax.block_until_ready([jnp.full((M, K), jnp.nan, BF16) for _ in range(16)])
            hidden = oracle.ragged_noncontracting(lhs, rhs, sizes).value.astype(BF16)
            want = oracle.ragged_noncontracting(hidden, rhs, sizes).value
            got = np.asarray(two(lhs, rhs, sizes))
            # A hidden value next to a rounding boundary may round the other way.
            assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
            np.testing.assert_array_equal(got[~want.any(axis=1)], 0)


class TestRepeatability:
    @BOTH_OPS
    @MAJORS
    def test_same_inputs_give_the_same_bits(self, op, transpose_lhs, transpose_rhs, tile, rng):
        flags = dict(tile=tile, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        lhs, rhs, cotangent = operands(op, rng)
        for _ in range(3):
            sizes = sizes_of.any_kind(rng, M, G)
            first = run(op, lhs, rhs, sizes, cotangent, **flags)
            for _ in range(20):
                again = run(op, lhs, rhs, sizes, cotangent, **flags)
                for a, b in zip(again, first, strict=True):
                    assert a.tobytes() == b.tobytes()


class TestCommandBuffers:
    """XLA records these programs in CUDA graphs and replays them while sizes and data change."""

    @staticmethod
    def six(lhs, rhs, cotangent, table, index):
        # The sizes lie at one address of XLA's arena and change from replay to replay.
        sizes = jax.lax.dynamic_index_in_dim(table, index, keepdims=False)
        results = []
        for scale in (1.0, 2.0):
            out, vjp = jax.vjp(
                lambda lhs, rhs: NONCONTRACTING.call(lhs, rhs, sizes, implementation="cuda"),
                lhs * jnp.asarray(scale, lhs.dtype),
                rhs,
            )
            results += [out, *vjp(cotangent)]
        return results

    def expected(self, lhs, rhs, cotangent, sizes):
        exact = []
        for scale in (1, 2):
            exact.append(oracle.ragged_noncontracting(scale * lhs, rhs, sizes))
            exact += oracle.noncontracting_cotangents(scale * lhs, rhs, sizes, cotangent)
        return exact

    @pytest.mark.parametrize("options", [{}, {"xla_gpu_graph_min_graph_size": 1}])
    def test_replays_see_the_sizes_of_the_day(self, options, rng, tmp_path):
        arrays = operands(NONCONTRACTING, rng)
        table = np.stack([sizes_of.any_kind(rng, M, G) for _ in range(20)])
        options = {**options, "xla_dump_to": str(tmp_path)}
        program = jax.jit(self.six).lower(*arrays, table, 0).compile(compiler_options=options)
        thunks = [path.read_text() for path in tmp_path.glob("*thunk*")]
        assert any("kCommandBuffer" in text for text in thunks), "XLA recorded nothing"

        inputs = [jnp.asarray(a) for a in (*arrays, table)]
        results = [program(*inputs, jnp.int32(i)) for i in range(len(table))]
        for sizes, result in zip(table, results, strict=True):
            oracle.check_all(result, self.expected(*arrays, sizes))

    def test_replays_with_operands_elsewhere(self, rng):
        program = jax.jit(self.six)
        kept = []
        for _ in range(8):
            arrays = operands(NONCONTRACTING, rng)
            table = sizes_of.any_kind(rng, M, G)[None]
            kept.append([jnp.asarray(a) for a in arrays])
            result = program(*kept[-1], table, 0)
            oracle.check_all(result, self.expected(*arrays, table[0]))

    def test_replays_with_results_elsewhere(self, rng):
        """A graph has the same kernels wherever memory lies. Otherwise XLA could not update it."""
        m = int(SIZES.sum())
        x, wi_0, wi_1, wo, dy = (
            random(rng, shape, BF16)
            for shape in ((m, 264), (G, 264, 136), (G, 264, 136), (G, 136, 264), (m, 264))
        )

        @jax.jit
        def gradients(dy, *operands):
            mlp = partial(jgg.ragged_mlp, activation="silu", implementation="cuda")
            _, vjp = jax.vjp(lambda x, *weights: mlp(x, *weights, SIZES), *operands)
            return vjp(dy)

        first = [np.asarray(x) for x in gradients(dy, x, wi_0, wi_1, wo)]
        kept = []
        for _ in range(200):
            # Allocate and free inputs, results and other arrays between runs.
            inputs = [jnp.asarray(a) for a in (dy, x, wi_0, wi_1, wo)]
            results = gradients(*inputs)
            kept.append((inputs, results, jnp.asarray(np.zeros(rng.integers(1, 1 << 20), np.int8))))
            if len(kept) > 6:
                kept.pop(rng.integers(6))
            for got, expected in zip(results, first, strict=True):
                assert np.asarray(got).tobytes() == expected.tobytes()


class TestConcurrency:
    def test_two_threads(self, rng):
        """Each thread runs one op with its own sizes, and may not see the other thread's sizes."""
        problems = []
        for op in OPS:
            lhs, rhs, _ = operands(op, rng)
            lists = [sizes_of.any_kind(rng, M, G) for _ in range(10)]
            op.call(lhs, rhs, lists[0], implementation="cuda").block_until_ready()
            problems.append((op, jnp.asarray(lhs), jnp.asarray(rhs), lists))
        device, results, start = jax.devices()[0], {}, threading.Barrier(2)

        def work(name):
            op, lhs, rhs, lists = problems[name]
            start.wait()
            with jax.default_device(device):
                results[name] = [
                    op.call(lhs, rhs, sizes, implementation="cuda")
                    for _ in range(10)
                    for sizes in lists
                ]

        threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, (op, lhs, rhs, lists) in enumerate(problems):
            exact = [op.exact(lhs, rhs, sizes) for sizes in lists]
            for i, result in enumerate(results[name]):
                oracle.check(result, exact[i % len(lists)])
