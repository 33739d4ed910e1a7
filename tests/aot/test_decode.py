"""XLA's program for a layer of few tokens on an H200: the number of kernels, and what they read."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import aot

BF16, F32 = jnp.bfloat16, jnp.float32
MOST_KERNELS = 6

# D, F, E, k.
QWEN3 = 2048, 768, 128, 8
DSV3 = 7168, 2048, 32, 8
GPT_OSS = 2880, 2880, 32, 4


@pytest.fixture(scope="module")
def h200(extension) -> aot.Target:
    return aot.Target(aot.H200)


def layer(x, wi_0, wi_1, wo, logits, experts, weights, *biases, **options):
    """Computes a layer for tokens whose routing is given."""
    routing = moe.Routing(logits, experts, weights)
    return moe.dropless_mlp(x, routing, wi_0, wi_1, wo, biases=biases or None, **options)


def operands(tokens, embed, hidden, experts, top_k, *, biased=False):
    struct = jax.ShapeDtypeStruct
    biases = [(experts, hidden), (experts, hidden), (experts, embed)] if biased else []
    return [
        struct((tokens, embed), BF16),
        *[struct((experts, embed, hidden), BF16)] * 2,
        struct((experts, hidden, embed), BF16),
        struct((tokens, experts), F32),
        struct((tokens, top_k), jnp.int32),
        struct((tokens, top_k), F32),
        *[struct(shape, BF16) for shape in biases],
    ]


def kernels_of(program: aot.Program) -> list[str]:
    """The instructions that run something on the GPU."""
    free = aot.FREE - {"custom-call"}
    return [i.text for i in program.entry if i.opcode not in free]


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 128, 256])
@pytest.mark.parametrize("shape", [QWEN3, DSV3, GPT_OSS], ids=["qwen3", "dsv3", "gptoss"])
def test_a_layer_is_at_most_six_kernels(shape, tokens, h200):
    kernels = kernels_of(h200.compile(layer, *operands(tokens, *shape)))
    assert len(kernels) <= MOST_KERNELS, kernels


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_so_is_one_with_biases_and_clipped_activations(tokens, h200):
    run = partial(layer, activation="swiglu_oai")
    program = h200.compile(run, *operands(tokens, *GPT_OSS, biased=True))
    assert program.kernels == dict(sort_by_expert=1, few_rows_dot=2, combine_rows=1)
    assert len(kernels_of(program)) <= MOST_KERNELS


@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2"])
def test_and_those_with_other_activations(activation, h200):
    program = h200.compile(partial(layer, activation=activation), *operands(8, *QWEN3))
    assert program.kernels == dict(sort_by_expert=1, few_rows_dot=2, combine_rows=1)


def test_tokens_are_read_where_they_are(h200):
    """No kernel copies rows to their experts, and products read stored weights directly."""
    program = h200.compile(layer, *operands(16, *QWEN3))
    assert "dispatch_rows" not in program.kernels and "gather_rows" not in program.kernels
    computed = [text for text in program.computed_operands() if "bf16[" in text]
    assert not computed


def test_sorted_rows_are_two_kernels(h200):
    """The layer takes and returns sorted rows, as in expert parallelism."""
    struct = jax.ShapeDtypeStruct
    sizes, x = struct((128,), jnp.int32), struct((64, 2048), BF16)
    matrices = operands(1, *QWEN3)[1:4]
    program = h200.compile(jgg.ragged_mlp, x, *matrices, sizes)
    assert program.kernels == dict(few_rows_dot=2)
    assert program.opcodes <= aot.FREE


def test_a_backward_pass_of_few_rows(h200):
    """It takes what the forward kernel keeps, which is what other kernels keep."""

    def both(x, *rest):
        y, vjp = jax.vjp(lambda *floats: layer(*floats, *rest[3:]), x, *rest[:3])
        return y, vjp(jnp.sin(y))

    kernels = h200.compile(both, *operands(16, *QWEN3)).kernels
    assert kernels["few_rows_dot"] == 2 and kernels["gated_ragged_dot"] == 0
    assert kernels["gated_ragged_dot_transpose"] == 1 and kernels["ragged_contracting"] == 1
    assert kernels["paired_weight_gradients"] == 1
