"""Plans of grouped rank-k and rank-2k updates, as `explain` tells them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.lists.rank_k import plan as rank_k_plan
from tests.support.families import rank_k_tile
from tests.support.plans import how
from tests.support.updates import SYR2K, SYRK


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


class TestExplain:
    def plan(self, function, *operands):
        (plan,) = jgg.explain(function, *operands).plans
        return plan

    def array(self, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def test_kernel(self):
        plan = self.plan(jgg.grouped_syrk, self.array(8, 2048, 1024))
        assert (how(plan), plan.reason) == ("kernel", "")
        assert 0 < plan.utilization <= 1 and plan.grid == 132
        assert "rank_k bfloat16 [8, 2048, 1024]" in str(plan)

    def test_padded(self):
        plan = self.plan(jgg.grouped_syrk, self.array(8, 20, 10))
        assert how(plan) == "copies" and "n=20" in plan.reason and "k=10" in plan.reason

    @pytest.mark.parametrize(
        "dtype, options, said",
        [
            (np.complex64, {}, "TF32"),
            (
                np.complex64,
                dict(precision="highest", preferred_element_type=np.complex128),
                "complex128",
            ),
            (np.float64, dict(preferred_element_type=np.float32), "float64 -> float32"),
            (np.float64, dict(precision="BF16_BF16_F32_X3"), "X3"),
            (jnp.bfloat16, dict(implementation="xla"), "was asked for"),
            (jnp.bfloat16, dict(precision="BF16_BF16_F32_X3"), "X3"),
        ],
    )
    def test_reference(self, dtype, options, said):
        array = self.array(2, 64, 64, dtype=dtype)
        plan = self.plan(partial(jgg.grouped_herk, **options), array)
        assert how(plan) == "xla" and said in plan.reason

    @pytest.mark.parametrize(
        "dtype, options, tile",
        [
            (np.float64, {}, 128),
            (np.complex128, {}, 64),
            (np.complex64, dict(precision="highest"), 64),
            (np.complex64, dict(implementation="cuda"), 64),
        ],
    )
    def test_fp64_tensor_cores(self, dtype, options, tile):
        array = self.array(16, 1023, 777, dtype=dtype)
        plan = self.plan(partial(jgg.grouped_her2k, **options), array, array)
        assert (how(plan), plan.reason) == ("kernel", "")
        assert (plan.tile.tile_m, plan.tile.tile_n, plan.tile.cluster) == (tile, tile, 1)
        assert plan.kernel_problem == plan.problem
        assert 0.9 < plan.utilization <= 1 and plan.grid == 132 * (128 // tile)

    def test_small_float64_results_have_small_tiles(self):
        for n, tile in ((64, 64), (128, 128)):
            arrays = 2 * [self.array(132, n, 512, dtype=np.float64)]
            plan = self.plan(partial(jgg.grouped_syr2k, implementation="cuda"), *arrays)
            assert plan.tile.tile_m == tile

    def test_empty_fp64_results(self):
        a = [self.array(0, 5, dtype=np.float64), self.array(2, 64, 0, dtype=np.float64)]
        (plan,) = jgg.explain(jgg.grouped_syrk, a).plans
        assert how(plan) == "kernel" and plan.grid == 2
        assert how(self.plan(jgg.grouped_syrk, self.array(3, 0, 4, dtype=np.float64))) == "nothing"

    @pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)
    @pytest.mark.parametrize(
        "shapes, tile_n",
        [
            ([(64, 256, 1024)], 128),
            ([(16, 512, 512)], 128),
            ([(16, 1024, 1024)], 256),
            ([(67, 256, 1024)], 256),
            ([(100, 128, 512)], 256),
            ([(20, 256, 1024), (5, 512, 256)], 128),
            (5 * [(2, 256, 1024)], 256),
        ],
    )
    def test_few_units_have_fine_tiles(self, update, shapes, tile_n):
        """Fine tiles are taken if all units run at once, and only for lists of a few stacks."""
        arrays = [self.array(*shape) for shape in shapes]
        plan = self.plan(lambda *a: update(list(a), list(a)), *arrays)
        assert (plan.tile.tile_m, plan.tile.tile_n) == (128, tile_n)

    @pytest.mark.parametrize("name", ["wide", "fine"])
    def test_a_tile_that_is_asked_for(self, name):
        """Derivatives take the tile that is asked for too, even if another tile would be faster."""
        tile = rank_k_plan.FINE_TILE if name == "fine" else rank_k_plan.RANK_K_TILE

        def loss(a, alpha):
            return jnp.sum(jgg.grouped_syrk(a, alpha=alpha).astype(jnp.float32))

        def tangent(*operands):
            return jax.jvp(loss, operands, operands)

        for n in (64, 264, 1032):
            operands = self.array(2, n, 72), self.array(dtype=jnp.float32)
            with rank_k_tile(name):
                plans = jgg.explain(tangent, *operands).plans
                jax.jit(jax.grad(loss, (0, 1))).trace(*operands).lower(lowering_platforms=("cpu",))
            assert len(plans) > 1 and {plan.tile for plan in plans} == {tile}

    def test_float32_has_no_fine_tiles(self):
        update = partial(jgg.grouped_syrk, implementation="cuda")
        plan = self.plan(update, self.array(16, 512, 512, dtype=np.float32))
        assert plan.tile.tile_n == 256

    def test_more_tiles_use_the_device_better(self):
        small = self.plan(jgg.grouped_syrk, self.array(1, 256, 1024))
        large = self.plan(jgg.grouped_syrk, self.array(8, 4096, 1024))
        assert small.utilization < 0.1 < 0.9 < large.utilization

    def test_gradient_has_the_rank_2k_update_only_forward(self):
        def loss(a):
            return jnp.sum(jgg.grouped_syrk(a).astype(jnp.float32) ** 2)

        plans = jgg.explain(jax.grad(loss), self.array(2, 64, 64)).plans
        assert [plan.problem.op for plan in plans] == ["rank_k"]


@pytest.mark.parametrize(
    "shape, fine",
    [
        # 384 matrices of each shape were measured. Both tiles were equally fast for 1024 rows.
        ((384, 512, 2048), True),
        ((384, 640, 2048), True),
        ((384, 768, 2048), True),
        ((384, 896, 2048), True),
        ((384, 768, 768), False),
        ((768, 512, 512), False),
        ((16, 1024, 1024), False),
        ((8, 2048, 2048), False),
    ],
    ids=str,
)
def test_many_small_results_take_the_tile_that_was_faster(shape, fine):
    a = jax.ShapeDtypeStruct(shape, jnp.float16)
    (plan,) = jgg.explain(partial(jgg.grouped_syrk, implementation="cuda"), a).plans
    assert (plan.tile == rank_k_plan.FINE_TILE) == fine
    assert 0 < plan.utilization <= 1


@pytest.mark.parametrize("shape", [(384, 768, 768), (768, 512, 512)], ids=str)
def test_so_do_many_that_add_c(shape):
    a = jax.ShapeDtypeStruct(shape, jnp.float16)
    call = partial(jgg.grouped_syrk, beta=0.5, symmetrize_output=True, implementation="cuda")
    (plan,) = jgg.explain(call, a, a).plans
    assert plan.tile == rank_k_plan.FINE_TILE
    product = partial(jgg.grouped_symm_product, symmetrize_output=True, implementation="cuda")
    (plan,) = jgg.explain(product, a, a).plans
    assert plan.tile == rank_k_plan.FINE_TILE
