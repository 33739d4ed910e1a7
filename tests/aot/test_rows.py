"""XLA's program for sorting and moving rows on an H200: custom calls and nothing else."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import moe
from tests.support.aot import FREE, Target

TARGET_CONFIG = Path(__file__).parents[1] / "data" / "h200_target_config.txtpb"
T, D, E, K = 64, 256, 16, 4
M = T * K
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])


@pytest.fixture(scope="module")
def h200(extension) -> Target:
    return Target(TARGET_CONFIG.read_text())


def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape):
    return array(shape, jnp.int32)


def check(program, **kernels):
    """Asserts that the program calls these kernels and runs nothing else on the GPU."""
    assert program.kernels == kernels
    assert program.opcodes <= FREE


class TestSort:
    @pytest.mark.parametrize("tokens", [1, T, 8192])
    def test_is_one_call(self, tokens, h200):
        program = h200.compile(lambda e: moe.sort_by_expert(e, E), integers(tokens, K))
        check(program, sort_by_expert=1)

    def test_vmap_is_one_call(self, h200):
        run = jax.vmap(lambda e: moe.sort_by_expert(e, E))
        check(h200.compile(run, integers(3, T, K)), sort_by_expert=1)

    def test_more_experts_than_a_block_has_counters_for(self, h200):
        program = h200.compile(lambda e: moe.sort_by_expert(e, 20000), integers(T, K))
        assert not program.kernels


class TestMoves:
    @DTYPES
    @pytest.mark.parametrize("width", [D, 13])
    def test_gather_is_one_call(self, width, dtype, h200):
        x = array((T, width), dtype)
        check(h200.compile(moe.gather_rows, x, integers(M)), gather_rows=1)
        check(h200.compile(moe.gather_rows, x, integers(M), integers()), gather_rows=1)

    @DTYPES
    def test_gather_with_an_inverse_reads_tokens_once(self, dtype, h200):
        def with_gradient(x, rows, inverse, ct):
            out, vjp = jax.vjp(lambda x: moe.gather_rows(x, rows, inverse=inverse), x)
            return out, vjp(ct)

        operands = array((T, D), dtype), integers(M), integers(T, K), array((M, D), dtype)
        check(h200.compile(with_gradient, *operands), dispatch_rows=1, combine_rows=1)

    @DTYPES
    @pytest.mark.parametrize("width", [D, 13])
    def test_combine_and_its_gradients_are_one_call_each(self, width, dtype, h200):
        def with_gradients(rows, inverse, order, weights, count, ct):
            def run(rows, weights):
                return moe.combine(rows, inverse, weights=weights, order=order, count=count)

            out, vjp = jax.vjp(run, rows, weights)
            return out, vjp(ct)

        rows, ct = array((M, width), dtype), array((T, width), dtype)
        weights = array((T, K), jnp.float32)
        program = h200.compile(
            with_gradients, rows, integers(T, K), integers(M), weights, integers(), ct
        )
        check(program, combine_rows=1, dispatch_rows=1, row_dots=1)

    def test_second_derivatives_run_kernels_only(self, h200):
        def run(rows, inverse, order, weights, ct):
            def bilinear(rows, weights):
                return moe.combine(rows, inverse, weights=weights, order=order)

            def gradient(rows, weights):
                return jax.vjp(bilinear, rows, weights)[1](ct)

            return jax.jvp(gradient, (rows, weights), (rows, weights))

        operands = array((M, D), jnp.float32), integers(T, K), integers(M)
        program = h200.compile(
            run, *operands, array((T, K), jnp.float32), array((T, D), jnp.float32)
        )
        assert set(program.kernels) <= {"dispatch_rows", "row_dots", "combine_rows"}
        # XLA copies a result that is returned twice.
        assert program.opcodes <= FREE | {"copy"}

    @pytest.mark.parametrize("axes", [(0, 0, None), (None, 0, 0), (0, None, None)])
    def test_vmap_is_one_call(self, axes, h200):
        operands = [
            array(x.shape if axis is None else (3, *x.shape), x.dtype)
            for x, axis in zip((array((T, D)), integers(M), integers()), axes, strict=True)
        ]
        check(h200.compile(jax.vmap(moe.gather_rows, axes), *operands), gather_rows=1)

    def test_nothing_to_move_is_no_call(self, h200):
        for x, rows in (((0, D), M), ((T, 0), M), ((T, D), 0)):
            assert not h200.compile(moe.gather_rows, array(x), integers(rows)).kernels

    def test_other_dtypes_are_left_to_xla(self, h200):
        program = h200.compile(moe.gather_rows, array((T, D), jnp.int8), integers(M))
        assert not program.kernels


class TestLayer:
    def operands(self, hidden):
        weights = [array((E, D, hidden)), array((E, D, hidden)), array((E, hidden, D))]
        return array((T, D)), array((T, E), jnp.float32), *weights

    def layer(self, x, logits, *weights, **options):
        return moe.dropless_mlp(x, moe.route(logits, K), *weights, **options)

    # Narrow experts read tokens and cotangents in place. Wider ones copy them for gradients. The
    # widest also copy tokens forward, and once more where these copies are not kept.
    @pytest.mark.parametrize("hidden, copies", [(128, {0}), (264, {0}), (776, {2}), (2888, {2, 3})])
    def test_moves_rows_by_kernels_in_both_directions(self, hidden, copies, h200):
        def gradients(*operands):
            def loss(*operands):
                return (self.layer(*operands).astype(jnp.float32) ** 2).sum()

            return jax.grad(loss, range(5))(*operands)

        program = h200.compile(gradients, *self.operands(hidden))
        assert program.kernels["sort_by_expert"] == 1
        assert program.kernels["combine_rows"] == 2
        assert program.kernels["dispatch_rows"] in copies
        # XLA itself gathers no rows, and does not copy each token K times.
        assert f"bf16[{M},{D}]{{1,0}} gather" not in program.hlo
        assert f"bf16[{T},{K},{D}]" not in program.hlo

    def test_holds_one_copy_of_the_rows_at_a_time(self, h200):
        """Experts are so narrow that rows of D take most of the memory of the forward pass."""
        # With this activation, kernels do not read tokens in place.
        layer = functools.partial(self.layer, activation="relu")
        rows_bytes = M * D * np.dtype(jnp.bfloat16).itemsize
        program = h200.compile(layer, *self.operands(8))
        assert program.kernels["dispatch_rows"] == 1
        assert program.temporary_bytes < 1.5 * rows_bytes
