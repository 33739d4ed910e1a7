"""XLA's program for the FP8 operations on an H200: custom calls and nothing else."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import checkpoint_policies, moe
from jax_grouped_gemm._src.fp8 import formats
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.fp8.scaled import primitive
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from tests.support.aot import FREE
from tests.support.dtypes import BF16, E4M3, E5M2, F32
from tests.support.plans import how

M, K, N, G = 512, 256, 384, 4


def array(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


LHS, RHS, CT = array((M, K)), array((G, K, N)), array((M, N))
SIZES = array((G,), jnp.int32)


def with_cotangents(lhs, rhs, sizes, cotangent, **options):
    call = partial(jgg.fp8_ragged_dot, group_sizes=sizes, **options)
    out, vjp = jax.vjp(call, lhs, rhs)
    return out, vjp(cotangent.astype(out.dtype))


TABLES = {
    "scaled_ragged_noncontracting": plan_fp8.NONCONTRACTING_KERNELS,
    "scaled_ragged_contracting": plan_fp8.CONTRACTING_KERNELS,
}


@pytest.mark.parametrize("op", TABLES)
def test_plans_know_exactly_the_tiles_that_are_compiled(op, schedules):
    compiled = [config for config in schedules.kernel_configs() if config["op"] == op]
    whole = [choice.tile for choice in TABLES[op] if not choice.tile.stream_k]
    planned = [dict(op=op, **tile.sizes()) for tile in whole]
    assert compiled == planned


class TestQuantisers:
    @pytest.mark.parametrize("source", [BF16, jnp.float16, F32])
    @pytest.mark.parametrize("shape", [(M, K), (3, 77, 130)])
    def test_are_one_kernel(self, source, shape, h200):
        x = array(shape, source)
        for function, kernel in (
            (jgg.quantize_blockwise, "quantize_rows"),
            (partial(jgg.quantize_blockwise, block_shape=(128, 128)), "quantize_blocks"),
            (jgg.quantize_weights, "quantize_blocks"),
        ):
            program = h200.compile(function, x)
            assert program.kernels == {kernel: 1}
            assert program.opcodes <= FREE

    def test_ragged_is_one_kernel(self, h200):
        program = h200.compile(jgg.quantize_ragged, LHS, SIZES)
        assert program.kernels == {"quantize_ragged": 1}
        assert program.opcodes <= FREE

    @pytest.mark.parametrize("in_axes", [(0, None), (0, 0), (None, 0)])
    def test_vmap_of_ragged_is_one_kernel(self, in_axes, h200):
        operands = [
            array((3, *x.shape) if axis == 0 else x.shape, x.dtype)
            for x, axis in zip((LHS, SIZES), in_axes, strict=True)
        ]
        program = h200.compile(jax.vmap(jgg.quantize_ragged, in_axes), *operands)
        assert program.kernels == {"quantize_ragged": 1}
        assert program.opcodes <= FREE


class TestScaledProducts:
    @pytest.mark.parametrize(
        "scaling, lhs_scale",
        [("1x128", (M, 2)), ("1xk", (M, 1)), ("tensor", ()), ("1x128 column-major", (2, M))],
    )
    @pytest.mark.parametrize("rhs_scale", [(G, 3, 2), (G, N), (G,)])
    @pytest.mark.parametrize("out", [BF16, jnp.float16, F32])
    def test_are_one_kernel(self, scaling, lhs_scale, rhs_scale, out, h200):
        operands = array((M, K), E4M3), array(lhs_scale, F32), array((G, N, K), E5M2)
        function = partial(
            jgg.scaled_ragged_dot,
            lhs_scaling=scaling,
            transpose_rhs=True,
            preferred_element_type=out,
        )
        program = h200.compile(function, *operands, array(rhs_scale, F32), SIZES)
        assert program.kernels == {"scaled_ragged_noncontracting": 1}
        assert not re.search(r" (transpose|copy|convert)\(", program.hlo)

    def test_rhs_along_the_wrong_dimension_is_transposed_first(self, h200):
        operands = array((M, K), E4M3), array((), F32), array((G, K, N), E4M3), array((), F32)
        function = partial(jgg.scaled_ragged_dot, lhs_scaling="tensor")
        (plan,) = jgg.explain(function, *operands, SIZES).plans
        assert how(plan) == "copies" and "rhs with dimensions g/n/k" in plan.reason
        program = h200.compile(function, *operands, SIZES)
        assert program.kernels == {"scaled_ragged_noncontracting": 1}

    def test_of_two_operands_in_e5m2_are_two_kernels(self, h200):
        operands = array((M, K), E5M2), array((M, 2), F32), array((G, N, K), E5M2)
        function = partial(jgg.scaled_ragged_dot, transpose_rhs=True, implementation="cuda")
        program = h200.compile(function, *operands, array((G, 3, 2), F32), SIZES)
        assert program.kernels == {"scaled_ragged_noncontracting": 2}

    def test_of_layers_in_e5m2_alone(self, h200):
        """No kernel for two operands in E5M2 reads tokens in place or computes two gradients."""
        recipe = jgg.Recipe(forward_dtype=E5M2, gradient_dtype=E5M2)

        def loss(x, wi_0, wi_1, wo, logits):
            routing = moe.route(logits, 2)
            options = dict(recipe=recipe, implementation="cuda")
            y = moe.dropless_mlp(x, routing, wi_0, wi_1, wo, **options)
            return jnp.sum(y.astype(F32) ** 2)

        shapes = (1024, 512), *2 * [(8, 512, 256)], (8, 256, 512)
        operands = *(array(shape, BF16) for shape in shapes), array((1024, 8), F32)
        program = h200.compile(jax.grad(loss, (0, 1, 2, 3)), *operands)
        products = {name: n for name, n in program.kernels.items() if "scaled" in name}
        assert products.keys() <= {"scaled_ragged_noncontracting", "scaled_ragged_contracting"}
        assert all(n % 2 == 0 for n in products.values()) and sum(products.values()) >= 10

    @pytest.mark.parametrize("rows, matrices", [("fp8_row", "fp8_row"), ("fp8_tensor",) * 2])
    @pytest.mark.parametrize("fast", [False, True])
    def test_calls_say_how_sums_are_kept(self, rows, matrices, fast, h200):
        operands = array((M, K), BF16), array((G, N, K), BF16), SIZES
        precision = f"ANY_F8_ANY_F8_F32{'_FAST_ACCUM' * fast}"

        def product(x, w, sizes):
            x, w = jgg.quantize(x, rows), jgg.quantize(w, matrices, layout="rows")
            return jgg.ragged_dot(x, w, sizes, precision=precision, transpose_rhs=True)

        calls = h200.compile(product, *operands).calls
        texts = [call.text for call in calls if "scaled_ragged_noncontracting" in call.text]
        assert texts and all(f"fast_accumulation = {str(fast).lower()}" in x for x in texts)

    @pytest.mark.parametrize("k, n", [(40, 51), (37, 64)])
    def test_unaligned_rows_take_the_kernel(self, k, n, h200):
        operands = array((M, k), E4M3), array((M, 1), F32), array((G, n, k), E4M3)
        function = partial(jgg.scaled_ragged_dot, transpose_rhs=True, implementation="cuda")
        for scale in ((G, n), (G, 1, 1)):
            program = h200.compile(function, *operands, array(scale, F32), SIZES)
            assert program.kernels == {"scaled_ragged_noncontracting": 1}

    @pytest.mark.parametrize("mapped", [(1, 1, 1, 1, 1), (1, 0, 0, 0, 0), (0, 0, 0, 0, 1)])
    def test_vmap_is_one_kernel(self, mapped, h200):
        operands = array((M, K), E4M3), array((M, 2), F32), array((G, N, K), E4M3)
        operands += array((G, 3, 2), F32), SIZES
        operands = [
            array((3, *x.shape) if is_mapped else x.shape, x.dtype)
            for x, is_mapped in zip(operands, mapped, strict=True)
        ]
        function = partial(jgg.scaled_ragged_dot, transpose_rhs=True)
        in_axes = [0 if is_mapped else None for is_mapped in mapped]
        program = h200.compile(jax.vmap(function, in_axes), *operands)
        assert program.kernels == {"scaled_ragged_noncontracting": 1}

    @pytest.mark.parametrize(
        "op, kernel",
        [(op, kernel) for op in TABLES for kernel in TABLES[op]],
        ids=lambda x: getattr(x, "name", x),
    )
    def test_take_the_tile_that_is_asked_for(self, op, kernel, h200):
        tile = kernel.tile
        options = dict(preferred_element_type=np.dtype(BF16), implementation="cuda", tile=tile)
        if op == "scaled_ragged_noncontracting":
            shapes = ((M, K), E4M3), ((M, 2), F32), ((G, N, K), E4M3), ((G, 3, 2), F32)
            options |= dict(transpose_rhs=True, **formats.IN_BLOCKS)
        else:
            b = formats.row_blocks(M, G)
            shapes = ((b, K, 128), E4M3), ((b, K), F32), ((b, N, 128), E4M3), ((b, N), F32)
            options |= dict(num_rows=M, num_groups=G)
        operands = [array(*shape) for shape in shapes] + [SIZES, array((1,), jnp.int32)]
        program = h200.compile(partial(getattr(primitive, op), **options), *operands)
        assert program.kernels == {op: 1}
        (call,) = program.calls
        for name, size in tile.sizes().items():
            assert f"{name} = {size} : i32" in call.text
        if op == "scaled_ragged_noncontracting":
            assert f'kind = "{kernel.schedule}"' in call.text

    @pytest.mark.parametrize("groups, more", [(4, 0), (4, 1), (16, 0)])
    def test_few_rows_a_group_take_the_swapped_tile(self, groups, more, h200):
        m = plan_fp8.SWAPPED_MOST_ROWS * groups + more
        tile = DEFAULT_TILE if more else plan_fp8.SWAPPED_TILE
        operands = array((m, K), E4M3), array((m, 2), F32), array((groups, N, K), E4M3)
        operands += array((groups, 3, 2), F32), array((groups,), jnp.int32)
        function = partial(jgg.scaled_ragged_dot, transpose_rhs=True)
        (chosen,) = jgg.explain(function, *operands).plans
        assert (chosen.tile, chosen.chosen_by) == (tile, "default")
        assert set(chosen.candidates) == {choice.tile for choice in plan_fp8.NONCONTRACTING_KERNELS}
        (call,) = h200.compile(function, *operands).calls
        for name, size in tile.sizes().items():
            assert f"{name} = {size} : i32" in call.text

    def test_other_result_dtypes_take_the_reference(self, h200):
        operands = array((M, K), E4M3), array((), F32), array((G, N, K), E4M3), array((), F32)
        function = partial(
            jgg.scaled_ragged_dot,
            lhs_scaling="tensor",
            transpose_rhs=True,
            preferred_element_type=E4M3,
            implementation="cuda",
        )
        with pytest.raises(NotImplementedError, match="-> float8_e4m3fn: there are kernels for"):
            h200.compile(function, *operands, SIZES)


class TestTraining:
    def test_forward_alone_quantises_once_each(self, h200):
        program = h200.compile(jgg.fp8_ragged_dot, LHS, RHS, SIZES)
        assert program.kernels == {
            "quantize_rows": 1,
            "quantize_blocks": 1,
            "scaled_ragged_noncontracting": 1,
        }
        assert program.opcodes <= FREE

    @pytest.mark.parametrize("dtype", [BF16, F32])
    def test_gradients_are_kernels_and_nothing_else(self, dtype, h200):
        operands = LHS, array(RHS.shape, dtype), SIZES, CT
        program = h200.compile(partial(with_cotangents, preferred_element_type=BF16), *operands)
        assert program.kernels == {
            "quantize_ragged": 2,
            "quantize_blocks": 1,
            "scaled_ragged_noncontracting": 2,
            "scaled_ragged_contracting": 1,
        }
        assert program.opcodes <= FREE

    @pytest.mark.parametrize(
        "recipe, kernels",
        [
            (
                jgg.Recipe(wgrad="bf16"),
                {"quantize_rows": 2, "quantize_blocks": 1, "scaled_ragged_noncontracting": 2}
                | {"ragged_contracting": 1},
            ),
            (
                jgg.Recipe(dgrad="bf16"),
                {"quantize_ragged": 2, "quantize_blocks": 1, "scaled_ragged_noncontracting": 1}
                | {"scaled_ragged_contracting": 1, "ragged_noncontracting": 1},
            ),
            (
                jgg.Recipe("bf16", "bf16", "bf16"),
                {"ragged_noncontracting": 2, "ragged_contracting": 1},
            ),
        ],
    )
    def test_recipes(self, recipe, kernels, h200):
        program = h200.compile(partial(with_cotangents, recipe=recipe), LHS, RHS, SIZES, CT)
        assert program.kernels == kernels
        assert program.opcodes <= FREE

    def test_remat_quantises_nothing_twice(self, h200):
        def loss(lhs, rhs, sizes):
            return jnp.sum(jnp.sin(jgg.fp8_ragged_dot(lhs, rhs, sizes).astype(F32)))

        policy = checkpoint_policies.quantized_operands_saveable
        gradient = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1))
        kernels = h200.compile(gradient, LHS, RHS, SIZES).kernels
        assert (kernels["quantize_ragged"], kernels["quantize_blocks"]) == (2, 1)

    def test_mixture_of_experts(self, h200):
        """Tokens and the result's gradient are quantised before they are copied. Gate and up are
        one product in each pass."""

        def loss(x, logits, *weights):
            routing = moe.route(logits, 2)
            return jnp.sum(
                moe.dropless_mlp(x, routing, *weights, recipe=jgg.Recipe()).astype(F32) ** 2
            )

        operands = LHS, array((M, G)), *[RHS] * 2, array((G, N, K))
        program = h200.compile(jax.grad(loss, (0, 2, 3, 4)), *operands)
        assert program.kernels == {
            "quantize_rows": 2,
            "column_maxima": 2,
            "quantize_gathered": 2,
            "quantize_joined": 1,
            "quantize_blocks": 1,
            "scaled_ragged_noncontracting": 4,
            "scaled_ragged_contracting": 3,
            "sort_by_expert": 1,
            "dispatch_rows": 4,
            "combine_rows": 2,
            "quantize_hidden": 1,
            "quantize_joined_gradients": 1,
        }
        assert not re.search(r"= f8e4m3fn\S* (transpose|copy|fusion)\(", program.hlo)


def test_explain():
    explanation = jgg.explain(with_cotangents, LHS, RHS, SIZES, CT)
    assert [plan.problem.op for plan in explanation.plans] == [
        "scaled_ragged_noncontracting",
        "scaled_ragged_noncontracting",
        "scaled_ragged_contracting",
    ]
    assert {how(plan) for plan in explanation.plans} == {"kernel"}
    text = str(explanation)
    assert "float8_e4m3fn[512, 256] x float8_e4m3fn[4, 384, 256]^T -> bfloat16[512, 384]" in text
    assert "scaled by 1x128 and 128x128" in text and "scaled by 1x128 and 1x128" in text
