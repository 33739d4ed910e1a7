"""The forward kernels with biases and any activation, and layers of few tokens.

Kernels for groups of few rows and of many rows are compared with float64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.mlp.kernels import FEW_ROWS_TILE
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from tests.support import group_sizes as sizes_of
from tests.support import mlp, oracle
from tests.support.few_rows_on_gpu import check_random, gated
from tests.support.mlp_on_gpu import indices, matrices, unit
from tests.support.ops import random

BF16 = jnp.bfloat16


TILES = pytest.mark.parametrize("tile", [FEW_ROWS_TILE, DEFAULT_TILE], ids=["few", "many"])


@TILES
def test_few_rows_of_many_groups(tile, rng):
    for _ in range(12):
        groups, m = int(rng.integers(1, 150)), int(rng.integers(1, 200))
        sizes = sizes_of.any_kind(rng, m, groups)
        check_random(rng, tile, sizes, m, embed=264, hidden=392)


@TILES
def test_groups_of_any_size(tile, rng):
    for _ in range(25):
        sizes = sizes_of.any_kind(rng, 300, 8)
        embed, hidden = 8 * int(rng.integers(1, 40)), rng.choice([8 * rng.integers(1, 40), 192])
        check_random(rng, tile, sizes, 300, embed=embed, hidden=int(hidden))


@pytest.mark.parametrize("offset", [-2, 0, 3, 7])
@TILES
def test_windows(offset, tile, rng):
    for _ in range(5):
        sizes = sizes_of.any_kind(rng, 60, 8)
        check_random(rng, tile, sizes, 60, embed=72, hidden=200, groups=3, offset=offset)


@TILES
def test_more_groups_than_sizes_are_read_at_once(tile, rng):
    for groups in (512, 513, 1200):
        sizes = sizes_of.multinomial(rng, 200, groups)
        check_random(rng, tile, sizes, 200, embed=40, hidden=72)


@TILES
def test_experts_without_an_up_projection(tile, rng):
    for activation in mlp.ACTIVATIONS:
        sizes = sizes_of.any_kind(rng, 50, 6)
        x = random(rng, (50, 136), BF16)
        wi_0 = matrices(rng, (6, 136, 264), BF16, 2.0)
        operands = dict(x=x, wi_0=wi_0) | indices(sizes)
        (got,) = gated(operands, tile=tile, activation=activation, residuals=False)
        gate = oracle.ragged_noncontracting(x, wi_0, sizes, 0).value
        if activation in mlp.CLIPPED:
            shift = mlp.CLIPPED[activation][2]
            value = mlp.activated(activation, gate, np.zeros_like(gate))[0]
            assert shift in (0.0, 1.0)  # added to up, but this layer has no up
        else:
            value = mlp.activated(activation, gate, gate)[0]
        error = np.linalg.norm(np.asarray(got, np.float64) - value)
        assert error <= 4 * unit(BF16) * np.linalg.norm(value) + 1e-6


@pytest.mark.parametrize("tokens", [1, 7, 16, 100])
@pytest.mark.parametrize("biased", [True, False], ids=["biases", "plain"])
def test_layers_of_few_tokens(tokens, biased, rng):
    """Compares layers with pure JAX, while the routing changes from run to run."""
    experts, top_k = 64, 4
    case = mlp.case(rng, tokens=tokens, embed=136, hidden=200, experts=experts, dtype=BF16)
    shapes = (experts, 200), (experts, 200), (experts, 136)
    biases = tuple(random(rng, shape, BF16) for shape in shapes) if biased else None

    @partial(jax.jit, static_argnums=0)
    def run(implementation, logits):
        routing = moe.route(logits, top_k)
        return moe.dropless_mlp(
            case.x, routing, case.wi_0, case.wi_1, case.wo, biases=biases,
            activation="swiglu_oai", implementation=implementation,
        )  # fmt: skip

    for _ in range(6):
        logits = rng.standard_normal((tokens, experts), np.float32) * rng.uniform(0, 5)
        got, want = (np.asarray(run(i, logits), np.float64) for i in ("cuda", "xla"))
        assert np.linalg.norm(got - want) <= 4 * unit(BF16) * np.linalg.norm(want)


def test_same_inputs_give_the_same_bits(rng):
    case = mlp.case(rng, tokens=32, top_k=8, embed=512, hidden=776, experts=64, dtype=BF16)
    run = jax.jit(partial(case.run, jgg.ragged_mlp, implementation="cuda"))
    assert len({np.asarray(run(*case.factors)).tobytes() for _ in range(20)}) == 1


@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
@pytest.mark.parametrize("form", ["two", "both", "alone"])
def test_layers_with_biases(activation, form, rng):
    """Compares values and all gradients of the kernels with those of pure JAX."""
    if form == "alone" and activation in mlp.CLIPPED:
        pytest.skip("clipped activations need an up projection")
    case = mlp.case(rng, tokens=300, top_k=3, embed=136, hidden=192, experts=7, dtype=BF16)
    biases = [random(rng, (7, n), BF16) for n in (192, 192, 136)]
    matrices = [case.wi_0, case.wi_1, case.wo]
    if form == "both":
        matrices[:2] = [np.concatenate(matrices[:2], axis=2), None]
    if form == "alone":
        matrices[1] = biases[1] = None
    cotangent = random(rng, (900, 136), BF16)

    @partial(jax.jit, static_argnums=0)
    def run(implementation, *factors):
        def layer(x, matrices, weights, biases):
            return case.run(
                jgg.ragged_mlp, x, *matrices, weights, biases=tuple(biases),
                activation=activation, implementation=implementation,
            )  # fmt: skip

        y, vjp = jax.vjp(layer, *factors)
        return y, vjp(cotangent)

    factors = case.x, matrices, case.weights, biases
    got, want = (run(i, *factors) for i in ("cuda", "xla"))
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        one, other = (np.asarray(a).astype(np.float64) for a in (one, other))
        assert np.linalg.norm(one - other) <= 8 * unit(BF16) * np.linalg.norm(other)
