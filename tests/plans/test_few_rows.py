"""The expert MLPs that take the kernel for groups of few rows, and their plans."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from tests.support.plans import how

BF16 = jnp.bfloat16
FEW_ROWS = dict(tile_m=32, tile_n=128, cluster=1)


def shapes(m, embed=128, hidden=256, experts=16, dtype=BF16):
    """Returns x, wi_0, wi_1, wo and group sizes."""
    struct = jax.ShapeDtypeStruct
    return (
        struct((m, embed), dtype),
        struct((experts, embed, hidden), dtype),
        struct((experts, embed, hidden), dtype),
        struct((experts, hidden, embed), dtype),
        struct((experts,), jnp.int32),
    )


def plans(*arrays, **options):
    return jgg.explain(partial(jgg.ragged_mlp, **options), *arrays).plans


def is_for_few_rows(plan):
    return plan.tile is not None and plan.tile.sizes() == FEW_ROWS


@pytest.mark.parametrize("m, few", [(1, True), (16, True), (128, True), (129, False)])
def test_rows_a_group(m, few):
    up, down = plans(*shapes(m))
    assert is_for_few_rows(up) == is_for_few_rows(down) == few
    assert how(up) == "kernel"


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"])
def test_activations(activation):
    up, down = plans(*shapes(16), activation=activation)
    assert is_for_few_rows(up) and is_for_few_rows(down)


@pytest.mark.parametrize("bias_dtype", [BF16, jnp.float32])
def test_biases(bias_dtype):
    x, wi_0, wi_1, wo, sizes = shapes(16)
    biases = tuple(jax.ShapeDtypeStruct(w.shape[::2], bias_dtype) for w in (wi_0, wi_1, wo))

    def run(biases, *arrays):
        return jgg.ragged_mlp(*arrays, biases=biases)

    up, down = jgg.explain(run, biases, x, wi_0, wi_1, wo, sizes).plans
    assert is_for_few_rows(up) and "silu(gate + b0) * (up + b1)" in str(up)
    assert is_for_few_rows(down) and "hidden wo + bo" in str(down)


def test_experts_without_a_gate():
    x, wi_0, _, wo, sizes = shapes(16)
    up, down = jgg.explain(
        lambda *arrays: jgg.ragged_mlp(arrays[0], arrays[1], None, *arrays[2:], activation="relu2"),
        x, wi_0, wo, sizes,
    ).plans  # fmt: skip
    assert is_for_few_rows(up) and is_for_few_rows(down)


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dtype=jnp.float32), "operands of bfloat16, got float32"),
        (dict(dtype=jnp.float16), "operands of bfloat16, got float16"),
        (dict(hidden=260), "not a multiple of 16 bytes"),
        (dict(m=0), "nothing to multiply"),
    ],
)
def test_what_it_does_not_run(change, reason):
    up, *down = plans(*shapes(**(dict(m=16) | change)))
    assert how(up) == "composed" and reason in up.reason
    assert all(not isinstance(plan, jgg.MlpPlan) for plan in down)


@pytest.mark.parametrize(
    "m, hidden, gather",
    [
        (16, 768, "where they are"),
        (256, 768, "by a kernel before"),
        (256, 256, "where they are"),  # one cluster has all columns
    ],
)
def test_how_rows_of_tokens_get_there(m, hidden, gather):
    def run(rows, *arrays):
        return jgg.ragged_mlp(*arrays, rows=rows)

    rows = jax.ShapeDtypeStruct((m,), jnp.int32)
    up, _ = jgg.explain(run, rows, *shapes(7)[:1], *shapes(m, hidden=hidden)[1:]).plans
    assert f"rows of tokens are read {gather}" in str(up)


def test_chosen_tiles():
    with jgg.use_tiles(forward=jgg.TileConfig(tile_m=128, tile_n=256, cluster=2)):
        assert not any(map(is_for_few_rows, plans(*shapes(16))))
    with jgg.use_tiles(forward=jgg.TileConfig(**FEW_ROWS)):
        assert all(map(is_for_few_rows, plans(*shapes(512))))
