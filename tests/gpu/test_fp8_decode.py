"""FP8 layers of few tokens, whose kernels sort and quantise the tokens.

Results have the bits of kernels on sorted rows, which other tests compare with float64.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.mlp.decode.plan import MOST_EXPERTS, MOST_PAIRS
from jax_grouped_gemm._src.mlp.fp8.decode import primitive
from jax_grouped_gemm._src.mlp.fp8.decode.operands import Fp8DecodeOperands
from jax_grouped_gemm._src.mlp.fp8.decode.plan import MOST_ROWS
from jax_grouped_gemm._src.mlp.operands import DecodeOperands
from tests.support.fp8_decode import check_bits, random_layer, static_layer


def test_random_layers(rng):
    for _ in range(40):
        top_k = int(rng.integers(1, 11))
        tokens = int(rng.integers(1, MOST_PAIRS // top_k + 1))
        least = math.ceil(tokens * top_k / MOST_ROWS)
        experts = int(rng.integers(least, MOST_EXPERTS + 1))
        y = check_bits(
            rng,
            str(rng.choice(["silu", "swiglu_oai", "gelu_tanh"])),
            experts=experts,
            local=int(rng.integers(1, min(experts, 6) + 1)),
            tokens=tokens,
            top_k=top_k,
            embed=16 * int(rng.integers(1, 50)),
            hidden=16 * int(rng.integers(1, 50)),
            power_of_two=rng.random() < 0.5,
        )
        assert y.shape[0] == tokens


@pytest.mark.parametrize(
    "experts, top_k, embed, hidden, most",
    [(128, 8, 2048, 768, 16), (32, 8, 7168, 512, 6), (32, 4, 2880, 2880, 12)],
    ids=["qwen3", "dsv3", "gptoss"],
)
@pytest.mark.parametrize("tokens", [1, 3, None])
def test_layers_of_models(tokens, experts, top_k, embed, hidden, most, rng):
    """Layers have many tiles and steps, and kernels of repeated runs overlap."""
    sizes = dict(tokens=tokens or most, top_k=top_k, embed=embed, hidden=hidden)
    y = check_bits(rng, experts=experts, local=experts, repeats=20, **sizes)
    assert y.any()


def test_many_rows_of_one_expert(rng):
    """All pairs have the same expert, so one group has several tiles of rows."""
    experts = 128
    sizes = dict(experts=experts, local=8, tokens=128, top_k=1, embed=256, hidden=256)
    operands, recipe = random_layer(rng, **sizes)
    static = static_layer(operands.given, recipe, experts)
    for expert in (0, 7):
        given = DecodeOperands(
            operands.given.x,
            jnp.full((128, 1), expert, jnp.int32),
            operands.given.scores,
            operands.given.experts,
            jnp.zeros(1, jnp.int32),
        )
        of = Fp8DecodeOperands(given, operands.quantized)
        assert primitive.is_taken(of, experts, static)
        got, want = (
            np.asarray(jax.jit(lambda of, run=run: run(of, experts, static))(of)).view(np.uint16)
            for run in (primitive.mlp, primitive.sorted_mlp)
        )
        np.testing.assert_array_equal(got, want)
        assert want.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_token(value, rng):
    sizes = dict(experts=16, local=16, tokens=4, top_k=2, embed=256, hidden=128)
    operands, recipe = random_layer(rng, **sizes)
    x = operands.given.x.at[1, 7].set(value)
    given = operands.given
    given = DecodeOperands(x, given.chosen % 16, given.scores, given.experts, given.offset * 0)
    of, static = Fp8DecodeOperands(given, operands.quantized), static_layer(given, recipe, 16)
    got, want = (
        np.asarray(jax.jit(lambda of, run=run: run(of, 16, static))(of), np.float32)
        for run in (primitive.mlp, primitive.sorted_mlp)
    )
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(np.delete(got, 1, axis=0)).all() and not np.isfinite(got[1]).any()


def test_layers_in_a_command_buffer(rng, tmp_path):
    """XLA records layers in a CUDA graph and updates it while inputs and addresses change."""
    sizes = dict(experts=16, local=16, tokens=2, top_k=4, embed=256, hidden=128)
    every = [random_layer(rng, **sizes) for _ in range(8)]
    static = static_layer(every[0][0].given, every[0][1], 16)

    def layers(layer, operands):
        for _ in range(3):
            y = layer(operands, 16, static)
            given = operands.given
            given = DecodeOperands(y, given.chosen, given.scores, given.experts, given.offset)
            operands = Fp8DecodeOperands(given, operands.quantized)
        return y

    given = [operands for operands, _ in every]
    compiler_options = {"xla_gpu_graph_min_graph_size": 1, "xla_dump_to": str(tmp_path)}
    lowered = jax.jit(lambda operands: layers(primitive.mlp, operands)).lower(given[0])
    program = lowered.compile(compiler_options=compiler_options)
    thunks = [path.read_text() for path in tmp_path.glob("*thunk*")]
    assert any("kCommandBuffer" in text for text in thunks), "XLA recorded nothing"
    of_sorted = jax.jit(lambda operands: layers(primitive.sorted_mlp, operands))
    kept = [program(of) for of in given * 2]
    for of, got in zip(given * 2, kept, strict=True):
        want = np.asarray(of_sorted(of)).view(np.uint16)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want)
