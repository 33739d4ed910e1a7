"""The choice of kernels that sort and move rows, from shapes alone."""

import jax.numpy as jnp
import pytest
from jax.core import ShapedArray

from jax_grouped_gemm._src.rows import plan
from tests.support.plans import how


def array(*shape, dtype=jnp.bfloat16):
    return ShapedArray(shape, dtype)


def integers(*shape):
    return array(*shape, dtype=jnp.int32)


def sort(pairs, experts, batch=(), implementation=None):
    params = dict(num_experts=experts, implementation=implementation)
    return plan.plan_sort([integers(*batch, pairs)], params)


def gather(*, tokens=64, width=32, rows=256, choices=4, batch=(), dtype=jnp.bfloat16, **params):
    avals = [
        array(*batch, tokens, width, dtype=dtype),
        integers(rows),
        integers(tokens, choices),
        array(tokens, 0, dtype=jnp.float32),
        integers(0),
    ]
    return plan.plan_move("gather_rows", avals, dict(divisor=1, implementation=None) | params)


class TestSort:
    @pytest.mark.parametrize("pairs", [1, 1024, 4096])
    def test_few_pairs_take_one_launch(self, pairs):
        assert sort(pairs, 128).grid == 1

    @pytest.mark.parametrize("pairs", [4097, 65536, 2**20])
    @pytest.mark.parametrize("experts", [1, 128, 4096, 16384])
    def test_blocks_do_not_read_too_many_counts(self, pairs, experts):
        blocks = sort(pairs, experts).grid
        assert 1 < blocks <= plan.MOST_BLOCKS
        assert blocks <= 8 or blocks * (experts + 1) <= plan.COUNTS_OF_ALL_BLOCKS

    def test_results(self):
        shapes = [result.shape for result in sort(100, 7, batch=(3,)).problem.results]
        assert shapes == [(3, 100), (3, 100), (3, 7)]

    def test_paths(self):
        assert how(sort(100, 7)) == "kernel"
        assert how(sort(0, 7)) == "nothing"
        assert "1 to 16384 experts, got 20000" in sort(100, 20000).reason
        assert "1 to 16384 experts, got 0" in sort(100, 0).reason
        assert "65536" in sort(100, 7, batch=(65536,)).reason
        assert how(sort(100, 7, implementation="xla")) == "xla"


class TestMoves:
    def test_a_known_inverse_is_used(self):
        assert gather().kernel.name == "by_token"
        assert gather(choices=0).kernel.name == "by_row"

    def test_paths(self):
        assert how(gather()) == "kernel" and not gather().reason
        assert how(gather(dtype=jnp.float64)) == "xla"
        assert "got int8" in gather(dtype=jnp.int8).reason
        assert "65536" in gather(batch=(65536,)).reason
        assert how(gather(implementation="xla")) == "xla"
        for nothing in (dict(tokens=0), dict(width=0), dict(rows=0), dict(batch=(0,))):
            assert how(gather(**nothing)) == "nothing"

    def test_the_batch_may_be_of_any_operand(self):
        avals = [array(64, 32), integers(5, 256), integers(64, 0)]
        avals += [array(64, 0, dtype=jnp.float32), integers(0)]
        result = plan.plan_move("gather_rows", avals, dict(divisor=1, implementation=None))
        assert result.problem.results[0].shape == (5, 256, 32)
