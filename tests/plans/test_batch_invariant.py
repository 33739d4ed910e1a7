"""The kernels of batch-invariant calls, where a row's bits may not depend on other rows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.invariance import RULE, Invariant
from jax_grouped_gemm._src.ragged.primitive import NONCONTRACTING
from tests.support.ops import random

pytestmark = pytest.mark.plans_as_users_get_them

BF16, F32 = jnp.bfloat16, jnp.float32
COUNTS = (1, 16, 129, 1024, 8192)
SHAPES = [(14336, 4096, 8), (4096, 14336, 8), (2048, 768, 128), (2048, 64, 4), (520, 264, 3)]


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def packed(*shape, format="mxfp4"):
    return jax.eval_shape(lambda w: jgg.quantize(w, format), array(*shape))


def product(m, k, n, g, dtype=BF16, rhs=None, function=jgg.ragged_dot, **options):
    """Returns the plans of one product."""
    rhs = array(g, k, n, dtype=dtype) if rhs is None else rhs
    operands = array(m, k, dtype=dtype), rhs, array(g, dtype=jnp.int32)
    return jgg.explain(partial(function, **options), *operands).plans


def layer(tokens, d=2048, f=768, e=128, top_k=8, weights=None, gradient=False, **options):
    """Returns the plans of one layer, and with `gradient` those of its backward pass."""
    weights = weights or [array(e, d, f), array(e, d, f), array(e, f, d)]

    def run(x, experts, of_choices, *weights):
        routing = moe.Routing(jnp.zeros((tokens, e)), experts, of_choices)
        return moe.dropless_mlp(x, routing, *weights, **options)

    def gradients(*operands):
        y, vjp = jax.vjp(lambda x, *w: run(x, *operands[1:3], *w), operands[0], *operands[3:])
        return y, vjp(y)

    choices = array(tokens, top_k, dtype=jnp.int32), array(tokens, top_k, dtype=F32)
    operands = array(tokens, d), *choices, *weights
    return jgg.explain(gradients if gradient else run, *operands).plans


def names(plans):
    return [plan.kernel.name for plan in plans]


@pytest.mark.parametrize("k, n, g", SHAPES, ids=str)
def test_products_have_kernels_of_one_order(k, n, g):
    found = set()
    for m in COUNTS:
        (plan,) = product(m, k, n, g, batch_invariant=True)
        assert plan.kernel.in_order(plan.kernel_problem) and not plan.tile.stream_k
        assert RULE in str(plan)
        found |= set(names(product(m, k, n, g)))
    assert not any(RULE in str(plan) for plan in product(1, k, n, g))
    if (k, n, g) in (SHAPES[0], SHAPES[3], SHAPES[4]):  # default plans cut sums, or take XLA
        assert {name for name in found if "stream_k" in name or "xla" in name}


def test_float32_has_one_kernel():
    """One float32 kernel is batch invariant. The other gives all rows of a group one scale."""
    for m in COUNTS:
        (plan,) = product(m, 4096, 4096, 4, F32, batch_invariant=True)
        assert plan.kernel.name == "swapped_64x128"
    assert names(product(8192, 4096, 4096, 4, F32)) == ["cooperative_128x256"]


@pytest.mark.parametrize("format", ["mxfp4", "int4", "int8", "fp8", "fp8_128x128"])
def test_packed_weights_have_kernels_that_do_not_cut_sums(format):
    q = packed(8, 256, 384, format=format)
    few = "decoded_128x256" if format == "fp8_128x128" else "decoded_32x256"
    for m in COUNTS:
        expected = few if m <= 24 * 8 else "decoded_128x256"
        assert names(product(m, 256, 384, 8, rhs=q, batch_invariant=True)) == [expected]
    assert names(product(1, 256, 384, 8, rhs=q)) == ["streamed_16x128"]
    many = 8 * 2049  # without batch invariance, weights are dequantised
    assert names(product(many, 256, 384, 8, rhs=q, batch_invariant=True)) == ["decoded_128x256"]


def test_packed_weights_that_no_kernel_reads_for_many_rows():
    """Kernels for many rows need a k that 8 divides. Otherwise, weights are always unpacked."""
    q = packed(8, 100, 384)
    for m in COUNTS:
        found = names(product(m, 100, 384, 8, rhs=q, batch_invariant=True))
        assert found == ["unpack", "cooperative_128x256"] or found == [
            "unpack",
            "cooperative_128x128",
        ]
    assert names(product(1, 100, 384, 8, rhs=q)) == ["streamed_16x128"]


def test_layers_of_packed_weights_do_not_cut_sums():
    weights = [packed(8, 256, 384), packed(8, 256, 384), packed(8, 384, 256)]
    for tokens in COUNTS:
        found = layer(tokens, 256, 384, 8, 2, weights, batch_invariant=True)
        assert [plan.problem.op for plan in found] == ["packed_mlp"]
        assert names(found) == ["decoded_32x256" if tokens <= 16 else "decoded_128x256"]
        assert "streamed" not in str(found[0])


@pytest.mark.parametrize("gradient", [False, True])
def test_layers_have_kernels_of_one_order(gradient):
    for tokens in COUNTS:
        plans = layer(tokens, gradient=gradient, batch_invariant=True)
        assert len(plans) >= 2 or plans[0].problem.op == "decode_mlp"
        for plan in plans:
            sums_rows = (
                "contracting" in plan.problem.op.split("_non")[0] or "weight" in plan.problem.op
            )
            if sums_rows:  # plans of weight gradients, which sum rows, do not change
                assert RULE not in str(plan)
                continue
            assert plan.tile and plan.kernel.in_order(plan.kernel_problem) and RULE in str(plan)


def test_weight_gradients_are_as_without():
    def of(**options):
        plans = layer(1024, 4096, 14336, 8, 2, gradient=True, **options)
        return [str(plan) for plan in plans if RULE not in str(plan)]

    invariant = of(batch_invariant=True)
    assert invariant and all(plan in of() for plan in invariant)


def test_what_xla_adds_to_a_product_is_added_for_any_number_of_rows():
    """XLA adds biases for any number of tokens, because an epilogue's sums have other bits."""
    d, f, e = 256, 384, 8
    biases = tuple(array(*shape) for shape in ((e, f), (e, f), (e, d)))

    def ops(tokens, invariant):
        def run(x, rows, sizes, wi_0, wi_1, wo, *biases):
            options = dict(rows=rows, biases=biases, batch_invariant=invariant)
            return jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, **options)

        rows, sizes = array(2 * tokens, dtype=jnp.int32), array(e, dtype=jnp.int32)
        weights = array(e, d, f), array(e, d, f), array(e, f, d)
        plans = jgg.explain(run, array(tokens, d), rows, sizes, *weights, *biases).plans
        return [plan.problem.op for plan in plans]

    assert ops(1, False) != ops(8192, False)
    assert all(ops(tokens, True) == ops(8192, True) for tokens in COUNTS)


def test_gate_and_up_in_one_matrix_are_composed_for_any_number_of_rows():
    def kernels(m, invariant):
        run = partial(jgg.gated_ragged_dot, concatenated=True, batch_invariant=invariant)
        operands = array(m, 256), array(8, 256, 2 * 40), None, array(8, dtype=jnp.int32)
        return names(jgg.explain(run, *operands).plans)

    assert kernels(1, False) == ["few_rows_32x128"] and kernels(8192, False) == ["composed"]
    assert all(kernels(m, True) == ["composed"] for m in COUNTS)


def test_recipes_compute_in_fp8():
    recipe = jgg.Recipe()
    for m in COUNTS:
        plans = product(
            m, 512, 768, 8, function=jgg.fp8_ragged_dot, recipe=recipe, batch_invariant=True
        )
        plans += layer(m, 512, 768, 8, 2, gradient=True, recipe=recipe, batch_invariant=True)
        assert not any(plan.problem.op == "recipe_in_bf16" for plan in plans)
        for plan in plans:
            if RULE in str(plan):
                assert plan.kernel.in_order(plan.kernel_problem)
    assert "recipe_in_bf16" in [p.problem.op for p in layer(1, 512, 768, 8, 2, recipe=recipe)]


class TestErrors:
    @pytest.mark.parametrize("implementation", ["xla", "reference"])
    def test_xla(self, implementation):
        for run in (product, partial(product, function=jgg.fp8_ragged_dot)):
            with pytest.raises(
                ValueError, match=f"None or 'cuda' with batch_invariant.*{implementation}"
            ):
                run(8, 64, 64, 2, implementation=implementation, batch_invariant=True)
        with pytest.raises(ValueError, match="dropless_mlp: implementation must be None or 'cuda'"):
            layer(8, 64, 64, 2, 1, implementation=implementation, batch_invariant=True)

    def test_a_function(self):
        with pytest.raises(ValueError, match="implementation must be None or 'cuda'.*ragged_dot"):
            layer(8, 64, 64, 2, 1, implementation=jax.lax.ragged_dot, batch_invariant=True)

    def test_no_boolean(self):
        with pytest.raises(TypeError, match="ragged_dot: batch_invariant must be True or False"):
            product(8, 64, 64, 2, batch_invariant=1)
        with pytest.raises(TypeError, match="enabled must be True or False, got 1"):
            with jgg.batch_invariant(1):
                pass

    def test_one_scale_for_all_rows(self):
        lhs = jgg.quantize(jnp.ones((8, 256)), "fp8_tensor")
        rhs = jgg.quantize(jnp.ones((2, 256, 256)), "fp8_tensor", layout="rows")
        with pytest.raises(ValueError, match="lhs has one scale for all rows.*'fp8_row'"):
            with jgg.batch_invariant():
                jgg.explain(jgg.ragged_dot, lhs, rhs, jnp.array([5, 3]))

    def test_a_tile_that_cuts_sums(self):
        tile = jgg.TileConfig(128, 256, 2, stream_k=True)
        with jgg.use_tiles(forward=tile):
            assert product(512, 4096, 4096, 8)[0].tile == tile
            with pytest.raises(ValueError, match="use_tiles has the tile .*not batch invariant"):
                product(512, 4096, 4096, 8, batch_invariant=True)
        kept = jgg.TileConfig(128, 128, 2)
        with jgg.use_tiles(forward=kept):
            assert product(8192, 4096, 4096, 8, batch_invariant=True)[0].tile == kept

    def test_a_symbolic_number_of_tokens(self):
        (m,) = export.symbolic_shape("m")
        run = partial(jgg.gated_ragged_dot, batch_invariant=True)
        operands = array(m, 256), array(8, 256, 128), array(8, 256, 128), array(8, dtype=jnp.int32)
        with pytest.raises(
            NotImplementedError, match="batch_invariant is impossible for gated_ragg"
        ):
            jgg.explain(run, *operands)
        product(m, 256, 128, 8, batch_invariant=True)  # this product is possible


class TestContext:
    def test_is_part_of_jits_key(self, rng):
        lhs, rhs = random(rng, (8, 16), F32), random(rng, (2, 16, 8), F32)
        traced = []

        @jax.jit
        def run(lhs, rhs):
            traced.append(None)
            return jgg.ragged_dot(lhs, rhs, jnp.array([3, 5]))

        run(lhs, rhs)
        with jgg.batch_invariant():
            run(lhs, rhs)
            run(lhs, rhs)
        run(lhs, rhs)
        assert len(traced) == 2

    def test_holds_for_all_inside(self):
        def of(run, *operands, **options):
            with jgg.batch_invariant():
                return run(*operands, **options)

        (plan,) = of(product, 8192, 14336, 4096, 8)
        assert RULE in str(plan)
        assert all(RULE in str(plan) for plan in of(layer, 8192))
        assert "recipe_in_bf16" not in [
            plan.problem.op for plan in of(layer, 1, 512, 768, 8, 2, recipe=jgg.Recipe())
        ]
        with pytest.raises(ValueError, match="None or 'cuda' with batch_invariant"):
            of(product, 8, 64, 64, 2, implementation="xla")
        general = partial(
            jgg.ragged_dot_general,
            ragged_dot_dimension_numbers=jax.lax.RaggedDotDimensionNumbers(
                (((1,), (1,)), ((), ())), (0,), (0,)
            ),
        )
        (plan,) = of(product, 512, 14336, 4096, 8, function=general)
        assert RULE in str(plan)

    def test_ends_inside(self):
        with jgg.batch_invariant(), jgg.batch_invariant(False):
            assert RULE not in str(product(8, 64, 64, 2)[0])

    def test_gradients_follow_the_forward_pass(self):
        def loss(x, w, sizes):
            with jgg.batch_invariant():
                y = jgg.ragged_dot(x, w, sizes)
            return y.astype(F32).sum()

        operands = array(8192, 4096), array(8, 4096, 14336), array(8, dtype=jnp.int32)
        plans = jgg.explain(jax.grad(loss, (0, 1)), *operands).plans
        assert {p.product: RULE in str(p) for p in plans} == dict(
            forward=True, dgrad=True, wgrad=False
        )

    def test_leaves_lists_alone(self):
        a = array(4, 256, 256)
        expected = jgg.explain(jgg.grouped_syrk, a).plans
        with jgg.batch_invariant():
            assert jgg.explain(jgg.grouped_syrk, a).plans == expected


def test_a_sum_is_not_split_over_devices():
    operands = array(64, 32), array(4, 32, 16), array(4, dtype=jnp.int32), array(1, dtype=jnp.int32)
    params = dict(transpose_lhs=False, transpose_rhs=False)

    def summed(implementation):
        dims = NONCONTRACTING.dims_of(
            operands, [array(64, 16)], dict(params, implementation=implementation)
        )
        return dims.summed(0)

    assert set(summed(None)) == {"k", "g"}
    for implementation in Invariant:
        assert summed(implementation) == ("g",)  # only one device adds a result that is not zero


def test_results_are_those_without(rng):
    """On the CPU, the reference ignores batch invariance, and does not promise equal bits."""
    lhs, rhs = random(rng, (40, 24), F32), random(rng, (3, 24, 16), F32)
    sizes = jnp.array([10, 0, 27])
    expected = jgg.ragged_dot(lhs, rhs, sizes)
    np.testing.assert_array_equal(jgg.ragged_dot(lhs, rhs, sizes, batch_invariant=True), expected)
    with pytest.raises(NotImplementedError, match="batch_invariant is impossible .* platform cpu"):
        jgg.ragged_dot(lhs, rhs, sizes, implementation="cuda", batch_invariant=True)
