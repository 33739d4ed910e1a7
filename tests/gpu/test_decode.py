"""Layers of few tokens, whose kernels sort the tokens.

Results have the bits of kernels on sorted rows, which other tests compare with float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.mlp.decode import primitive as decode
from jax_grouped_gemm._src.mlp.decode.plan import MOST_PAIRS
from jax_grouped_gemm._src.mlp.operands import DecodeOperands, ExpertWeights
from jax_grouped_gemm._src.mlp.primitive import Options

BF16 = jnp.bfloat16
FORMATS = ("bfloat16", "mxfp4", "int4", "int8", "fp8", "fp8_128x128")


def random_layer(
    rng, format, *, experts, local, tokens, top_k, embed, hidden, has_up, biased, zero_points=False
):
    def matrices(*shape):
        x = jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[1]), jnp.float32)
        if format == "bfloat16":
            return x.astype(BF16)
        return jgg.quantize(x, format, zero_points=zero_points)

    def bias(columns):
        dtype = jnp.float32 if rng.random() < 0.5 else BF16
        return jnp.asarray(rng.standard_normal((local, columns)), dtype) if biased else None

    # Some experts of a token are repeated, belong to another device, or are no experts at all.
    chosen = rng.integers(-1, experts + 1, (tokens, top_k))
    weights = ExpertWeights(
        wi_0=matrices(local, embed, hidden),
        wi_1=matrices(local, embed, hidden) if has_up else None,
        wo=matrices(local, hidden, embed),
        b0=bias(hidden),
        b1=bias(hidden) if has_up else None,
        bo=bias(embed),
    )
    return DecodeOperands(
        jnp.asarray(rng.standard_normal((tokens, embed)), BF16),
        jnp.asarray(chosen, jnp.int32),
        jnp.asarray(rng.random((tokens, top_k)), jnp.float32),
        weights,
        jnp.asarray([rng.integers(-1, experts - local + 2)], jnp.int32),
    )


def check(given, experts, activation="silu"):
    options = Options.of(as_activation(activation), None, "cuda")
    assert decode.is_taken(given, experts, options)
    got = jax.jit(lambda given: decode.mlp(given, experts, options))(given)
    want = jax.jit(lambda given: decode.sorted_mlp("layer", given, experts, options))(given)
    assert np.isfinite(np.asarray(want, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))
    return np.asarray(got, np.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_random_layers(format, rng):
    for _ in range(25):
        top_k = int(rng.integers(1, 11))
        tokens = int(rng.integers(1, MOST_PAIRS // top_k + 1))
        experts = int(rng.integers(-(-tokens * top_k // 4), 513))
        columns = 8 if format == "bfloat16" else 1
        given = random_layer(
            rng,
            format,
            experts=experts,
            local=int(rng.integers(1, min(experts, 6) + 1)),
            tokens=tokens,
            top_k=top_k,
            embed=columns * int(rng.integers(1, 50)),
            hidden=columns * int(rng.integers(1, 50)),
            has_up=rng.random() < 0.7,
            biased=rng.random() < 0.5,
            zero_points=format == "int4" and rng.random() < 0.5,
        )
        check(given, experts, str(rng.choice(["silu", "swiglu_oai", "relu2"])))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_layers_of_models(format, tokens, rng):
    """Layers have many tiles and steps, and kernels of repeated runs overlap."""
    sizes = dict(experts=32, local=32, tokens=tokens, top_k=8, embed=2880, hidden=768)
    given = random_layer(rng, format, **sizes, has_up=True, biased=True)
    given = DecodeOperands(
        given.x,
        jnp.asarray([rng.permutation(32)[:8] for _ in range(tokens)], jnp.int32),
        given.scores,
        given.experts,
        jnp.zeros(1, jnp.int32),
    )
    if format != "bfloat16" and tokens > 4:
        pytest.skip("more rows than the kernel that streams takes")
    first = check(given, 32)
    for _ in range(20):
        np.testing.assert_array_equal(check(given, 32), first)


@pytest.mark.parametrize("format", FORMATS)
def test_layers_in_a_command_buffer(format, rng, tmp_path):
    """XLA records layers in a CUDA graph and updates it while inputs and addresses change."""
    sizes = dict(experts=16, local=16, top_k=4, embed=256, hidden=128, has_up=True, biased=False)
    sizes["zero_points"] = format == "int4"
    given = [random_layer(rng, format, tokens=2, **sizes) for _ in range(8)]
    options = Options.of(as_activation("silu"), None, "cuda")

    def layers(layer, given):
        for _ in range(3):
            y = layer(given, 16, options)
            given = DecodeOperands(y, given.chosen, given.scores, given.experts, given.offset)
        return y

    compiler_options = {"xla_gpu_graph_min_graph_size": 1, "xla_dump_to": str(tmp_path)}
    lowered = jax.jit(lambda given: layers(decode.mlp, given)).lower(given[0])
    program = lowered.compile(compiler_options=compiler_options)
    thunks = [path.read_text() for path in tmp_path.glob("*thunk*")]
    assert any("kCommandBuffer" in text for text in thunks), "XLA recorded nothing"
    of_sorted = jax.jit(lambda given: layers(lambda *a: decode.sorted_mlp("layer", *a), given))
    kept = [program(of) for of in given * 2]
    for of, got in zip(given * 2, kept, strict=True):
        want = np.asarray(of_sorted(of)).view(np.uint16)
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want)
