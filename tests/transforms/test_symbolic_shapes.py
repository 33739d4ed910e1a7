"""`jax.export` with symbolic dimensions: one program for all sizes, on the CPU and for a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support.plans import how

export_program = functools.partial(export.export, disabled_checks=jgg.EXPORT_DISABLED_CHECKS)
GROUP_SIZES = np.array([5, 0, 3], np.int32)


def shaped(spec, dtype=jnp.float32):
    """Returns `jax.ShapeDtypeStruct`s for shapes such as "m, 8; 3, 8, n", which share symbols."""
    scope = export.SymbolicScope()
    return [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shape in spec.split("; ")
    ]


SIZES = jax.ShapeDtypeStruct(GROUP_SIZES.shape, jnp.int32)


def ragged_operands(rng, m, k=8, n=6):
    return (
        rng.standard_normal((m, k), np.float32),
        rng.standard_normal((3, k, n), np.float32),
        GROUP_SIZES,
    )


def squared_gradient(function):
    return jax.grad(lambda x, w, sizes: (function(x, w, sizes) ** 2).sum(), argnums=(0, 1))


class TestReference:
    @pytest.mark.parametrize(
        "function",
        [jgg.ragged_dot, squared_gradient(jgg.ragged_dot), squared_gradient(jgg.fp8_ragged_dot)],
        ids=["forward", "gradient", "fp8_gradient"],
    )
    def test_rows(self, function, rng):
        program = export_program(jax.jit(function))(*shaped("m, 8; 3, 8, 6"), SIZES)
        for m in (1, 9, 200):
            operands = ragged_operands(rng, m)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
                program.call(*operands),
                jax.jit(function)(*operands),
            )

    @pytest.mark.parametrize("function", [jgg.ragged_dot, jgg.fp8_ragged_dot])
    @pytest.mark.parametrize("k, n", [(8, 6), (300, 1)])
    def test_all_of_a_product(self, function, k, n, rng):
        program = export_program(jax.jit(function))(*shaped("m, k; 3, k, n"), SIZES)
        operands = ragged_operands(rng, 11, k, n)
        np.testing.assert_allclose(
            program.call(*operands), jax.jit(function)(*operands), rtol=1e-4, atol=1e-4
        )

    def test_batch(self, rng):
        function = jax.vmap(jgg.ragged_dot, in_axes=(0, 0, None))
        program = export_program(jax.jit(function))(*shaped("b, 9, 8; b, 3, 8, 6"), SIZES)
        lhs, rhs, _ = ragged_operands(rng, 9)
        operands = (np.stack([lhs, -lhs]), np.stack([rhs, rhs + 1]), GROUP_SIZES)
        np.testing.assert_allclose(program.call(*operands), function(*operands), rtol=1e-5)

    def test_accumulation(self, rng):
        program = export_program(jax.jit(jgg.ragged_dot_accumulate))(
            *shaped("3, 8, 6; m, 8; m, 6"), SIZES
        )
        x, dw, _ = ragged_operands(rng, 9)
        operands = (dw, x, rng.standard_normal((9, 6), np.float32), GROUP_SIZES)
        expected = jgg.ragged_dot_accumulate(*operands)
        np.testing.assert_allclose(program.call(*operands), expected, rtol=1e-5, atol=1e-5)

    def test_quantisers(self, rng):
        def quantize(x, sizes):
            return jgg.quantize_ragged(x, sizes), jgg.quantize_blockwise(x)

        program = export_program(jax.jit(quantize))(*shaped("m, 8"), SIZES)
        x, *_ = ragged_operands(rng, 9)
        (rows, plain), (expected_rows, expected) = (
            f(x, GROUP_SIZES) for f in (program.call, jax.jit(quantize))
        )
        for a, b in zip((*rows[:2], *plain), (*expected_rows[:2], *expected), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        # There may be more blocks than needed. Surplus blocks are like blocks without rows.
        num_blocks = len(expected_rows.values_t)
        values = np.asarray(rows.values_t, np.float32)
        np.testing.assert_array_equal(
            values[:num_blocks], np.asarray(expected_rows.values_t, np.float32)
        )
        assert (values[num_blocks:] == 0).all() and (rows.scales_t[num_blocks:] == 1).all()

    def test_moe_layer(self, rng):
        """One program serves any batch size and any length."""

        def layer(x, logits, wi_0, wi_1, wo):
            routing = moe.route(logits, 2)
            return moe.dropless_mlp(x, routing, wi_0, wi_1, wo), moe.auxiliary_losses(routing)

        program = export_program(jax.jit(layer))(
            *shaped("b, t, 8; b, t, 4; 4, 8, 6; 4, 8, 6; 4, 6, 8")
        )
        for b, t in [(2, 5), (1, 1)]:
            shapes = [(b, t, 8), (b, t, 4), (4, 8, 6), (4, 8, 6), (4, 6, 8)]
            operands = [rng.standard_normal(shape, np.float32) for shape in shapes]
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
                program.call(*operands),
                jax.jit(layer)(*operands),
            )


@pytest.mark.usefixtures("extension")
class TestKernels:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_rows_take_the_kernel(self, dtype):
        gradient = jax.grad(lambda x, w, s: jgg.ragged_dot(x, w, s).sum().astype(jnp.float32))
        program = export_program(jax.jit(gradient), platforms=["cuda"])(
            *shaped("m, 64; 3, 64, 128", dtype), SIZES
        )
        text = program.mlir_module()
        assert text.count("@jax_grouped_gemm.ragged_noncontracting") == 1
        assert "while" not in text

    def test_fp8_rows_take_the_kernels(self):
        program = export_program(jax.jit(jgg.fp8_ragged_dot), platforms=["cuda"])(
            *shaped("m, 64; 3, 64, 128", jnp.bfloat16), SIZES
        )
        text = program.mlir_module()
        for target in ("quantize_rows", "quantize_blocks", "scaled_ragged_noncontracting"):
            assert text.count(f"@jax_grouped_gemm.{target}") == 1

    @pytest.mark.parametrize(
        "function, operands, reason",
        [
            (jgg.ragged_dot, "9, k; 3, k, 8", "only m .* may be symbolic .* got k = k"),
            (jgg.ragged_dot, "9, 8; 3, 8, n", "only m .* may be symbolic .* got n = n"),
            (
                squared_gradient(jgg.ragged_dot),
                "m, 8; 3, 8, 8",
                "m of a weight gradient must be static, got m = m",
            ),
            (
                jax.vmap(jgg.ragged_dot, in_axes=(0, 0, None)),
                "b, 9, 8; b, 3, 8, 8",
                "the batch = b",
            ),
        ],
        ids=["k", "n", "weight_gradient", "batch"],
    )
    def test_what_must_be_static(self, function, operands, reason):
        """If a dimension must be static, the reference runs, and `explain` says why."""
        operands = (*shaped(operands, jnp.bfloat16), SIZES)
        assert any(
            re.search(reason, plan.reason) for plan in jgg.explain(function, *operands).plans
        )
        export_program(jax.jit(function), platforms=["cuda"])(*operands)

    def test_lists_must_be_static(self):
        def updates(a):
            return jgg.grouped_syrk(a), jgg.grouped_gemm(a, a, transpose_rhs=True)

        (a,) = shaped("2, n, 8")
        for plan in jgg.explain(updates, a).plans:
            assert how(plan) == "xla" and "static sizes, got (2, n, 8)" in plan.reason

    def test_insisting_says_what_must_be_static(self):
        insist = functools.partial(jgg.ragged_dot, implementation="cuda")
        with pytest.raises(NotImplementedError, match="must be static, got k = k"):
            export_program(jax.jit(insist), platforms=["cuda"])(*shaped("9, k; 3, k, 8"), SIZES)
