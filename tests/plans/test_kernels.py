"""Tables of kernels: a row says how a kernel divides its work, and a plan takes one row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.device import H200, Target
from jax_grouped_gemm._src.fp8.dot.primitive import weight_gradient
from jax_grouped_gemm._src.fp8.formats import IN_BLOCKS
from jax_grouped_gemm._src.fp8.products import Fp8Products
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.mlp import plan as plan_mlp
from jax_grouped_gemm._src.op import ops
from jax_grouped_gemm._src.plan import XLA, Table, TileConfig, TiledKernel
from jax_grouped_gemm._src.ragged import plan as plan_ragged
from jax_grouped_gemm._src.ragged.plan import plan_product
from jax_grouped_gemm._src.ragged.tiles import NARROW_TILE, SIXTEEN_BITS
from jax_grouped_gemm._src.tile_choices import TileChoices

PINGPONG_SIZES = TileConfig(tile_m=128, tile_n=192, cluster=2)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


PRODUCT = array(4096, 2048), array(8, 2048, 1024), array(8, dtype=jnp.int32)


@pytest.mark.parametrize("schedule", ["cooperative", "pingpong"])
def test_the_schedule_is_that_of_the_table_whatever_the_tile(schedule, monkeypatch, extension):
    kernel = TiledKernel(tile=PINGPONG_SIZES, schedule=schedule)
    monkeypatch.setattr(plan_ragged, "KERNELS", Table((kernel,)))
    (plan,) = jgg.explain(jgg.ragged_dot, *PRODUCT).plans
    assert plan.kernel == kernel and f"kernel {schedule}_128x192" in str(plan)
    product = jax.jit(lambda *operands: jgg.ragged_dot(*operands))
    text = product.trace(*PRODUCT).lower(lowering_platforms=("cuda",)).as_text()
    assert f'kind = "{schedule}"' in text and "tile_n = 192" in text


def test_says_why_kernels_are_passed_over():
    (plan,) = jgg.explain(jgg.ragged_dot, *PRODUCT, preferred_element_type=jnp.float32).plans
    reasons = dict(x.removesuffix(")").split(" (") for x in plan.passed_over)
    names = {kernel.name for kernel in SIXTEEN_BITS if kernel != plan.kernel}
    assert set(reasons) == names and "passed over: pingpong_128x192 (" in str(plan)
    assert reasons["pingpong_128x192"] == "only for weight gradients that are not added up"
    assert reasons["stream_k_128x256"] == "not faster"
    (plan,) = jgg.explain(jgg.ragged_dot, *PRODUCT, batch_invariant=True).plans
    assert "stream_k_128x256 (not batch invariant)" in plan.passed_over


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_float32_passes_over_kernels_of_its_own_accuracy(precision):
    operands = [array(*x.shape, dtype=jnp.float32) for x in PRODUCT[:2]]
    (plan,) = jgg.explain(jgg.ragged_dot, *operands, PRODUCT[2], precision=precision).plans
    assert plan.passed_over == ("swapped_64x128 (not faster)",)


def test_says_nothing_of_other_kernels_where_a_tile_is_asked_for():
    with jgg.use_tiles(forward=NARROW_TILE):
        (plan,) = jgg.explain(jgg.ragged_dot, *PRODUCT).plans
    assert plan.tile == NARROW_TILE and not plan.passed_over


def test_a_list_passes_over_kernels_that_no_launch_takes():
    lhs, rhs = [array(64, 256, 1024)] * 2, [array(64, 1024, 64), array(64, 1024, 512)]
    (plan,) = jgg.explain(jgg.grouped_gemm, lhs, rhs).plans
    assert plan.passed_over == ("cooperative_128x128 (not faster)",)


def test_xla_is_a_kernel_without_a_tile():
    operands = (array(*x.shape, dtype=jnp.int8) for x in PRODUCT[:2])
    (plan,) = jgg.explain(jgg.ragged_dot, *operands, PRODUCT[2]).plans
    assert plan.kernel == XLA and plan.tile is None and "kernel xla (no kernel for" in str(plan)


@pytest.mark.parametrize("count", [66, 132, 264])
def test_a_product_that_reads_tokens_in_place_does_so_on_any_device(count):
    """A layer chooses to read in place when it is traced, so the plan may not choose copies."""
    tokens, m, k, n, groups = 8192, 102400, 12288, 768, 8
    fp8, scale = jnp.float8_e4m3fn, jnp.float32
    avals = [
        *(array(tokens, k, dtype=fp8), array(tokens, k // 128, dtype=scale)),
        *(array(groups, n, k, dtype=fp8), array(groups, n // 128, k // 128, dtype=scale)),
        *(array(x, dtype=jnp.int32) for x in (groups, 1, m)),
    ]
    params = dict(
        transpose_rhs=True,
        **IN_BLOCKS,
        preferred_element_type=np.dtype(jnp.bfloat16),
        fast_accumulation=False,
        implementation=None,
    )
    assert plan_fp8.reads_in_place(avals, params)
    target = Target(count) if count != H200.multiprocessors else H200
    plan = plan_product(plan_fp8.gathered, avals, params, target)
    assert plan.kernel == plan_fp8.GATHERED_KERNELS[0] and not plan.reason


@pytest.fixture
def planned():
    """Returns a list to which every plan appends the name of its operation."""
    names = []

    def counting(name, planner):
        def plan(*args):
            names.append(name)
            return planner(*args)

        return plan

    planners = {op: op.planner for op in ops.values()}
    for op, planner in planners.items():
        object.__setattr__(op, "planner", counting(op.name, planner))
    yield names
    for op, planner in planners.items():
        object.__setattr__(op, "planner", planner)


@pytest.mark.parametrize("recipe", [None, jgg.Recipe()], ids=["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_tracing_plans_nothing(recipe, tokens, planned):
    """Plans are made later, because tracing does not know for which device a program is."""

    def loss(x, logits, wi_0, wi_1, wo):
        y = moe.dropless_mlp(x, moe.route(logits, 4), wi_0, wi_1, wo, recipe=recipe)
        return jnp.sum(y.astype(jnp.float32))

    wi, wo = array(16, 512, 256), array(16, 256, 512)
    operands = array(tokens, 512), array(tokens, 16, dtype=jnp.float32), wi, wi, wo
    traced = jax.jit(jax.grad(loss, (0, 2, 3, 4))).trace(*operands)
    assert planned == []
    traced.lower(lowering_platforms=("cuda",))
    assert planned


def test_an_operation_that_is_made_of_others_has_no_plan_beside_theirs(planned, extension):
    products = Fp8Products(jgg.Recipe(), None, TileChoices())

    def gradient(lhs, rhs, sizes):
        offset = jnp.zeros(1, jnp.int32)
        operands = lhs, rhs, sizes, offset, np.dtype(np.float32)
        return weight_gradient(products, *operands, num_groups=8)

    operands = array(4096, 2048), array(4096, 1024), array(8, dtype=jnp.int32)
    jax.jit(gradient).trace(*operands).lower(lowering_platforms=("cuda",))
    assert planned == ["quantize_ragged", "quantize_ragged", "scaled_ragged_contracting"]


def test_the_products_of_packed_layers_are_planned_once(planned, monkeypatch, extension):
    of_product, products = plan_mlp.plan_packed_product, []

    def plan(problem, *args):
        products.append(problem.products)
        return of_product(problem, *args)

    monkeypatch.setattr(plan_mlp, "plan_packed_product", plan)
    wi, wo = (
        jax.eval_shape(lambda w: jgg.quantize(w, "mxfp4"), array(8, *shape))
        for shape in ((256, 384), (384, 256))
    )
    layer = jax.jit(lambda *operands: jgg.ragged_mlp(*operands))
    operands = array(32, 256), wi, wi, wo, array(8, dtype=jnp.int32)
    layer.trace(*operands).lower(lowering_platforms=("cuda",))
    assert planned == ["packed_mlp"] and products == [2, 1]
