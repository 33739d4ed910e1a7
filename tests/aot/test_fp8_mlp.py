"""XLA's program for an MLP with a recipe on an H200."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import checkpoint_policies, moe
from jax_grouped_gemm._src.fp8.scaled.plan import FP8_TILES_IN_PLACE
from tests.support import mlp
from tests.support.aot import FREE
from tests.support.dtypes import BF16, E5M2, F32

array = jax.ShapeDtypeStruct

T, D, F, E, K = 512, 256, 384, 8, 4
X, LOGITS = array((T, D), BF16), array((T, E), F32)
MATRICES = array((E, D, F), BF16), array((E, D, F), BF16), array((E, F, D), BF16)
BF16_WGRAD = jgg.Recipe.blockwise(wgrad="bf16")


def layer(x, logits, *matrices, recipe=BF16_WGRAD, **options):
    return moe.dropless_mlp(x, moe.route(logits, K), *matrices, recipe=recipe, **options)


def gradients(x, logits, *matrices, remat=lambda f: f, **options):
    def loss(x, *matrices):
        return jnp.sum(jnp.sin(layer(x, logits, *matrices, **options).astype(F32)))

    return jax.grad(remat(loss), range(4))(x, *matrices)


def quantized_avals(recipe=BF16_WGRAD):
    return jax.eval_shape(partial(jgg.quantize_mlp, recipe=recipe), *MATRICES)


def compiled(h200, function, quantized=None, **options):
    """Compiles `function`, for weights that are quantised before if `quantized` is given."""
    if quantized is None:
        return h200.compile(partial(function, **options), X, LOGITS, *MATRICES)
    leaves, tree = jax.tree.flatten(quantized)

    def run(x, logits, *rest):
        matrices, leaves = rest[:3], rest[3:]
        return function(x, logits, *matrices, quantized=tree.unflatten(leaves), **options)

    return h200.compile(run, X, LOGITS, *MATRICES, *leaves)


def compiled_with_routing(h200, tokens, embed, hidden, experts, top_k, *, with_gradients=False):
    """Compiles a layer whose tokens are routed and whose weights are quantised before."""
    up, down = array((experts, embed, hidden), BF16), array((experts, hidden, embed), BF16)
    leaves, tree = jax.tree.flatten(jax.eval_shape(jgg.quantize_mlp, up, up, down))

    def run(x, experts, logits, weights, wi_0, wi_1, wo, dy, *leaves):
        def of(x, weights, wi_0, wi_1, wo):
            options = dict(recipe=jgg.Recipe(), quantized=tree.unflatten(leaves))
            routing = moe.Routing(logits, experts, weights)
            return moe.dropless_mlp(x, routing, wi_0, wi_1, wo, **options)

        if not with_gradients:
            return of(x, weights, wi_0, wi_1, wo)
        y, vjp = jax.vjp(of, x, weights, wi_0, wi_1, wo)
        return y, vjp(dy)

    x, logits = array((tokens, embed), BF16), array((tokens, experts), F32)
    routing = array((tokens, top_k), jnp.int32), logits, array((tokens, top_k), F32)
    return h200.compile(run, x, *routing, up, up, down, x, *leaves)


def kernels(program, *names):
    return {name: program.kernels[name] for name in names}


class TestForward:
    def test_tokens_are_quantised_once_and_before_they_are_copied(self, h200):
        program = compiled(h200, layer, quantized_avals())
        assert program.kernels["quantize_rows"] == 1
        assert program.kernels["quantize_blocks"] == 0
        assert program.kernels["scaled_ragged_noncontracting"] == 2
        copies = re.findall(r"= (\w+)\[\S+ custom-call.*dispatch_rows", program.hlo)
        assert sorted(copies) == ["f32", "f8e4m3fn"]

    @pytest.mark.parametrize("tokens", [1, 16])
    def test_few_pairs_are_one_custom_call(self, tokens, h200):
        program = compiled_with_routing(h200, tokens, 2048, 768, 128, 8)
        assert program.kernels == dict(decode_fp8_mlp=1)
        assert program.opcodes <= FREE

    @pytest.mark.parametrize("tokens", [17, 128])
    def test_few_tokens(self, tokens, h200):
        """Each step is one kernel, and one kernel of XLA's finds the tokens and weights of rows."""
        program = compiled_with_routing(h200, tokens, 2048, 768, 128, 8)
        once = "sort_by_expert", "quantize_tokens", "quantize_hidden", "combine_rows"
        assert program.kernels == dict.fromkeys(once, 1) | dict(scaled_ragged_noncontracting=2)
        assert len([i for i in program.entry if i.opcode not in FREE]) == 1

    def test_no_rows_are_no_kernel_of_theirs(self, h200):
        """Without rows, no kernel quantises tokens, because its buffers would be empty."""

        def run(x, wi_0, wi_1, wo, sizes, rows):
            return jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, rows=rows, recipe=jgg.Recipe())

        sizes = array((E,), jnp.int32)
        for rows, count in ((0, 0), (8, 1)):
            program = h200.compile(run, X, *MATRICES, sizes, array((rows,), jnp.int32))
            assert program.kernels["quantize_tokens"] == count


class TestFloat16:
    def test_elementwise_steps_are_xlas(self, h200):
        """XLA runs float16 steps even with "cuda". Products and quantisers are kernels."""
        halves = [array(a.shape, jnp.float16) for a in (X, *MATRICES)]
        run = partial(gradients, recipe=jgg.Recipe(), implementation="cuda")
        program = h200.compile(run, halves[0], LOGITS, *halves[1:])
        assert not {"quantize_hidden", "quantize_ragged_gradients"} & set(program.kernels)
        used = "scaled_ragged_noncontracting", "quantize_ragged", "quantize_rows"
        assert all(program.kernels[name] for name in used)


class TestGradients:
    def test_nothing_is_quantised_for_the_gradients_of_weights(self, h200):
        program = compiled(h200, gradients, quantized_avals())
        assert program.kernels["quantize_ragged"] == 0
        assert program.kernels["quantize_rows"] == 2
        assert kernels(
            program, "scaled_ragged_noncontracting", "ragged_contracting", "combine_rows"
        ) == {"scaled_ragged_noncontracting": 4, "ragged_contracting": 3, "combine_rows": 2}

    def test_no_rows_of_16_bits_are_quantised(self, h200):
        """For FP8 weight gradients, no rows are written in 16 bits only to be quantised later."""
        recipe = jgg.Recipe.blockwise()
        program = compiled(h200, gradients, quantized_avals(recipe), recipe=recipe)
        names = "quantize_ragged", "quantize_gathered", "quantize_joined_gradients"
        assert kernels(program, *names) == dict(zip(names, (0, 2, 1), strict=True))
        copies = re.findall(r"= (\w+)\[\S+ custom-call.*dispatch_rows", program.hlo)
        assert sorted(copies) == ["f32", "f32", "f8e4m3fn", "f8e4m3fn"]
        # The kernel has room for quantised tokens: it quantises tokens before it copies them.
        calls = [i.text for i in program.calls if i.kernel == "quantize_gathered"]
        tokens, embed = X.shape
        assert [f"u8[{tokens},{embed}]" in text for text in calls] == [True, True]

    def test_few_pairs_are_sorted_before_the_kernels(self, h200):
        """The backward pass needs sorted rows, so the forward pass sorts them in a kernel."""
        kernels = compiled_with_routing(h200, 16, D, F, 32, K, with_gradients=True).kernels
        assert kernels["sort_by_expert"] == 1 and kernels["decode_fp8_mlp"] == 0

    def test_xla_adds_no_more_than_scales_and_sums(self, h200):
        """XLA runs seven kernels: one for tokens and weights of rows, two for maxima and scales of
        the columns of each of two operands, and two for gradients of rows' weights."""
        program = compiled_with_routing(h200, 16 * T, D, F, E, K, with_gradients=True)
        assert len([i for i in program.entry if i.opcode not in FREE]) == 7

    def test_weights_are_quantised_once(self, h200):
        program = compiled(h200, gradients)
        names = "quantize_joined", "quantize_blocks"
        assert kernels(program, *names) == dict.fromkeys(names, 1)

    @pytest.mark.parametrize("given", [True, False])
    def test_remat_quantises_nothing_twice(self, given, h200):
        remat = partial(jax.checkpoint, policy=checkpoint_policies.quantized_operands_saveable)
        quantized = quantized_avals() if given else None
        program = compiled(h200, gradients, quantized, remat=remat)
        assert program.kernels["quantize_rows"] == 2
        names = "quantize_joined", "quantize_blocks"
        assert kernels(program, *names) == dict.fromkeys(names, 0 if given else 1)


def test_a_recipe_compiles_to_kernels(h200):
    program = compiled(h200, gradients, quantized_avals(), recipe=jgg.Recipe())
    assert program.kernels["scaled_ragged_noncontracting"] == 4
    assert program.kernels["scaled_ragged_contracting"] == 3


@pytest.mark.parametrize("hidden, alone", [(256, 1), (264, 3)])
def test_weight_gradients_of_narrow_experts_are_one_launch(hidden, alone, h200):
    def loss(x, wi_0, wi_1, wo, sizes):
        y = jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, recipe=jgg.Recipe())
        return jnp.sum(jnp.sin(y.astype(F32)))

    up, down = array((E, D, hidden), BF16), array((E, hidden, D), BF16)
    operands = X, up, up, down, array((E,), jnp.int32)
    program = h200.compile(jax.grad(loss, range(4)), *operands)
    contracting = "scaled_ragged_contracting", "paired_scaled_contracting"
    assert kernels(program, *contracting) == dict(
        zip(contracting, (alone, alone == 1), strict=True)
    )


@pytest.mark.parametrize(
    "hidden, embed, recipe, in_place",
    [
        (128 * FP8_TILES_IN_PLACE, 512, jgg.Recipe(), ["f8e4m3fn", "f8e5m2"]),
        (200, 512, jgg.Recipe(), ["f8e4m3fn", "f8e5m2"]),
        (128 * FP8_TILES_IN_PLACE + 8, 512, jgg.Recipe(), ["f8e5m2"]),
        (256 * FP8_TILES_IN_PLACE, 512, jgg.Recipe(), ["f8e5m2"]),
        (256 * FP8_TILES_IN_PLACE + 8, 512, jgg.Recipe(), []),
        (256, 384, jgg.Recipe(), []),
    ],
)
def test_products_in_16_bits_read_quantised_tokens_in_place(hidden, embed, recipe, in_place, h200):
    """Two products can read tokens in place: gate and up, and the gradient of hidden."""
    recipe = dataclasses.replace(recipe, gradient_dtype=E5M2)

    def loss(x, wi_0, wi_1, wo, logits):
        y = moe.dropless_mlp(x, moe.route(logits, K), wi_0, wi_1, wo, recipe=recipe)
        return jnp.sum(jnp.sin(y.astype(F32)))

    up, down = array((E, embed, hidden), BF16), array((E, hidden, embed), BF16)
    operands = array((T, embed), BF16), up, up, down, LOGITS
    program = h200.compile(jax.grad(loss, range(4)), *operands)
    calls = [c.text for c in program.calls if c.kernel == "gathered_scaled_noncontracting"]
    types = [re.findall(r"(f8\w+)\[512,", text)[0] for text in calls]
    assert types == in_place
    copies = re.findall(r"= (f8\w+)\[\S+ custom-call.*dispatch_rows", program.hlo)
    assert sorted(copies + types) == ["f8e4m3fn", "f8e5m2"]


def test_quantising_weights_is_free_of_other_passes(h200):
    program = h200.compile(jgg.quantize_mlp, *MATRICES)
    assert program.kernels == {"quantize_joined": 1, "quantize_blocks": 1}
    assert program.opcodes <= FREE


@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
def test_kernels_apply_only_the_activations_that_they_have(activation, h200):
    program = compiled(h200, gradients, quantized_avals(), activation=activation)
    names = "quantize_hidden", "quantize_gradients"
    assert kernels(program, *names) == dict.fromkeys(names, int(activation in mlp.FUSED))


@pytest.mark.parametrize("hidden", [F, 136, 204])
@pytest.mark.parametrize("biases", [False, True])
def test_transposed_gradients_come_from_one_kernel_where_it_has_the_form(hidden, biases, h200):
    """Separate kernels quantise gradients if columns are no multiple of 8, or if there are biases,
    whose gradients sum numbers before these are quantised. Otherwise one kernel computes and
    quantises gradients, and if hidden is wider than x, it writes gate's and up's into one array."""
    recipe = jgg.Recipe.blockwise()

    def loss(x, wi_0, wi_1, wo, b0, sizes):
        given = (b0, None, None) if biases else None
        y = jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, biases=given, recipe=recipe)
        return jnp.sum(jnp.sin(y.astype(F32)))

    up, down = array((E, D, hidden), BF16), array((E, hidden, D), BF16)
    operands = X, up, up, down, array((E, hidden), BF16), array((E,), jnp.int32)
    program = h200.compile(jax.grad(loss, range(4)), *operands)
    one_kernel = int(hidden % 8 == 0 and not biases)
    joined = one_kernel if hidden > D else 0
    names = "quantize_joined_gradients", "quantize_ragged_gradients"
    names = *names, "quantize_gradients", "quantize_ragged"
    numbers = joined, one_kernel - joined, 1 - one_kernel, 3 - 3 * one_kernel
    assert kernels(program, *names) == dict(zip(names, numbers, strict=True))


@pytest.mark.parametrize(
    "tokens, embed, hidden, experts, top_k, mebibytes",
    [
        (8192, 2048, 768, 128, 8, 400),
        (24576, 1536, 256, 128, 8, 750),
        (8192, 4096, 512, 128, 8, 570),
        (4096, 7168, 2048, 32, 8, 600),
        (4096, 4096, 14336, 8, 2, 270),
        (8192, 2880, 2880, 32, 4, 225),
    ],
)
def test_memory_of_published_layers(tokens, embed, hidden, experts, top_k, mebibytes, h200):
    """Weights are quantised before. While weight gradients are computed, memory holds only the
    narrower of two arrays: the gradients of gate and up, or the gradient of x."""
    recipe = jgg.Recipe()
    x, logits = array((tokens, embed), BF16), array((tokens, experts), F32)
    up, down = array((experts, embed, hidden), BF16), array((experts, hidden, embed), BF16)
    quantized = jax.eval_shape(partial(jgg.quantize_mlp, recipe=recipe), up, up, down)
    leaves, tree = jax.tree.flatten(quantized)

    def run(x, wi_0, wi_1, wo, logits, dy, *leaves):
        def of(x, wi_0, wi_1, wo, logits):
            routing = moe.route(logits, top_k)
            weights = tree.unflatten(leaves)
            return moe.dropless_mlp(x, routing, wi_0, wi_1, wo, recipe=recipe, quantized=weights)

        y, vjp = jax.vjp(of, x, wi_0, wi_1, wo, logits)
        return y, vjp(dy)

    program = h200.compile(run, x, up, up, down, logits, x, *leaves)
    assert program.temporary_bytes <= mebibytes * 2**20
