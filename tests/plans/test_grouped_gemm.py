"""Plans for lists of products, and how `explain` reports them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.lists.grouped_gemm import plan as grouped_gemm_plan
from tests.support.dtypes import BF16
from tests.support.plans import how
from tests.support.products import FOUR_PROBLEMS, cutlass_like, mixed_layouts


def plan_of(shapes, dtype=BF16, **options) -> jgg.GroupedGemmPlan:
    lhs, rhs = (
        [jax.ShapeDtypeStruct((*g, *pick(m, k, n)), dtype) for *g, m, k, n in shapes]
        for pick in (lambda m, k, n: (m, k), lambda m, k, n: (k, n))
    )
    (plan,) = jgg.explain(partial(jgg.grouped_gemm, **options), lhs, rhs).plans
    return plan


def test_kernel():
    plan = plan_of([(4096, 1024, 4096), (2, 2048, 512, 2048)])
    assert (how(plan), plan.reason, plan.grid) == ("kernel", "", 132)
    assert 0.7 < plan.utilization <= 1
    (launch,) = plan.launches
    assert (launch.tile.tile_n, launch.problems) == (256, (0, 1))
    for part in ("grouped_gemm bfloat16 [1, 4096, 1024]", "host_precomputed", "balance"):
        assert part in str(plan)


def test_order():
    ks = [64, 512, 8, 0, 256]
    shapes = [(64, k, 64) for k in ks]
    assert plan_of(shapes).order == (1, 4, 0, 2)
    assert plan_of(shapes, sort_problems=False).order == (0, 1, 2, 4)


def test_schedulers():
    """The workspace holds a schedule that is computed on the host, or nothing."""
    shapes = [(1024, k, 1024) for k in (8192, 64, 4096, 128)] * 5
    device = plan_of(shapes, scheduler="device")
    host = plan_of(shapes, scheduler="host_precomputed")
    (launch,) = host.launches
    assert device.workspace_bytes == 0 and device.launches[0].schedule is None
    assert host.workspace_bytes == launch.schedule.nbytes == launch.schedule.size * 4
    assert launch.balance > device.launches[0].balance
    units = launch.schedule.reshape(-1, 2)
    units = units[units[:, 0] >= 0]
    # A result of 1024 x 1024 has 16 units of a cluster of two, or 64 units of one tile.
    per_problem = 16 if launch.tile.cluster == 2 else 64
    assert len(np.unique(units, axis=0)) == len(units) == 20 * per_problem


def test_a_single_round_needs_no_schedule():
    plan = plan_of([(64, 512, 64), (64, 8, 64)])
    assert plan.workspace_bytes == 0 and plan.launches[0].schedule is None


def test_sorting_evens_out_four_problems():
    steps = [plan_of(FOUR_PROBLEMS, sort_problems=sort).launches[0].steps for sort in (True, False)]
    assert steps[0] <= steps[1]


def test_small_problems_take_small_tiles():
    (launch,) = plan_of([(100, 128, 256, 128)]).launches
    assert launch.tile.tile_n == 128


def test_few_tiles_are_small_ones():
    """Lists with a tile or two for a multiprocessor take small tiles: an H200 was faster."""
    (launch,) = plan_of(FOUR_PROBLEMS).launches
    assert (launch.tile.tile_n, launch.clusters) == (128, 132)


@pytest.mark.parametrize("count, launches", [(79, 1), (80, 2), (300, 4)])
def test_launches(count, launches):
    plan = plan_of([(64, 8 * i, 64) for i in range(1, count + 1)])
    sizes = [len(launch.problems) for launch in plan.launches]
    assert len(sizes) == launches and max(sizes) - min(sizes) <= 1
    assert plan.order == tuple(range(count))[::-1]


def test_layouts_have_launches_of_their_own():
    plan = plan_of([(64, 64, 64)] * 8, **mixed_layouts(8))
    assert [launch.problems for launch in plan.launches] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert {str(launch)[:2] for launch in plan.launches} == {"NN", "NT", "TN", "TT"}


def test_padded():
    plan = plan_of([(64, 64, 64), (20, 10, 12)])
    assert how(plan) == "copies"
    for part in ("k=10", "n=12", "problem 1"):
        assert part in plan.reason
    assert "problem 0" not in plan.reason and "m=20" not in plan.reason


def test_nothing_to_do():
    plan = plan_of([(0, 4, 8), (8, 0, 8), (8, 8, 0)])
    assert how(plan) == "nothing" and not plan.launches


@pytest.mark.parametrize(
    "dtype, options, said",
    [
        (np.float64, dict(preferred_element_type=np.complex128), "float64 -> complex128"),
        (np.float64, dict(precision="BF16_BF16_F32_X3"), "X3"),
        (np.float64, dict(implementation="xla"), "was asked for"),
        (np.complex64, {}, "TF32"),
        (BF16, dict(implementation="xla"), "was asked for"),
        (BF16, dict(precision="BF16_BF16_F32_X3"), "X3"),
    ],
)
def test_reference(dtype, options, said):
    with jax.enable_x64(True):
        plan = plan_of([(8, 8, 8)], dtype, **options)
    assert how(plan) == "xla" and said in plan.reason


class TestFp64TensorCores:
    @pytest.mark.parametrize(
        "dtype, options, tile",
        [
            (np.float64, {}, 128),
            (np.float64, dict(precision="F64_F64_F64"), 128),
            (np.complex128, {}, 64),
            (np.complex64, dict(precision="highest"), 64),
            (np.complex64, dict(implementation="cuda"), 64),
        ],
    )
    def test_kernel(self, dtype, options, tile):
        """The kernels take operands of odd sizes as they are."""
        with jax.enable_x64(True):
            plan = plan_of([(4099, 1021, 4099), (2, 2047, 511, 2049)], dtype, **options)
        assert (how(plan), plan.reason, plan.workspace_bytes) == ("kernel", "", 0)
        assert plan.kernel_problem == plan.problem
        (launch,) = plan.launches
        assert launch.schedule is None and launch.problems == (0, 1)
        assert (launch.tile.tile_m, launch.tile.tile_n, launch.tile.cluster) == (tile, tile, 1)
        assert plan.grid == launch.clusters == 132 * (128 // tile)
        assert 0.8 < plan.utilization <= 1 and plan.utilization <= launch.balance
        assert "scheduler device" in str(plan)

    def test_small_results_have_small_tiles(self):
        with jax.enable_x64(True):
            for side, tile in ((64, 64), (128, 128)):
                assert plan_of([(side, 512, side)] * 128, np.float64).tile.tile_m == tile

    def test_order_and_launches(self):
        with jax.enable_x64(True):
            plan = plan_of([(64, k, 64) for k in (64, 512, 8, 0, 256)], np.float64)
            assert plan.order == (1, 4, 0, 2)
            plan = plan_of([(64, i, 64) for i in range(1, 301)], np.float64)
            assert plan.order == tuple(range(300))[::-1]
            assert [len(launch.problems) for launch in plan.launches] == [100] * 3
            plan = plan_of([(64, 64, 64)] * 8, np.float64, **mixed_layouts(8))
            assert [launch.problems for launch in plan.launches] == [(0, 4), (1, 5), (2, 6), (3, 7)]

    def test_predicted_steps(self):
        """A step is 128 bytes of k. A launch has 128 matrices at most. 264 blocks run at a time."""

        def steps(*shapes, dtype=np.float64):
            (launch,) = plan_of(shapes, dtype).launches
            assert launch.tile.tile_m == 64
            return launch.steps

        with jax.enable_x64(True):
            assert steps((60, 33, 60)) == 3
            assert steps((128, 60, 33, 60)) == 3
            assert steps((129, 60, 33, 60)) == 6
            assert steps((100, 60, 33, 60), (100, 60, 16, 60)) == 3 + 1
            # 53 of the 317 tiles come in a second round, after the shortest tiles of the first.
            shapes = [(3, 512, 16, 512), (125, 60, 8, 60)]
            assert steps(*shapes, dtype=np.complex128) == 2

    def test_nothing_to_do(self):
        with jax.enable_x64(True):
            plan = plan_of([(0, 4, 8), (8, 0, 8), (8, 8, 0)], np.float64)
        assert how(plan) == "nothing" and not plan.launches


def test_long_lists_are_described_in_a_few_words():
    assert len(str(plan_of([(7, 7, 7)] * 1000))) < 8000


def test_gradients_are_lists_of_products_too():
    def loss(lhs, rhs):
        return sum(jnp.sum(out.astype(jnp.float32)) for out in jgg.grouped_gemm(lhs, rhs))

    lhs = [jax.ShapeDtypeStruct((64, 32), BF16)] * 3
    rhs = [jax.ShapeDtypeStruct((32, 128), BF16)] * 3
    plans = jgg.explain(jax.grad(loss, (0, 1)), lhs, rhs).plans
    forms = sorted(str(launch)[:2] for plan in plans for launch in plan.launches)
    assert forms == ["NN", "NT", "TN"]


def test_thousands_of_problems_are_planned_in_seconds(rng):
    """Every program is planned, so planning must be fast."""
    shapes = cutlass_like(rng, 2000, 16)
    plan = plan_of(shapes)
    assert len(plan.order) + sum(0 in s for s in shapes) == 2000
    assert len(plan.launches) == -(-2000 // grouped_gemm_plan.MAX_PROBLEMS)
