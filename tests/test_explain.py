"""What `explain` says of a function: which kernels, with which tiles, and why not."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from ops import CONTRACTING, NONCONTRACTING, OPS

import jax_grouped_gemm as jgg

NUM_SMS = 132


def shapes(m, k, n, g, dtype=jnp.bfloat16):
    return (
        jax.ShapeDtypeStruct((m, k), dtype),
        jax.ShapeDtypeStruct((g, k, n), dtype),
        jax.ShapeDtypeStruct((g,), jnp.int32),
    )


def only_plan(function, *arguments) -> jgg.Plan:
    (plan,) = jgg.explain(function, *arguments).plans
    return plan


class TestWhatIsFound:
    def test_nothing(self):
        explanation = jgg.explain(jnp.sin, 1.0)
        assert explanation.plans == ()
        assert "no grouped matmuls" in str(explanation)

    def test_gradient(self):
        def loss(lhs, rhs, sizes):
            return jnp.sum(jgg.ragged_dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)

        explanation = jgg.explain(jax.grad(loss, (0, 1)), *shapes(512, 128, 256, 4))
        problems = [plan.problem for plan in explanation.plans]
        assert sorted(p.op for p in problems) == ["ragged_contracting"] + 2 * [
            "ragged_noncontracting"
        ]
        # The cotangent of lhs reads rhs as it is stored, with n contracted instead of k.
        assert [p.rhs for p in problems if p.op == "ragged_noncontracting"].count("gnk") == 1
        assert str(explanation).count("bfloat16[512, 128]") == 3

    def test_inside_control_flow(self):
        def function(lhs, rhs, sizes):
            product = jax.jit(jgg.ragged_dot)
            lhs, _ = jax.lax.scan(lambda x, _: (product(x, rhs, sizes), None), lhs, length=3)
            lhs = jax.lax.cond(lhs[0, 0] > 0, lambda: product(lhs, rhs, sizes), lambda: lhs)
            return jax.checkpoint(product)(lhs, rhs, sizes)

        assert len(jgg.explain(function, *shapes(64, 32, 32, 2)).plans) == 3

    def test_keyword_arguments(self):
        lhs, rhs, sizes = shapes(64, 32, 32, 2)
        assert len(jgg.explain(jgg.ragged_dot, lhs, rhs=rhs, group_sizes=sizes).plans) == 1


class TestPath:
    def test_tma(self):
        plan = only_plan(jgg.ragged_dot, *shapes(1000, 512, 1024, 8))
        assert (plan.path, plan.reason) == ("tma", "")
        assert plan.tile is not None

    @pytest.mark.parametrize(
        "op, majors, k, n, kernel",
        [
            (NONCONTRACTING, {}, 511, 1024, dict(k=512, n=1024)),
            (NONCONTRACTING, {}, 512, 1023, dict(k=512, n=1024)),
            (NONCONTRACTING, dict(transpose_lhs=True), 511, 1024, dict(lhs="km", m=104, k=511)),
            (NONCONTRACTING, dict(transpose_rhs=True), 511, 1024, dict(rhs="gnk", k=512, n=1024)),
            (CONTRACTING, {}, 511, 1023, dict(k=512, n=1024)),
            (CONTRACTING, dict(transpose_rhs=True), 512, 1024, dict(rhs="nm", m=104, n=1024)),
        ],
    )
    def test_copied(self, op, majors, k, n, kernel):
        lhs, rhs, _ = op.shapes(101, k, n, 4)
        lhs = lhs[::-1] if majors.get("transpose_lhs") else lhs
        rhs = (*rhs[:-2], rhs[-1], rhs[-2]) if majors.get("transpose_rhs") else rhs
        lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in (lhs, rhs))
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        plan = only_plan(partial(op.call.__wrapped__, **majors), lhs, rhs, sizes)
        assert plan.path == "copied"
        assert {name: getattr(plan.kernel_problem, name) for name in kernel} == kernel
        assert "16 bytes" in plan.reason

    @pytest.mark.parametrize(
        "options, dtype, reason",
        [
            ({}, jnp.float32, "float32"),
            (dict(implementation="reference"), jnp.bfloat16, "reference"),
            (dict(preferred_element_type=jnp.float64), jnp.bfloat16, "float64"),
            (dict(precision="BF16_BF16_F32_X3"), jnp.bfloat16, "BF16_BF16_F32_X3"),
        ],
    )
    def test_reference(self, options, dtype, reason):
        with jax.enable_x64(True):
            plan = only_plan(partial(jgg.ragged_dot, **options), *shapes(64, 32, 48, 2, dtype))
        assert plan.path == "reference"
        assert reason in plan.reason and reason in str(plan)
        assert plan.tile is None and plan.workspace_bytes == 0

    @pytest.mark.parametrize("m, k", [(0, 32), (64, 0)])
    def test_zeros(self, m, k):
        plan = only_plan(jgg.ragged_dot, *shapes(m, k, 48, 2))
        assert plan.path == "zeros" and plan.tile is None


class TestPrediction:
    @pytest.mark.parametrize("op", OPS, ids=repr)
    @pytest.mark.parametrize(
        "m, k, n, g", [(8, 8, 8, 1), (8192, 4096, 1536, 8), (512, 64, 40, 128)]
    )
    def test_bounds(self, op, m, k, n, g):
        lhs, rhs, _ = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in op.shapes(m, k, n, g))
        plan = only_plan(op.call, lhs, rhs, jax.ShapeDtypeStruct((g,), jnp.int32))
        assert 0 < plan.efficiency <= 1
        assert 0 < plan.grid <= NUM_SMS and plan.grid % plan.tile.cluster == 0
        assert plan.workspace_bytes >= 0

    def test_full_waves_are_better_than_partial_ones(self):
        tile = only_plan(jgg.ragged_dot, *shapes(1024, 512, 1024, 8)).tile
        full = shapes(NUM_SMS * tile.tile_m, 512, tile.tile_n, 1)
        over = shapes((NUM_SMS + 1) * tile.tile_m, 512, tile.tile_n, 1)
        assert only_plan(jgg.ragged_dot, *full).efficiency == 1
        assert only_plan(jgg.ragged_dot, *over).efficiency < 0.6
