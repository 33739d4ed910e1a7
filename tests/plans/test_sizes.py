"""The largest sizes that kernels count to, and what runs larger ones. No array is made."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax.core import ShapedArray

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.counts import MOST
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fp8.quantize import plan as quantize_plan
from jax_grouped_gemm._src.fp8.quantize import primitive as fp8
from jax_grouped_gemm._src.fp8.scaled import plan as scaled_plan
from jax_grouped_gemm._src.optimizer import plan as optimizer_plan
from jax_grouped_gemm._src.optimizer.problem import Layout
from jax_grouped_gemm._src.plan import COMPOSED, XLA
from jax_grouped_gemm._src.ragged import primitive as ragged
from jax_grouped_gemm._src.ragged.plan import plan_product
from jax_grouped_gemm._src.rows import plan as rows_plan
from jax_grouped_gemm._src.sizes import LARGEST_SIZE, MOST_ROW_BATCHES

BF16, F32, E4M3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn


def array(*shape, dtype=BF16):
    return ShapedArray(shape, jnp.dtype(dtype))


def integers(*shape):
    return array(*shape, dtype=jnp.int32)


def plan_of(function, *avals):
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    return jgg.explain(function, *structs).plans[0]


def noncontracting(m=64, k=8, n=8, g=1, dtype=BF16):
    operands = array(m, k, dtype=dtype), array(g, k, n, dtype=dtype), integers(g)
    return plan_of(partial(jgg.ragged_dot, implementation="cuda"), *operands)


def of_batches(batch, m=8, g=1):
    operands = array(batch, m, 8), array(batch, g, 8, 8), integers(batch, g)
    return plan_of(jax.vmap(partial(jgg.ragged_dot, implementation="cuda")), *operands)


def contracting(m=64, k=8, n=8, g=1, dtype=BF16):
    call = partial(
        ragged.ragged_contracting,
        num_groups=g,
        preferred_element_type=jnp.dtype(dtype),
        precision=None,
        transpose_lhs=False,
        transpose_rhs=False,
        implementation="cuda",
    )
    operands = array(m, k, dtype=dtype), array(m, n, dtype=dtype), integers(g), integers(1)
    return plan_of(call, *operands)


def scaled(m=64, k=16, n=16, g=1):
    operands = (
        array(m, k, dtype=E4M3),
        array(m, -(-k // 128), dtype=F32),
        array(g, k, n, dtype=E4M3),
        array(g, -(-k // 128), -(-n // 128), dtype=F32),
        integers(g),
    )
    return plan_of(partial(jgg.scaled_ragged_dot, implementation="cuda"), *operands)


def scaled_contracting(row_blocks):
    params = dict(num_groups=1, num_rows=128 * (row_blocks - 1), implementation="cuda")
    params |= dict(preferred_element_type=jnp.dtype(BF16))
    rows, scales = array(row_blocks, 16, 128, dtype=E4M3), array(row_blocks, 16, dtype=F32)
    operands = [rows, scales, rows, scales, integers(1), integers(1)]
    return plan_product(scaled_plan.contracting, operands, params, H200)


def quantizer(op, *operands, **params):
    shared = dict(dtype=E4M3, power_of_two=False, implementation=None, plain=True, transposed=True)
    return quantize_plan.plan_quantizer(op, operands, shared | params, H200)


def layer(tokens=64, columns=128, hidden=128, experts=2):
    weights = array(experts, columns, hidden), array(experts, columns, hidden)
    call = partial(jgg.gated_ragged_dot, implementation="cuda")
    return plan_of(call, array(tokens, columns), *weights, integers(experts))


def gather(tokens, choices=1, batch=()):
    rows = 8
    operands = [
        array(*batch, tokens, 8),
        integers(rows),
        integers(0, choices),
        array(tokens, 0, dtype=F32),
        integers(0),
    ]
    return rows_plan.plan_move("gather_rows", operands, dict(divisor=choices, implementation=None))


def grouped(m=8, k=8, n=8, dtype=BF16):
    call = partial(jgg.grouped_gemm, implementation="cuda")
    return plan_of(
        lambda a, b: call([a], [b]), array(1, m, k, dtype=dtype), array(1, k, n, dtype=dtype)
    )


def update(function, k, dtype=BF16):
    a = array(1, 8, k, dtype=dtype)
    operands = [a] * (1 if function is jgg.grouped_syrk else 2)
    return plan_of(partial(function, implementation="cuda"), *operands)


def packed(*shape, format="int8"):
    return jax.eval_shape(partial(jgg.quantize, format=format), jax.ShapeDtypeStruct(shape, BF16))


def packed_product(m=8, k=64, n=64, g=1, format="int8"):
    """Returns the plan of the product. If matrices are dequantised, another plan comes before."""
    rows, sizes = (jax.ShapeDtypeStruct(*x) for x in (((m, k), BF16), ((g,), jnp.int32)))
    return jgg.explain(jgg.ragged_dot, rows, packed(g, k, n, format=format), sizes).plans[-1]


def unpacked(*shape, format="mxfp4"):
    (plan,) = jgg.explain(jgg.dequantize, packed(*shape, format=format)).plans
    return plan


def layer_of_few_tokens(columns=128, hidden=128, make=lambda *x: jax.ShapeDtypeStruct(x, BF16)):
    """Returns the plan of the layer, or of its last product if kernels do not take the layer."""
    tokens, experts, choices = 4, 8, 2
    x = jax.ShapeDtypeStruct((tokens, columns), BF16)
    logits, scores = (jax.ShapeDtypeStruct((tokens, n), F32) for n in (experts, choices))
    chosen = jax.ShapeDtypeStruct((tokens, choices), jnp.int32)
    wi, wo = make(experts, columns, hidden), make(experts, hidden, columns)
    routing = moe.Routing(logits, chosen, scores)
    return jgg.explain(moe.dropless_mlp, x, routing, wi, wi, wo).plans[-1]


def optimizer_step(*shape):
    layout = Layout(plain=True, transposed=False, copied=False, part=0, parts=1)
    master = array(*shape, dtype=F32)
    forms = layout.forms(master, jnp.dtype(E4M3))
    operands = array(2, dtype=F32), master, master, *forms
    params = dict(layout=layout, power_of_two=False, implementation=None)
    return optimizer_plan.plan_update("apply_and_quantize", operands, params, H200)


PLANS = {
    "rows": lambda size: noncontracting(m=size),
    "k": lambda size: noncontracting(k=size),
    "n": lambda size: noncontracting(n=size),
    "groups": lambda size: noncontracting(m=size, g=size),
    "rows of float32": lambda size: noncontracting(m=size, dtype=F32),
    "k of float32": lambda size: noncontracting(k=size, dtype=F32),
    "batches": lambda size: of_batches(size, m=1),
    "rows of batches": lambda size: of_batches(size // 8),
    "groups of batches": lambda size: of_batches(size // 16, m=1, g=16),
    "contracted rows": lambda size: contracting(m=size),
    "contracted rows of float32": lambda size: contracting(m=size, dtype=F32),
    "rows of a weight": lambda size: contracting(k=size),
    "columns of a weight": lambda size: contracting(n=size),
    "FP8 rows": lambda size: scaled(m=size),
    "FP8 k": lambda size: scaled(k=size),
    "FP8 n": lambda size: scaled(n=size),
    "FP8 row blocks": lambda size: scaled_contracting(size // 128),
    "quantised rows": lambda size: quantizer("quantize_rows", array(size, 8)),
    "quantised columns": lambda size: quantizer("quantize_rows", array(1, size)),
    "quantised tokens": lambda size: quantizer("quantize_tokens", array(8, 8), integers(size)),
    "quantised matrices": lambda size: quantizer("quantize_blocks", array(size, 1, 8)),
    "joined columns": lambda size: quantizer("quantize_joined", *[array(1, 8, size // 2)] * 2),
    "quantised groups": lambda size: quantizer("quantize_ragged", array(size, 8), integers(2)),
    "gathered groups": lambda size: quantizer(
        "quantize_gathered",
        array(8, 8),
        integers(size),
        array(8, dtype=F32),
        integers(2),
    ),
    "maxima of columns": lambda size: quantizer("column_maxima", array(size, 8), integers(2)),
    "tokens of a layer": lambda size: layer(tokens=size),
    "columns of a layer": lambda size: layer(columns=size),
    "hidden columns": lambda size: layer(hidden=size),
    "gathered tokens": lambda size: gather(size),
    "pairs": lambda size: gather(size // 8, choices=8),
    "sorted pairs": lambda size: rows_plan.plan_sort(
        [integers(size)], dict(num_experts=8, implementation=None)
    ),
    "rows of a list": lambda size: grouped(m=size),
    "columns of a list": lambda size: grouped(n=size),
    "k of a list": lambda size: grouped(k=size),
    "k of a list of float64": lambda size: grouped(k=size, dtype=jnp.float64),
    "k of an update": lambda size: update(jgg.grouped_syrk, size),
    "k of two products": lambda size: update(jgg.grouped_syr2k, size // 2),
    "k of two products of float32": lambda size: update(jgg.grouped_syr2k, size // 2, F32),
    "groups of streamed matrices": lambda size: packed_product(m=size // 2, g=size),
    "k of streamed matrices": lambda size: packed_product(k=size),
    "rows of decoded matrices": lambda size: packed_product(m=size, g=size // 256, format="mxfp4"),
    "n of decoded matrices": lambda size: packed_product(n=size),
    "unpacked matrices": lambda size: unpacked(size, 64, 64),
    "k of unpacked matrices": lambda size: unpacked(1, size, 64),
    "n of unpacked matrices": lambda size: unpacked(1, 64, size, format="int4"),
    "columns of few tokens": lambda size: layer_of_few_tokens(columns=size),
    "hidden columns of few tokens": lambda size: layer_of_few_tokens(hidden=size),
    "columns of few tokens, packed": lambda size: layer_of_few_tokens(columns=size, make=packed),
    "updated matrices": lambda size: optimizer_step(size, 128, 128),
    "rows of an updated matrix": lambda size: optimizer_step(size, 128),
    "columns of an updated matrix": lambda size: optimizer_step(128, size),
}
# A size plus 256 has a row, block, batch or group more, as `PLANS` divide sizes by at most 256.
STEP = 256


@pytest.mark.parametrize(
    "name, schedule", [("streamed", "streamed"), ("decoded", "decoded"), ("few tokens", "few_rows")]
)
def test_large_sizes_keep_their_kernels(name, schedule):
    plans = [PLANS[x](LARGEST_SIZE) for x in PLANS if name in x and "packed" not in x]
    assert len(plans) == 2 and all(plan.kernel.schedule == schedule for plan in plans)


@pytest.mark.parametrize("name", PLANS)
def test_largest_and_one_more(name):
    with jax.enable_x64(True):
        largest, larger = PLANS[name](LARGEST_SIZE), PLANS[name](LARGEST_SIZE + STEP)
    assert largest.kernel not in (XLA, COMPOSED), largest.reason
    assert larger.kernel in (XLA, COMPOSED)
    assert "count to 2^29, got" in larger.reason


@pytest.mark.parametrize(
    "name, words",
    [
        ("rows", "rows (m)"),
        ("k", "columns (k)"),
        ("n", "columns (n)"),
        ("groups", "matrices (g)"),
        ("contracted rows", "rows (m)"),
        ("FP8 k", "columns (k)"),
        ("rows of batches", "rows of all batches"),
        ("groups of batches", "groups of all batches"),
    ],
)
def test_reasons_name_the_dimension(name, words):
    size = LARGEST_SIZE + STEP
    assert f" {words} = {size}" in PLANS[name](size).reason


@pytest.mark.parametrize(
    "lhs, rhs, words",
    [
        ((MOST + 1, 8), (1, 8, 8), f"lhs of shape ({MOST + 1}, 8) has {MOST + 1} rows"),
        ((8, MOST + 1), (1, MOST + 1, 8), f"lhs of shape (8, {MOST + 1}) has {MOST + 1} columns"),
        ((8, 8), (1, 8, MOST + 1), f"rhs of shape (1, 8, {MOST + 1}) has {MOST + 1} columns"),
        ((8, 8), (MOST + 1, 8, 8), f"rhs of shape ({MOST + 1}, 8, 8) has {MOST + 1} matrices"),
    ],
)
def test_what_int32_does_not_count_is_named(lhs, rhs, words):
    operands = array(*lhs), array(*rhs), integers(rhs[0])
    with pytest.raises(NotImplementedError) as raised:
        jax.eval_shape(jgg.ragged_dot, *operands)
    text = str(raised.value)
    assert text.startswith(f"ragged_dot: {words}, beyond the limit {MOST} (2^31 - 1) of int32")


def test_other_functions_name_their_operands():
    many, sizes = array(MOST + 1, 16), integers(1)
    matrix, wide = array(1, 16, 16), array(1, 16, MOST + 1)
    for name, call, *operands in (
        ("(scaled_)?ragged_dot: lhs", jgg.fp8_ragged_dot, many, matrix, sizes),
        ("gated_ragged_dot: x", jgg.gated_ragged_dot, many, matrix, matrix, sizes),
        ("gated_ragged_dot: wi_0", jgg.gated_ragged_dot, array(8, 16), wide, wide, sizes),
        ("ragged_dot: lhs", jgg.ragged_dot, many, packed(1, 16, 64), sizes),
    ):
        with pytest.raises(NotImplementedError, match=f"^{name} of shape .* (rows|columns), "):
            jax.eval_shape(call, *operands)


def test_the_public_function_is_named_if_kernels_are_asked_for():
    call = partial(jgg.ragged_dot, implementation="cuda")
    operands = array(LARGEST_SIZE + 8, 8), array(1, 8, 8), integers(1)
    lowered = jax.jit(call).trace(*operands)
    with pytest.raises(NotImplementedError, match=r"for ragged_dot \(ragged_noncontracting\): "):
        lowered.lower(lowering_platforms=("cuda",))


def test_batches_of_rows():
    assert gather(8, batch=(MOST_ROW_BATCHES,)).kernel_problem is not None
    assert str(MOST_ROW_BATCHES) in gather(8, batch=(MOST_ROW_BATCHES + 1,)).reason


def test_quantising_one_more_row_for_transposed_blocks():
    """Kernels that contract quantised rows also count the rows that fill up blocks."""
    assert scaled_contracting(LARGEST_SIZE // 128).kernel_problem is not None
    reason = scaled_contracting(LARGEST_SIZE // 128 + 1).reason
    assert f"blocks of 128 = {LARGEST_SIZE + 128}" in reason


def test_a_shared_buffer_may_be_larger():
    """The gradients of an FP8 layer are slices of one vector. Here it has over 2^31 elements."""
    tokens, columns, hidden, experts, choices = 8192, 4096, 14336, 8, 8
    x = jax.ShapeDtypeStruct((tokens, columns), BF16)
    logits = jax.ShapeDtypeStruct((tokens, experts), F32)
    wi = jax.ShapeDtypeStruct((experts, columns, hidden), BF16)
    wo = jax.ShapeDtypeStruct((experts, hidden, columns), BF16)

    def loss(x, logits, *weights):
        routing = jgg.moe.route(logits, choices)
        y = jgg.moe.dropless_mlp(x, routing, *weights, recipe=jgg.Recipe(), implementation="cuda")
        return y.sum(dtype=F32)

    gradient = jax.grad(loss, (0, 2, 3, 4))
    plans = jgg.explain(gradient, x, logits, wi, wi, wo).plans
    assert plans and all(plan.kernel_problem is not None for plan in plans)
    shapes = [x.aval.shape for x in _values(jax.make_jaxpr(gradient)(x, logits, wi, wi, wo).jaxpr)]
    assert any(len(shape) == 1 and shape[0] > 2**31 for shape in shapes)


def _values(jaxpr):
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _values(inner)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jgg.ragged_dot(x, jnp.zeros((1, 8, 8), x.dtype), jnp.zeros(1, jnp.int32)),
        lambda x: fp8.quantize_rows(x, dtype=E4M3, power_of_two=False, implementation=None),
    ],
)
def test_others_run_the_reference(call):
    """Calls larger than kernels take run the reference, which has no limit, on a GPU too."""
    x = jax.ShapeDtypeStruct((LARGEST_SIZE + 8, 8), BF16)
    text = jax.jit(call).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_grouped_gemm." not in text


def test_kernels_count_as_far_as_plans_say():
    header = Path(__file__).parents[2] / "csrc" / "largest_sizes.h"
    text = header.read_text()
    assert 1 << int(re.search(r"kMostSize = int64_t\{1\} << (\d+)", text)[1]) == LARGEST_SIZE
    assert int(re.search(r"kMostRowBatches = (\d+)", text)[1]) == MOST_ROW_BATCHES
