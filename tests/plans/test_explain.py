"""`explain` lists a function's kernels and tiles, or says why no kernel runs."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE, TileConfig
from jax_grouped_gemm._src.ragged.tiles import NARROW_TILE, STREAM_K_TILE
from tests.support.dtypes import E4M3, E5M2
from tests.support.ops import CONTRACTING, NONCONTRACTING, OPS
from tests.support.plans import how

NUM_SMS = 132


def shapes(m, k, n, g, dtype=jnp.bfloat16):
    return (
        jax.ShapeDtypeStruct((m, k), dtype),
        jax.ShapeDtypeStruct((g, k, n), dtype),
        jax.ShapeDtypeStruct((g,), jnp.int32),
    )


def only_plan(function, *arguments, **options) -> jgg.Plan:
    (plan,) = jgg.explain(function, *arguments, **options).plans
    return plan


class TestWhatIsFound:
    def test_nothing(self):
        explanation = jgg.explain(jnp.sin, 1.0)
        assert explanation.plans == ()
        assert "no grouped matmuls" in str(explanation)

    def test_products_of_jax(self):
        """For calls of `jax.lax.ragged_dot`, `explain` says how to switch to our function."""

        @jax.jit
        def scanned(lhs, rhs, sizes):
            return jax.lax.scan(lambda c, x: (c, jax.lax.ragged_dot(x, rhs, sizes)), 0, lhs[None])

        operands = shapes(512, 128, 256, 4)
        stock = jgg.explain(scanned, *operands)
        assert (stock.plans, stock.of_jax) == ((), 1)
        assert "ragged_dot runs 1 product without a plan; jgg.adapters.replace_lax()" in str(stock)
        with jgg.adapters.replace_lax():
            ours = jgg.explain(scanned, *operands)
        assert (len(ours.plans), ours.of_jax) == (1, 0)
        assert "replace_lax" not in str(ours)

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
        lines = {plan.product: str(plan).splitlines()[0] for plan in explanation.plans}
        forward, dgrad, wgrad = (lines[name] for name in ("forward", "dgrad", "wgrad"))
        assert forward.startswith("forward: ragged_noncontracting bfloat16[512, 128] x ")
        assert dgrad.startswith("dgrad: ") and "bfloat16[4, 128, 256]^T -> " in dgrad
        assert wgrad.startswith("wgrad: ragged_contracting ") and "^T" not in forward + wgrad

    def test_cotangents_of_cotangents_have_no_label(self):
        def loss(lhs, rhs, sizes):
            return jnp.sum(jgg.ragged_dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)

        def second(lhs, rhs, sizes):
            return jnp.sum(jax.grad(loss)(lhs, rhs, sizes).astype(jnp.float32) ** 2)

        plans = jgg.explain(jax.grad(second), *shapes(512, 128, 256, 4)).plans
        assert {"forward", "dgrad", None} == {plan.product for plan in plans}

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

    def test_arguments_that_are_no_arrays_are_static(self):
        lhs, rhs, sizes = shapes(512, 32, 48, 2, jnp.float32)
        stored = jax.ShapeDtypeStruct((2, 48, 32), jnp.float32)
        plan = only_plan(jgg.ragged_dot, lhs, rhs, sizes, "highest")
        assert plan.terms == 3
        plan = only_plan(
            jgg.ragged_dot,
            *(lhs, stored, sizes),
            precision="highest",
            preferred_element_type=jnp.bfloat16,
            transpose_rhs=True,
            implementation="cuda",
        )
        assert plan.terms == 3 and plan.problem.rhs == "gnk"
        assert plan.problem.out_dtype == jnp.bfloat16
        plan = only_plan(jgg.ragged_dot, lhs, rhs, sizes, implementation="xla")
        assert how(plan) == "xla"
        recipe = jgg.Recipe(dgrad="bf16")
        assert how(only_plan(jgg.fp8_ragged_dot, lhs, rhs, sizes, recipe=recipe)) == "kernel"

    def test_arrays_among_others_in_one_argument(self):
        def function(options, lhs):
            return jgg.ragged_dot(lhs, options["rhs"], options["sizes"], options["precision"])

        lhs, rhs, sizes = shapes(512, 32, 48, 2, jnp.float32)
        plan = only_plan(function, dict(rhs=rhs, sizes=sizes, precision="highest"), lhs)
        assert plan.terms == 3

    def test_all_workspaces(self):
        def function(lhs, rhs, sizes):
            return jgg.ragged_dot(lhs, rhs, sizes), jgg.ragged_dot(lhs, rhs, sizes, "highest")

        explanation = jgg.explain(function, *shapes(8192, 2048, 2048, 2, jnp.float32))
        less, more = (plan.workspace_bytes for plan in explanation.plans)
        assert explanation.workspace_bytes == less + more > more > less
        assert str(explanation).endswith(f"workspace {less + more} bytes in all, {more} at a time")


class TestPath:
    def test_tma(self):
        plan = only_plan(jgg.ragged_dot, *shapes(1000, 512, 1024, 8))
        assert (how(plan), plan.reason) == ("kernel", "")
        assert plan.tile is not None

    @pytest.mark.parametrize(
        "op, majors, k, n, kernel",
        [
            (NONCONTRACTING, {}, 511, 1024, dict(k=512, n=1024)),
            (NONCONTRACTING, {}, 512, 1023, dict(k=512, n=1024)),
            (NONCONTRACTING, dict(transpose_lhs=True), 511, 1024, dict(lhs="mk", m=101, k=512)),
            (NONCONTRACTING, dict(transpose_rhs=True), 511, 1024, dict(rhs="gnk", k=512, n=1024)),
            (CONTRACTING, {}, 511, 1023, dict(k=512, n=1024)),
            (CONTRACTING, dict(transpose_rhs=True), 512, 1023, dict(rhs="mn", m=101, n=1024)),
        ],
    )
    def test_copied(self, op, majors, k, n, kernel):
        lhs, rhs, _ = op.shapes(101, k, n, 4)
        lhs = lhs[::-1] if majors.get("transpose_lhs") else lhs
        rhs = (*rhs[:-2], rhs[-1], rhs[-2]) if majors.get("transpose_rhs") else rhs
        lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in (lhs, rhs))
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        plan = only_plan(partial(op.call.__wrapped__, **majors), lhs, rhs, sizes)
        assert how(plan) == "copies"
        assert {name: getattr(plan.kernel_problem, name) for name in kernel} == kernel
        assert "16 bytes" in plan.reason

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
    @pytest.mark.parametrize(
        "op, majors, reason",
        [
            (NONCONTRACTING, dict(transpose_lhs=True), "lhs with dimensions m/k"),
            (CONTRACTING, dict(transpose_lhs=True), "lhs with dimensions m/k"),
            (CONTRACTING, dict(transpose_rhs=True), "rhs with dimensions m/n"),
        ],
    )
    def test_contiguous_rows_are_transposed(self, op, majors, reason, dtype):
        lhs, rhs, _ = op.shapes(4096, 512, 1024, 4)
        lhs = lhs[::-1] if majors.get("transpose_lhs") else lhs
        rhs = rhs[::-1] if majors.get("transpose_rhs") else rhs
        lhs, rhs = (jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs, rhs))
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        function = partial(op.call.__wrapped__, implementation="cuda", **majors)
        plan = only_plan(function, lhs, rhs, sizes)
        assert (how(plan), plan.reason) == ("copies", f"the kernels need {reason} in memory")

    @pytest.mark.parametrize("dtypes", list(itertools.product((E4M3, E5M2), repeat=2)))
    def test_one_of_two_e5m2_operands_is_split(self, dtypes):
        shapes = (512, 256), (512, 2), (4, 256, 384), (4, 2, 3)
        types = dtypes[0], jnp.float32, dtypes[1], jnp.float32
        arrays = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, types, strict=True)]
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        function = partial(jgg.scaled_ragged_dot, implementation="cuda")
        plan = only_plan(function, *arrays, sizes)
        reads_parts = "split into two arrays of float8_e4m3fn" in plan.reason
        assert reads_parts == (dtypes == (E5M2, E5M2))

    @pytest.mark.parametrize(
        "options, dtype, reason",
        [
            ({}, jnp.float64, "float64"),
            ({}, jnp.complex64, "complex64"),
            (dict(implementation="xla"), jnp.bfloat16, "was asked for"),
            (dict(preferred_element_type=jnp.float64), jnp.bfloat16, "float64"),
            (dict(precision="BF16_BF16_F32_X3"), jnp.bfloat16, "BF16_BF16_F32_X3"),
        ],
    )
    def test_reference(self, options, dtype, reason):
        with jax.enable_x64(True):
            plan = only_plan(partial(jgg.ragged_dot, **options), *shapes(64, 32, 48, 2, dtype))
        assert how(plan) == "xla"
        assert reason in plan.reason and reason in str(plan)
        assert plan.tile is None and plan.workspace_bytes == 0

    @pytest.mark.parametrize("m, k", [(0, 32), (64, 0)])
    def test_zeros(self, m, k):
        plan = only_plan(jgg.ragged_dot, *shapes(m, k, 48, 2))
        assert how(plan) == "nothing" and plan.tile is None

    def test_sizes_that_no_kernel_counts_to(self):
        plan = only_plan(jgg.ragged_dot, *shapes(2**30, 128, 128, 4))
        assert how(plan) == "xla"
        assert plan.reason == f"the kernels count to 2^29, got rows (m) = {2**30}"


class TestFloat32:
    """Operands in float32 are multiplied as one or two float16 parts, held in the workspace."""

    M, K, N, G = 144, 32, 48, 2

    @pytest.fixture(autouse=True)
    def passes(self):
        """Makes small products split operands in passes, as plans do only for larger products."""
        with jgg.use_tiles(forward=DEFAULT_TILE, dgrad=DEFAULT_TILE):
            yield

    def plan(self, function=jgg.ragged_dot):
        return only_plan(function, *shapes(self.M, self.K, self.N, self.G, jnp.float32))

    @pytest.mark.parametrize(
        "precision, terms",
        [
            (None, 1),
            ("default", 1),
            ("high", 3),
            ("highest", 3),
            ("tensorfloat32", 3),
            (("default", "highest"), 3),
            (("default", "default"), 1),
        ],
    )
    def test_precision_decides_the_terms(self, precision, terms):
        plan = self.plan(partial(jgg.ragged_dot, precision=precision))
        assert how(plan) == "kernel" and plan.terms == terms
        assert f"{terms} products of float16 parts" in str(plan)

    def test_default_precision_of_the_context(self):
        with jax.default_matmul_precision("float32"):
            assert self.plan().terms == 3

    @pytest.mark.parametrize("precision, parts", [("default", 1), ("highest", 2)])
    def test_workspace_holds_the_parts(self, precision, parts):
        plan = self.plan(partial(jgg.ragged_dot, precision=precision))
        elements = self.M * self.K + self.G * self.K * self.N
        few = 5 * 256 + 4 * self.M
        assert 2 * parts * elements <= plan.workspace_bytes <= 2 * parts * elements + few

    @pytest.mark.parametrize("op", OPS, ids=repr)
    @pytest.mark.parametrize("batched", list(np.ndindex(2, 2, 2)))
    @pytest.mark.parametrize("precision, terms", [("default", 1), ("highest", 3)])
    def test_workspace_is_what_the_handler_wants(
        self, op, batched, precision, terms, schedules, rng
    ):
        m, k, n = (8 * int(x) for x in rng.integers((17, 1, 1), 40))
        lhs, rhs, _ = op.shapes(m, k, n, self.G)
        arguments = [
            jax.ShapeDtypeStruct((3, *shape) if b else shape, dtype)
            for shape, dtype, b in zip(
                (lhs, rhs, (self.G,)), (jnp.float32, jnp.float32, jnp.int32), batched, strict=True
            )
        ]
        call = partial(op.call.__wrapped__, precision=precision)
        if any(batched):
            call = jax.vmap(call, in_axes=[0 if b else None for b in batched])
        plan = only_plan(call, *arguments)
        problem = plan.kernel_problem
        assert plan.workspace_bytes == schedules.float32_workspace_bytes(
            op is CONTRACTING,
            *problem.batched,
            *(problem.batch or (1,)),
            problem.g,
            problem.m,
            problem.k,
            problem.n,
            terms,
        )

    def test_gradients_have_the_precision_of_the_product(self):
        def loss(lhs, rhs, sizes):
            return jnp.sum(jgg.ragged_dot(lhs, rhs, sizes, "highest") ** 2)

        arguments = shapes(self.M, self.K, self.N, self.G, jnp.float32)
        plans = jgg.explain(jax.grad(loss, (0, 1)), *arguments).plans
        assert [plan.terms for plan in plans] == [3, 3, 3]

    def test_operands_shared_by_a_batch_with_its_own_groups_have_parts_for_each(self):
        lhs, rhs, sizes = shapes(self.M, self.K, self.N, self.G, jnp.float32)
        batch_of_sizes = jax.ShapeDtypeStruct((3, *sizes.shape), sizes.dtype)
        plan = only_plan(jax.vmap(jgg.ragged_dot, (None, None, 0)), lhs, rhs, batch_of_sizes)
        parts = 2 * (3 * self.M * self.K + self.G * self.K * self.N)
        assert parts <= plan.workspace_bytes <= parts + 5 * 256 + 3 * 4 * self.M

    @pytest.mark.parametrize("k, kernel_k", [(32, 32), (36, 40), (31, 32)])
    def test_rows_of_parts_are_multiples_of_16_bytes(self, k, kernel_k):
        plan = only_plan(jgg.ragged_dot, *shapes(self.M, k, self.N, self.G, jnp.float32))
        assert plan.kernel_problem.k == kernel_k
        assert how(plan) == ("kernel" if k == kernel_k else "copies")

    def test_other_operands_have_none(self):
        plan = only_plan(
            partial(jgg.ragged_dot, precision="highest"),
            *shapes(self.M, self.K, self.N, self.G, jnp.bfloat16),
        )
        assert plan.terms == 0 and "parts" not in str(plan)


class TestTile:
    """The plan chooses the tile, unless the primitive has the parameter `tile`."""

    SIZES = (512, 128, 256, 4)

    def plan(self, tile=None, dtype=jnp.bfloat16, op=NONCONTRACTING):
        lhs, rhs, _ = (jax.ShapeDtypeStruct(s, dtype) for s in op.shapes(*self.SIZES))
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        return only_plan(partial(op.call.__wrapped__, tile=tile), lhs, rhs, sizes)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize("op", OPS, ids=repr)
    def test_default(self, op, dtype):
        assert self.plan(op=op, dtype=dtype).tile == NARROW_TILE

    @pytest.mark.parametrize("op", OPS, ids=repr)
    def test_asked_for(self, op):
        tile = DEFAULT_TILE
        plan = self.plan(tile, op=op)
        assert plan.tile == tile
        assert f"tile {tile} (overridden), grid " in str(plan)

    def test_is_kept_by_vmap_and_jvp(self):
        lhs, rhs, _ = (
            jax.ShapeDtypeStruct((3, *s), jnp.bfloat16) for s in NONCONTRACTING.shapes(*self.SIZES)
        )
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        tile = STREAM_K_TILE
        call = jax.vmap(partial(NONCONTRACTING.call.__wrapped__, tile=tile), (0, 0, None))

        def tangents(lhs, rhs, sizes):
            return jax.jvp(lambda lhs, rhs: call(lhs, rhs, sizes), (lhs, rhs), (lhs, rhs))

        plans = jgg.explain(tangents, lhs, rhs, sizes).plans
        assert [plan.tile for plan in plans] == [tile] * 3

    def test_is_not_that_of_the_cotangents(self):
        op = NONCONTRACTING
        lhs, rhs, out = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in op.shapes(*self.SIZES))
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        tile = STREAM_K_TILE

        def function(lhs, rhs, sizes, cotangent):
            call = partial(op.call.__wrapped__, tile=tile)
            return jax.vjp(lambda lhs, rhs: call(lhs, rhs, sizes), lhs, rhs)[1](cotangent)

        plans = jgg.explain(function, lhs, rhs, sizes, out).plans
        assert [plan.tile for plan in plans] == [tile, NARROW_TILE, NARROW_TILE]

    @pytest.mark.parametrize(
        "tile, dtype",
        [
            (TileConfig(tile_m=128, tile_n=256, cluster=1), jnp.bfloat16),
            (TileConfig(tile_m=64, tile_n=256, cluster=2), jnp.float16),
            (TileConfig(tile_m=128, tile_n=256, cluster=2, stream_k=True), jnp.float32),
        ],
    )
    def test_that_is_not_compiled(self, tile, dtype):
        with pytest.raises(ValueError, match=f"the tile {tile} for .*not compiled.*128x256"):
            self.plan(tile, dtype)


class TestPrediction:
    @pytest.mark.parametrize("op", OPS, ids=repr)
    @pytest.mark.parametrize(
        "m, k, n, g", [(8, 8, 8, 1), (8192, 4096, 1536, 8), (512, 64, 40, 128)]
    )
    def test_bounds(self, op, m, k, n, g):
        lhs, rhs, _ = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in op.shapes(m, k, n, g))
        plan = only_plan(op.call, lhs, rhs, jax.ShapeDtypeStruct((g,), jnp.int32))
        assert 0 < plan.utilization <= 1
        assert 0 < plan.grid <= NUM_SMS and plan.grid % plan.tile.cluster == 0
        assert plan.workspace_bytes >= 0

    def test_full_waves_are_better_than_partial_ones(self):
        tile = only_plan(jgg.ragged_dot, *shapes(1024, 512, 1024, 8)).tile
        full = shapes(NUM_SMS * tile.tile_m, 512, tile.tile_n, 1)
        over = shapes((NUM_SMS + 1) * tile.tile_m, 512, tile.tile_n, 1)
        assert only_plan(jgg.ragged_dot, *full).utilization == 1
        assert only_plan(jgg.ragged_dot, *over).utilization < 0.6
