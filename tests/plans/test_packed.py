"""The kernels that multiply packed weights, and why other calls dequantise weights first."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.mlp.operands import ExpertWeights, Groups, MlpOperands, Rows
from jax_grouped_gemm._src.plan import TileConfig
from jax_grouped_gemm._src.quantized import plan
from jax_grouped_gemm._src.quantized.format import register
from jax_grouped_gemm._src.quantized.plan import PackedKernel
from tests.support.plans import PLAIN

BF16 = jnp.bfloat16
EXPERTS, EMBED, HIDDEN = 8, 256, 384
WITHOUT_FEW_ROWS = ("fp8_128x128",)


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def packed(*shape, format="mxfp4", **options):
    return jax.eval_shape(lambda w: jgg.quantize(w, format, **options), array(*shape))


SIZES = array(EXPERTS, dtype=jnp.int32)


def product(rows, dtype=BF16, k=EMBED, format="mxfp4", **options):
    q = packed(EXPERTS, k, HIDDEN, format=format)
    run = partial(jgg.ragged_dot, **options)
    return jgg.explain(run, array(rows, k, dtype=dtype), q, SIZES).plans


@pytest.mark.parametrize("format", ["mxfp4", "int4", "int8", "fp8", "fp8_128x128"])
def test_rows_a_group(format):
    streamed, few, most = 8, 0 if format in WITHOUT_FEW_ROWS else 24, 2048
    of_few = (streamed * EXPERTS + 1, few * EXPERTS) if few else ()
    for rows, kernel in (
        (1, "streamed_16x128"),
        (streamed * EXPERTS, "streamed_16x128"),
        *((rows, "decoded_32x256") for rows in of_few),
        ((few or streamed) * EXPERTS + 1, "decoded_128x256"),
        (most * EXPERTS, "decoded_128x256"),
    ):
        (plan,) = product(rows, format=format)
        assert plan.kernel.name == kernel and plan.problem.op == "packed_ragged_dot"
        assert bool(plan.workspace_bytes) == (plan.kernel.schedule == "streamed")
        assert f"kernel {kernel}" in str(plan) and f"rhs {format}" in str(plan)
    unpacked, multiplied = product(most * EXPERTS + 1, format=format)
    assert unpacked.kernel.name == "unpack" and multiplied.tile is not None
    assert f"that is faster for more than {most} rows a group" in str(unpacked)


@pytest.mark.parametrize(
    "format, tokens, kernels",
    [
        ("mxfp4", 1, ["streamed_16x128"] * 2),
        ("mxfp4", 32, ["streamed_16x128"] * 2),
        ("mxfp4", 64, ["decoded_32x256"] * 2),
        ("fp8", 64, ["decoded_32x256"] * 2),
        ("int8", 32, ["streamed_16x128"] * 2),
        ("int8", 64, ["decoded_32x256"] * 2),
        ("fp8_128x128", 64, ["decoded_128x256"] * 2),
    ],
)
def test_large_matrices_are_decoded_for_fewer_rows(format, tokens, kernels):
    """Decoding pays for fewer rows a group if there is a tile for each multiprocessor."""
    assert of_experts(32, 2880, 2880, 4, format, tokens) == kernels


@pytest.mark.parametrize("format", ["mxfp4", "int4", "int8", "fp8", "fp8_128x128"])
def test_short_matrices_are_decoded_for_a_row_a_group(format):
    fewest = 72 if format in WITHOUT_FEW_ROWS else 16
    for tokens, schedule in ((8, "streamed"), (fewest - 8, "streamed"), (fewest, "decoded")):
        of_gate, of_down = of_experts(128, 2048, 768, 8, format, tokens)
        assert of_gate.startswith(schedule) and of_down.startswith(schedule)


@pytest.mark.parametrize("format", ["mxfp4", "int4", "int8", "fp8", "fp8_128x128"])
def test_tall_tiles(format):
    """Gate and up have tall tiles if they have many columns, and groups have many rows."""
    tall = "decoded_256x128" if format in ("mxfp4", "fp8_128x128") else "decoded_128x256"
    for tokens, hidden, kernel in (
        (768 * 8, 2048, tall),
        (768 * 8 - 1, 2048, "decoded_128x256"),
        (768 * 8, 2040, "decoded_128x256"),
        (2048 * 8, 2048, tall),
    ):
        assert of_experts(32, 4096, hidden, 4, format, tokens) == [kernel, "decoded_128x256"]
    (plan,) = product(768 * EXPERTS, format=format)
    has_tall = tall == "decoded_256x128"
    assert (f"{tall} (only gate and up have tall tiles)" in str(plan)) == has_tall


@pytest.mark.parametrize("is_bound", [False, True])
def test_tall_tiles_need_more_than_a_bound_of_rows(is_bound):
    """Rows with a count may be far fewer than the buffer has."""
    m, hidden = 768 * EXPERTS, 2048
    up, down = packed(EXPERTS, EMBED, hidden), packed(EXPERTS, hidden, EMBED)
    indices = partial(array, dtype=jnp.int32)
    count = indices(1) if is_bound else None
    rows = Rows(array(m // 2, EMBED), indices(m), indices(m // 2, 2), count)
    experts = ExpertWeights(wi_0=up, wi_1=up, wo=down)
    operands = MlpOperands(rows, experts, None, Groups(SIZES, None))
    found = [plan.packed_kernel(each, None).name for each in operands.packed_products]
    of_up = "decoded_128x256" if is_bound else "decoded_256x128"
    assert found == [of_up, "decoded_128x256"]


def of_experts(experts, embed, hidden, top_k, format, tokens):
    """Returns the kernel of gate and up, and the kernel of down."""
    found = []
    for k, n, products in ((embed, hidden, 2), (hidden, embed, 1)):
        q = packed(experts, k, n, format=format)
        problem = plan.PackedProblem.of(
            "bfloat16", q, "bfloat16", tokens * top_k, experts, products
        )
        found.append(plan.packed_kernel(problem, None).name)
    return found


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(dtype=jnp.float32), "no kernel for float32 x mxfp4 -> float32"),
        (dict(implementation="xla"), "implementation='xla' was asked for"),
        (dict(preferred_element_type=jnp.float32), "no kernel for bfloat16 x mxfp4 -> float32"),
        (dict(format=PLAIN), "no kernel for bfloat16 x int8_plain"),
        (dict(rows=9 * EXPERTS, k=100), "k=100 must be a multiple of 8"),
        (dict(rows=0), "there is nothing to multiply"),
    ],
    ids=str,
)
def test_why_weights_are_dequantised(options, reason):
    plan, _ = product(**{"rows": 4, **options})
    assert plan.problem.op == "dequantize_weights" and reason in str(plan)


def test_rows_of_any_length_are_streamed():
    (plan,) = product(4, k=100)
    assert plan.kernel.schedule == "streamed"


def layer(tokens, wi="mxfp4", wo="mxfp4", **options):
    up = packed(EXPERTS, EMBED, HIDDEN, format=wi)
    down = packed(EXPERTS, HIDDEN, EMBED, format=wo) if wo else array(EXPERTS, HIDDEN, EMBED)

    def run(x, logits, *weights):
        return moe.dropless_mlp(x, moe.route(logits, 2), *weights, **options)

    x, logits = array(tokens, EMBED), array(tokens, EXPERTS, dtype=jnp.float32)
    return [
        plan
        for plan in jgg.explain(run, x, logits, up, up, down).plans
        if "rows" not in plan.problem.op
    ]


def test_a_layer():
    for wo, op in (("mxfp4", "decode_mlp"), ("int8", "packed_mlp")):
        (plan,) = layer(4, wo=wo, activation="swiglu_oai")
        assert plan.problem.op == op and plan.kernel.schedule == "streamed"
        assert "(gate) * up * weights" in str(plan) and "rows of tokens are read where" in str(plan)
        assert "wi_0 mxfp4[8, 256, 384]" in str(plan)
    (plan,) = layer(128, wo="int8")
    assert plan.problem.op == "packed_mlp"
    assert plan.kernel.schedule == "decoded" and not plan.workspace_bytes
    assert "down: decoded_128x256, predicted time" in str(plan)
    assert "rows of tokens are read where" in str(plan)


def test_tall_tiles_read_copies_of_rows():
    up, down = packed(EXPERTS, EMBED, 2048), packed(EXPERTS, 2048, EMBED)

    def run(x, logits, *weights):
        return moe.dropless_mlp(x, moe.route(logits, 2), *weights)

    for tokens, read in ((384 * EXPERTS, "by a kernel before"), (383 * EXPERTS, "where they are")):
        operands = array(tokens, EMBED), array(tokens, EXPERTS, dtype=jnp.float32), up, up, down
        plan = jgg.explain(run, *operands)
        assert read in str(plan)


def test_experts_of_any_width_are_streamed():
    up, down = packed(EXPERTS, EMBED, 100), packed(EXPERTS, 100, EMBED)

    def run(x, logits, *weights, **options):
        return moe.dropless_mlp(x, moe.route(logits, 2), *weights, **options)

    operands = array(4, EMBED), array(4, EXPERTS, dtype=jnp.float32), up, up, down
    (plan,) = jgg.explain(run, *operands).plans
    assert plan.problem.op == "decode_mlp" and plan.kernel.schedule == "streamed"
    found = jgg.explain(partial(run, apply_router_weight_on_input=True), *operands)
    assert "weights multiply rows of x" in str(found)


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(wo=None), "not all matrices are quantised"),
        (dict(wo=PLAIN), "no kernel for bfloat16 x int8_plain"),
        (dict(activation=jnp.tanh), "no kernel has the activation"),
        (dict(tokens=2048 * 8, wo="int4"), "that is faster for more than 2048 rows a group"),
    ],
    ids=["wo", "format", "activation", "rows"],
)
def test_why_a_layer_dequantises(options, reason):
    plan, *_ = layer(**{"tokens": 4, **options})
    assert plan.problem.op == "dequantize_weights" and reason in str(plan)


def test_a_program_calls_the_kernels(extension):
    """The program is only lowered, so the extension need not have these kernels."""
    q = packed(EXPERTS, EMBED, HIDDEN)
    calls = {}
    for rows in (4, 512, 32768):
        traced = jax.jit(jgg.ragged_dot).trace(array(rows, EMBED), q, SIZES)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        names = "streamed_packed_dot", "decoded_packed_dot", "unpack_matrices"
        calls[rows] = [name for name in names if f"jax_grouped_gemm.{name}.v3" in text]
    assert calls == {
        4: ["streamed_packed_dot"],
        512: ["decoded_packed_dot"],
        32768: ["unpack_matrices"],
    }


def test_a_format_that_is_added_has_the_kernel_that_is_added(monkeypatch):
    """Plans choose the kernel of a new format as soon as the table has a row for it."""
    values = jax.ShapeDtypeStruct((EXPERTS, EMBED, HIDDEN), jnp.int8)
    scales = jax.ShapeDtypeStruct((EXPERTS, HIDDEN), jnp.float32)
    register(
        jgg.Format("int8_demo", np.dtype(np.int8), 8, channel_scales=True),
        dequantize=lambda parts, format, matrix, dtype: parts.values.astype(dtype),
    )
    q = jgg.QuantizedArray(values, channel_scales=scales, format="int8_demo")
    x = array(4, EMBED)
    before, _ = jgg.explain(jgg.ragged_dot, x, q, SIZES).plans
    assert "no kernel for bfloat16 x int8_demo -> bfloat16" in str(before)
    row = PackedKernel(tile=TileConfig(64, 64, 1), rhs=("int8_demo",), most_rows=100)
    monkeypatch.setattr(plan, "PACKED_KERNELS", (*plan.PACKED_KERNELS, row))
    (after,) = jgg.explain(jgg.ragged_dot, x, q, SIZES).plans
    assert after.kernel == row
    many = array(101 * EXPERTS, EMBED)
    first, _ = jgg.explain(jgg.ragged_dot, many, q, SIZES).plans
    assert "that is faster for more than 100 rows a group" in str(first)
