"""XLA's program for a layer of few tokens on an H200: the number of kernels, and what they read."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import aot

BF16, F32 = jnp.bfloat16, jnp.float32
MOST_KERNELS = 6
MOST_PAIRS = 128
"""The most pairs of a token and an expert that kernels sort themselves."""
DECODED, SORTED = dict(decode_mlp=1), dict(sort_by_expert=1, few_rows_dot=2, combine_rows=1)

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
    """Returns the instructions that run something on the GPU."""
    free = aot.FREE - {"custom-call"}
    return [i.text for i in program.entry if i.opcode not in free]


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 128, 256])
@pytest.mark.parametrize("shape", [QWEN3, DSV3, GPT_OSS], ids=["qwen3", "dsv3", "gptoss"])
def test_a_layer_is_at_most_six_kernels(shape, tokens, h200):
    program = h200.compile(layer, *operands(tokens, *shape))
    kernels = kernels_of(program)
    assert len(kernels) <= MOST_KERNELS, kernels
    assert (program.kernels == DECODED) == (tokens * shape[-1] <= MOST_PAIRS)


@pytest.mark.parametrize("tokens, top_k, few", [(128, 1, True), (129, 1, False), (43, 3, False)])
def test_few_pairs_are_one_custom_call(tokens, top_k, few, h200):
    """For few pairs, XLA launches no kernel to sort pairs or to gather the weights of rows."""
    program = h200.compile(layer, *operands(tokens, 2048, 768, 128, top_k))
    assert program.kernels == (DECODED if few else SORTED)
    assert (len(kernels_of(program)) == 1) == few
    assert (program.opcodes <= aot.FREE) == few


@pytest.mark.parametrize("tokens, kernels", [(1, DECODED), (32, DECODED), (64, SORTED)])
def test_so_is_one_with_biases_and_clipped_activations(tokens, kernels, h200):
    run = partial(layer, activation="swiglu_oai")
    program = h200.compile(run, *operands(tokens, *GPT_OSS, biased=True))
    assert program.kernels == kernels
    assert len(kernels_of(program)) <= MOST_KERNELS


@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2"])
def test_and_those_with_other_activations(activation, h200):
    for tokens, kernels in (16, DECODED), (17, SORTED):
        program = h200.compile(partial(layer, activation=activation), *operands(tokens, *QWEN3))
        assert program.kernels == kernels


def test_layers_that_no_kernel_sorts(h200):
    clipped = dict(activation="swiglu_oai", batch_invariant=True)
    for options, given in (
        (dict(apply_router_weight_on_input=True), operands(16, *QWEN3)),
        (clipped, operands(16, *GPT_OSS, biased=True)),
    ):
        kernels = h200.compile(partial(layer, **options), *given).kernels
        assert kernels["sort_by_expert"] == 1 and kernels["decode_mlp"] == 0, options


def test_batch_invariant_layers_are_one_custom_call(h200):
    program = h200.compile(partial(layer, batch_invariant=True), *operands(16, *QWEN3))
    assert program.kernels == DECODED and program.opcodes <= aot.FREE


def test_columns_of_a_device_that_no_kernel_takes(extension):
    """No kernel takes a device's 12 of 48 hidden columns: 24 bytes are no multiple of 16."""
    columns, whole = P(None, None, "x"), P()
    program = aot.Target(aot.H200, devices=4).compile(
        partial(layer, token_axes=()),
        *operands(16, 256, 4 * 12, 32, 2),
        specs=[whole, columns, columns, P(None, "x"), whole, whole, whole],
    )
    assert program.kernels["sort_by_expert"] == 1 and program.kernels["decode_mlp"] == 0


@pytest.mark.parametrize("tokens", [16, 17])
def test_tokens_are_read_where_they_are(tokens, h200):
    """No kernel copies rows to their experts, and products read stored weights directly."""
    program = h200.compile(layer, *operands(tokens, *QWEN3))
    assert "dispatch_rows" not in program.kernels and "gather_rows" not in program.kernels
    computed = [text for text in program.computed_operands() if "bf16[" in text]
    assert not computed


def test_sorted_rows_are_two_kernels(h200):
    """Two kernels compute an MLP of rows that are sorted before, as in expert parallelism."""
    struct = jax.ShapeDtypeStruct
    sizes, x = struct((128,), jnp.int32), struct((64, 2048), BF16)
    matrices = operands(1, *QWEN3)[1:4]
    program = h200.compile(jgg.ragged_mlp, x, *matrices, sizes)
    assert program.kernels == dict(few_rows_dot=2)
    assert program.opcodes <= aot.FREE


def test_a_backward_pass_of_few_rows(h200):
    """A layer of few tokens sorts rows before its kernels if it has a backward pass.

    The backward kernels read the sorted rows, as for more tokens.
    """

    def both(x, *rest):
        y, vjp = jax.vjp(lambda *floats: layer(*floats, *rest[3:]), x, *rest[:3])
        return y, vjp(jnp.sin(y))

    kernels = h200.compile(both, *operands(16, *QWEN3)).kernels
    assert kernels["sort_by_expert"] == 1 and kernels["decode_mlp"] == 0
    assert kernels["few_rows_dot"] == 2 and kernels["gated_ragged_dot"] == 0
    assert kernels["gated_ragged_dot_transpose"] == 1 and kernels["ragged_contracting"] == 1
    assert kernels["paired_weight_gradients"] == 1
