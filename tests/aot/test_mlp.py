"""XLA's program for expert MLPs on an H200: kernels, what runs between them, and memory."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.mlp.in_place import GRADIENT_COLUMNS
from jax_grouped_gemm._src.mlp.kernels import DOWN_WEIGHTS_KERNELS
from jax_grouped_gemm._src.mlp.plan import PAIRED_COLUMNS
from tests.support import aot

BF16, F32 = jnp.bfloat16, jnp.float32
T, D, F, E, K = 512, 256, 384, 4, 2
M = T * K

FORWARD = dict(gated_ragged_dot=1, ragged_noncontracting=1)
BACKWARD = dict(
    gated_ragged_dot_transpose=1,
    paired_ragged_dot=1,
    paired_weight_gradients=1,
    ragged_contracting=1,
)


def test_the_tiles_of_weight_gradients_are_those_compiled(schedules):
    compiled = [c for c in schedules.kernel_configs() if c.pop("op") == "weight_gradients"]
    assert [kernel.tile.sizes() for kernel in DOWN_WEIGHTS_KERNELS] == compiled


@pytest.fixture(scope="module")
def h200(extension) -> aot.Target:
    config = Path(__file__).parents[1] / "data" / "h200_target_config.txtpb"
    return aot.Target(config.read_text())


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHTS = struct(E, D, F), struct(E, D, F), struct(E, F, D)
SIZES = struct(E, dtype=jnp.int32)
SORTED = struct(M, D), *WEIGHTS, struct(M, dtype=F32), SIZES
TOKENS = struct(T, D), *WEIGHTS, struct(T, E, dtype=F32)


def sorted_rows(x, wi_0, wi_1, wo, weights, sizes):
    return jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, weights=weights)


def layer(x, wi_0, wi_1, wo, logits):
    return moe.dropless_mlp(x, moe.route(logits, K), wi_0, wi_1, wo)


def both(function):
    """Returns a function of value and gradients, with a cotangent that depends on the value."""

    def run(*operands):
        y, vjp = jax.vjp(lambda *floats: function(*floats, *operands[5:]), *operands[:5])
        return y, vjp(jnp.sin(y))

    return run


def test_rows_in_rows_out_is_two_kernels(h200):
    program = h200.compile(sorted_rows, *SORTED)
    assert program.kernels == FORWARD
    assert program.opcodes <= aot.FREE
    assert program.temporary_bytes <= 2 * M * F + 4 * aot.ALIGNMENT


def test_backward_is_four_more(h200):
    """XLA computes only one array as large as the rows: the cotangent."""
    program = h200.compile(both(sorted_rows), *SORTED)
    assert program.kernels == FORWARD | BACKWARD
    fusions = [i for i in program.entry if i.opcode not in aot.FREE | {"optimization-barrier"}]
    large = [i.text for i in fusions if f"bf16[{M}," in i.type]
    assert len(large) == 1, large  # sin(y)


def test_layers_in_float16_are_composed_of_ragged_products(h200):
    """Only the products are our kernels, even with `implementation="cuda"`."""

    def run(*operands):
        x, wi_0, wi_1, wo, weights, sizes = operands
        options = dict(weights=weights, implementation="cuda")
        return jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, **options)

    halves = [struct(*a.shape, dtype=jnp.float16) for a in SORTED[:4]]
    program = h200.compile(both(run), *halves, *SORTED[4:])
    assert program.kernels == dict(ragged_noncontracting=6, ragged_contracting=3)


def test_gradients_of_gate_and_up_are_written_where_those_are(h200):
    program = h200.compile(both(sorted_rows), *SORTED)
    (call,) = [i for i in program.calls if i.kernel == "gated_ragged_dot_transpose"]
    assert "output_to_operand_aliasing={{0}: (3, {}), {1}: (4, {})}" in call.text
    assert "copy" not in program.opcodes


BACKWARD_OF_TOKENS = dict(BACKWARD, down_weight_gradient=1)
del BACKWARD_OF_TOKENS["ragged_contracting"]


def test_rows_are_gathered_again(h200):
    """No [m, D] array is kept for the backward pass, which reads rows from tokens again."""
    program = h200.compile(both(layer), *TOKENS)
    assert program.kernels.items() >= (FORWARD | BACKWARD_OF_TOKENS).items()
    kept = 4 * M * F  # gate and up
    assert program.temporary_bytes < kept + 2 * M * F + 3 * 2 * M * D


def test_rows_are_read_in_place(h200):
    """No kernel copies rows of x or of y's cotangent."""

    def kernels_of(function, hidden):
        w = struct(E, D, hidden), struct(E, D, hidden), struct(E, hidden, D)
        return h200.compile(function, TOKENS[0], *w, TOKENS[-1]).kernels

    copies = {"dispatch_rows", "gather_rows"}
    for hidden in (64, 128, 256, 768):
        assert not copies & set(kernels_of(layer, hidden))
        assert not copies & set(kernels_of(both(layer), hidden))
    assert not copies & set(kernels_of(layer, 776))
    assert kernels_of(both(layer), 776).keys() & copies


def test_what_is_kept(h200):
    """The forward pass returns y, of 2 m D bytes, and keeps gate and up, of 4 m F bytes."""

    def forward(*floats):
        function = partial(sorted_rows, sizes=floats[-1])
        y, vjp = jax.vjp(lambda *f: function(*f), *floats[:-1])
        shapes = {(M, F)}
        return y, [x for x in jax.tree.leaves(vjp) if x.shape in shapes]

    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(h200.mesh, jax.P()))
        for x in SORTED
    ]
    memory = jax.jit(forward).lower(*arguments).compile().memory_analysis()
    pointers = 8 * 4
    assert abs(memory.output_size_in_bytes - (2 * M * D + 4 * M * F)) <= pointers


def test_a_policy_that_keeps_neither_multiplies_once_more(h200):
    remat = jax.checkpoint(sorted_rows, policy=jax.checkpoint_policies.nothing_saveable)
    program = h200.compile(both(remat), *SORTED)
    assert program.kernels == FORWARD | BACKWARD | dict(gated_ragged_dot=2)


def of_activation(activation):
    def run(x, wi_0, wi_1, wo, weights, sizes):
        return jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, weights=weights, activation=activation)

    return run


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_every_named_activation_is_as_many_kernels(activation, h200):
    run = of_activation(activation)
    assert h200.compile(run, *SORTED).kernels == FORWARD
    assert h200.compile(both(run), *SORTED).kernels == FORWARD | BACKWARD


def test_gradients_that_no_kernel_has_are_composed_of_those_there_are(h200):
    run = of_activation(lambda gate: gate * jax.nn.sigmoid(2 * gate))
    backward = BACKWARD | dict(ragged_noncontracting=4)
    del backward["gated_ragged_dot_transpose"]
    assert h200.compile(both(run), *SORTED).kernels == backward


def test_biases_of_gate_and_up_are_added_by_the_kernel(h200):
    def run(x, wi_0, wi_1, wo, weights, sizes, b0, b1):
        biases = b0, b1, None
        return jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, weights=weights, biases=biases)

    program = h200.compile(run, *SORTED, struct(E, F), struct(E, F, dtype=F32))
    assert program.kernels == FORWARD
    assert program.opcodes <= aot.FREE


def test_gate_and_up_in_one_matrix_are_not_copied(h200):
    def run(x, wi, wo, weights, sizes):
        return jgg.ragged_mlp(x, wi, None, wo, sizes, weights=weights)

    x, wi_0, _, wo, *rest = SORTED
    operands = x, struct(E, D, 2 * F), wo, *rest
    program = h200.compile(run, *operands)
    assert program.kernels == FORWARD and program.opcodes <= aot.FREE

    def gradient(*floats):
        y, vjp = jax.vjp(lambda *f: run(*f, floats[-1]), *floats[:-1])
        return vjp(jnp.sin(y))

    program = h200.compile(gradient, *operands)
    backward = dict(gated_ragged_dot_transpose=1, ragged_noncontracting=2, ragged_contracting=2)
    assert program.kernels == FORWARD | backward
    like_matrix = [i for i in program.entry if f"[{E},{D},{2 * F}]" in i.type]
    assert {i.opcode for i in like_matrix} <= aot.FREE | {"optimization-barrier"}


def test_experts_without_an_up_projection(h200):
    def run(x, wi_0, wo, weights, sizes):
        return jgg.ragged_mlp(x, wi_0, None, wo, sizes, weights=weights, activation="relu2")

    x, wi_0, _, *rest = SORTED
    program = h200.compile(run, x, wi_0, *rest)
    assert program.kernels == FORWARD and program.opcodes <= aot.FREE

    def step(*operands):
        *floats, sizes = operands
        y, vjp = jax.vjp(lambda *f: run(*f, sizes), *floats)
        return y, vjp(jnp.sin(y))

    program = h200.compile(step, x, wi_0, *rest)
    backward = dict(gated_ragged_dot_transpose=1, ragged_noncontracting=2, ragged_contracting=2)
    assert program.kernels == FORWARD | backward
    assert "copy" not in program.opcodes


@pytest.mark.parametrize(
    "tokens, embed, hidden, experts, top_k, mebibytes",
    [
        (8192, 2048, 768, 128, 8, 220),
        (24576, 1536, 256, 128, 8, 790),
        (8192, 4096, 512, 128, 8, 170),
        (4096, 7168, 2048, 32, 8, 740),
        (4096, 4096, 14336, 8, 2, 320),
        (8192, 2880, 2880, 32, 4, 390),
    ],
)
def test_memory_of_published_layers(tokens, embed, hidden, experts, top_k, mebibytes, h200):
    """Memory holds gate and up, and only one more array like them or [m, D] array at a time."""

    def run(x, wi_0, wi_1, wo, logits, dy):
        def of(x, wi_0, wi_1, wo, logits):
            return moe.dropless_mlp(x, moe.route(logits, top_k), wi_0, wi_1, wo)

        y, vjp = jax.vjp(of, x, wi_0, wi_1, wo, logits)
        return y, vjp(dy)

    x = struct(tokens, embed)
    matrices = [struct(experts, embed, hidden)] * 2 + [struct(experts, hidden, embed)]
    program = h200.compile(run, x, *matrices, struct(tokens, experts, dtype=F32), x)
    backward = dict(BACKWARD_OF_TOKENS if hidden <= GRADIENT_COLUMNS else BACKWARD)
    if hidden > PAIRED_COLUMNS:
        del backward["paired_weight_gradients"]
        backward["ragged_contracting"] = 3
    assert program.kernels.items() >= (FORWARD | backward).items()
    assert program.temporary_bytes <= mebibytes * 2**20
    moved = [i for i in program.entry if f"bf16[{tokens * top_k},{embed}]" in i.type]
    others = [i.text for i in moved if i.opcode not in aot.FREE | {"optimization-barrier"}]
    assert not others
