"""Autotuning with a clock that the tests set."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.explain import planned_products
from jax_grouped_gemm._src.tuning.autotune import (
    MARGIN,
    PRODUCTS_A_RUN,
    ROUNDS,
    Candidate,
    product_chain,
    queued_seconds,
)
from jax_grouped_gemm._src.tuning.table import Build, TuningFile
from tests.support.aot import Target
from tests.support.tiles import A, B, C, add_tiles

M, K, N, G = 264, 128, 192, 4

LHS = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
RHS = jax.ShapeDtypeStruct((G, K, N), jnp.bfloat16)
SIZES = jax.ShapeDtypeStruct((G,), jnp.int32)


@pytest.fixture(autouse=True)
def more_tiles(monkeypatch):
    add_tiles(monkeypatch)


def loss(lhs, rhs, sizes):
    return jnp.sum(jgg.ragged_dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)


gradients = jax.grad(loss, (0, 1))


class Clock:
    """Says that the tiles of `favourites`, by op and layout of rhs, are twice as fast."""

    def __init__(self, favourites=None, default=A):
        self.favourites, self.default = favourites or {}, default
        self.timed: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> float:
        self.timed.append(candidate)
        problem = candidate.problem
        favourite = self.favourites.get((problem.op, problem.rhs), self.default)
        return 1e-3 if candidate.tile == favourite else 2e-3


def tiles(function, *arguments) -> list[jgg.TileConfig]:
    return [plan.tile for plan in jgg.explain(function, *arguments).plans]


def test_the_fastest_of_each_product_wins():
    clock = Clock(
        {
            ("ragged_noncontracting", "gkn"): A,
            ("ragged_noncontracting", "gnk"): B,
            ("ragged_contracting", "mn"): C,
        }
    )
    table = jgg.autotune(gradients, LHS, RHS, SIZES, timer=clock)
    with jgg.use_tiles(table):
        plans = jgg.explain(gradients, LHS, RHS, SIZES).plans
    assert {(p.problem.rhs, p.tile, p.chosen_by) for p in plans} == {
        ("gkn", A, "table"),
        ("gnk", B, "table"),
        ("mn", C, "table"),
    }


def test_every_candidate_is_timed_in_turn():
    clock = Clock()
    (plan,) = jgg.explain(jgg.ragged_dot, LHS, RHS, SIZES).plans
    jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, timer=clock)
    assert [c.tile for c in clock.timed] == list(plan.candidates) * ROUNDS
    assert {c.problem for c in clock.timed} == {plan.kernel_problem}


def test_times_are_the_median_of_a_product_without_the_first_round():
    seconds = [9.0, 5.0, 1.0, 2.0, 8.0, 3.0, 4.0]
    rounds = {}

    def timer(candidate):
        rounds[candidate.tile] = rounds.get(candidate.tile, -1) + 1
        return seconds[rounds[candidate.tile]]

    assert len(seconds) == ROUNDS
    (tuned,) = jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, timer=timer).entries.values()
    assert set(tuned.microseconds.values()) == {3.5 / PRODUCTS_A_RUN * 1e6}
    assert str(A) in tuned.microseconds


@pytest.mark.parametrize("advantage, wins", [(MARGIN / 2, False), (2 * MARGIN, True)])
def test_the_prediction_stays_unless_another_is_clearly_faster(advantage, wins):
    (predicted,) = tiles(jgg.ragged_dot, LHS, RHS, SIZES)
    assert predicted != C

    def timer(candidate):
        return {predicted: 1.0, C: 1 / (1 + advantage)}.get(candidate.tile, 2.0)

    # Not even what is chosen around the call counts as the prediction.
    with jgg.use_tiles(forward=C if not wins else predicted):
        table = jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, timer=timer)
    (tuned,) = table.entries.values()
    assert tuned.tile == (C if wins else predicted)


def test_problems_are_distinct_and_found_in_control_flow():
    def function(lhs, rhs, sizes):
        product = jax.jit(jgg.ragged_dot)
        first = product(lhs, rhs, sizes)
        second = jax.lax.cond(sizes[0] > 0, lambda: product(lhs, rhs, sizes), lambda: first)
        third = jax.checkpoint(jgg.ragged_dot)(lhs[: M - 8], rhs, sizes)
        return first, second, third, jgg.ragged_dot(lhs, rhs, sizes, implementation="reference")

    clock = Clock()
    table = jgg.autotune(function, LHS, RHS, SIZES, timer=clock)
    assert sorted(p.m for p in {c.problem for c in clock.timed}) == [M - 8, M]
    assert len(table.entries) == 2
    with jgg.use_tiles(table):
        assert tiles(function, LHS, RHS, SIZES) == [A, A, A, None]


def test_nothing_to_tune():
    table = jgg.autotune(jnp.sin, 1.0, timer=Clock())
    assert table == jgg.TuningTable({}) and "no tuned problems" in str(table)


def test_symmetric_updates_are_left_out():
    clock = Clock()
    jgg.autotune(jgg.grouped_syrk, RHS, timer=clock)
    assert not clock.timed


def test_keyword_arguments_are_those_of_the_function():
    def function(lhs, *, weights, counts):
        return jgg.ragged_dot(lhs, weights, counts)

    table = jgg.autotune(function, LHS, weights=RHS, counts=SIZES, timer=Clock())
    assert len(table.entries) == 1


class TestOperands:
    def operands(self, function, *arguments, **options):
        clock = Clock()
        jgg.autotune(function, *arguments, timer=clock, **options)
        first = clock.timed[0].operands()
        # All candidates of a problem are measured on the same arrays.
        assert all(
            c.operands() is first for c in clock.timed if c.problem == clock.timed[0].problem
        )
        return first

    def test_have_the_shapes_of_the_product(self):
        for lhs, rhs, sizes, offset in self.operands(jgg.ragged_dot, LHS, RHS, SIZES):
            assert (lhs.shape, lhs.dtype) == (LHS.shape, LHS.dtype)
            assert (rhs.shape, rhs.dtype) == (RHS.shape, RHS.dtype)
            assert (offset.shape, offset.dtype, offset[0]) == ((1,), jnp.int32, 0)
            assert 0.9 < jnp.std(lhs.astype(jnp.float32)) < 1.1
            assert sizes.dtype == jnp.int32

    def test_differ_between_the_products_of_a_run(self):
        sets = self.operands(jgg.ragged_dot, LHS, RHS, SIZES)
        assert len(sets) == PRODUCTS_A_RUN
        assert not jnp.array_equal(sets[0][0], sets[1][0])

    def test_groups_are_equal_by_default(self):
        sizes = self.operands(jgg.ragged_dot, LHS.update(shape=(M + 1, K)), RHS, SIZES)[0][2]
        assert sizes.sum() == M + 1 and sizes.max() - sizes.min() == 1

    def test_groups_as_given(self):
        given = np.array([100, 0, 7, 64])
        arguments = [x.update(shape=(2, *x.shape)) for x in (LHS, RHS, SIZES)]
        sets = self.operands(jax.vmap(jgg.ragged_dot), *arguments, group_sizes=given)
        for sizes in (operands[2] for operands in sets):
            np.testing.assert_array_equal(sizes, [given, given])

    @pytest.mark.parametrize("given", [[1, 2, 3], [[1, 2, 3, 4]], [1.0, 2.0, 3.0, 4.0]])
    def test_groups_of_another_number(self, given, tmp_path):
        cache = tmp_path / "tuning.json"
        clock = Clock()
        options = dict(cache=cache, group_sizes=given, timer=clock)
        with pytest.raises(ValueError, match="group_sizes must be 4 integers"):
            jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, **options)
        assert not clock.timed and not cache.exists()

    def test_of_scaled_products(self):
        values, scales, *_ = self.operands(jgg.fp8_ragged_dot, LHS, RHS, SIZES)[0]
        assert values.dtype == jnp.float8_e4m3fn and scales.dtype == jnp.float32
        assert jnp.isfinite(values.astype(jnp.float32)).all()


class TestRun:
    def test_computes(self):
        """Here with the reference: all that can go wrong but for the kernel."""
        done = {}

        def timer(candidate):
            if candidate.problem not in done:
                out = candidate.run()
                done[candidate.problem] = out.shape, int(out)
            return 1.0

        fp8_gradients = jax.grad(
            lambda *x: jnp.sum(jgg.fp8_ragged_dot(*x).astype(jnp.float32)), (0, 1)
        )
        for function in (gradients, fp8_gradients):
            jgg.autotune(function, LHS, RHS, SIZES, timer=timer)
        assert list(done.values()) == [((), 0)] * 6

    @pytest.mark.parametrize("sets", [1, 3])
    def test_is_a_chain_of_kernels_with_the_candidates_tile(self, sets, extension):
        pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA plugin is not installed")
        config = Path(__file__).parents[1] / "data" / "h200_target_config.txtpb"
        jaxpr = jax.make_jaxpr(jgg.ragged_dot)(LHS, RHS, SIZES).jaxpr
        ((eqn, plan),) = planned_products(jaxpr)
        chain = product_chain(eqn.primitive, eqn.params | {"tile": B})
        offset = jax.ShapeDtypeStruct((1,), jnp.int32)
        operands = (LHS, RHS, SIZES, offset) * sets

        def function(*operands):
            return chain([operands[i : i + 4] for i in range(0, len(operands), 4)])

        program = Target(config.read_text()).compile(function, *operands)
        calls = program.calls
        assert len(calls) == PRODUCTS_A_RUN
        for call in calls:
            assert "tile_m = 64 : i32" in call.text and "tile_n = 96 : i32" in call.text
        # One after the other: the sizes of each depend on the last result. One is kept at a time.
        sizes = [call.operands[2] for call in calls]
        assert len(set(sizes)) == PRODUCTS_A_RUN
        one_result = M * N * 2
        assert program.temporary_bytes < 2 * one_result + 2**12

    def test_clock_queues_until_it_is_long_enough(self, monkeypatch):
        now, runs = 0.0, 0

        def run(_):
            nonlocal now, runs
            now += 1e-3
            runs += 1
            return jnp.zeros(())

        monkeypatch.setattr("time.perf_counter", lambda: now)
        seconds = queued_seconds(Candidate(None, A, run, lambda: None))
        assert seconds == pytest.approx(1e-3)
        assert runs == 1 + 2 + 4 + 8


class TestCache:
    @pytest.fixture
    def cache(self, tmp_path):
        return tmp_path / "tuning.json"

    def test_keeps_what_was_measured(self, cache):
        first, second = Clock(), Clock(default=B)
        table = jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, cache=cache, timer=first)
        assert jgg.load_tuning(cache).entries == table.entries
        larger = jgg.autotune(gradients, LHS, RHS, SIZES, cache=str(cache), timer=second)
        assert {c.problem.rhs for c in first.timed} == {"gkn"}
        assert {c.problem.rhs for c in second.timed} == {"gnk", "mn"}
        assert sorted(t.tile.tile_m for t in larger.entries.values()) == [64, 64, 192]
        assert jgg.load_tuning(cache).entries == larger.entries

    def test_of_another_build_is_not_used(self, cache):
        table = jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, timer=Clock())
        build = Build("NVIDIA H100", jgg.__version__, "x")
        TuningFile(cache).add(build, table.entries)
        clock = Clock(default=C)
        jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, cache=cache, timer=clock)
        assert clock.timed
        file = TuningFile(cache)
        assert file.entries(file.read(), build) == table.entries
        assert [t.tile for t in jgg.load_tuning(cache).entries.values()] == [C]

    def test_keeps_what_was_measured_before_an_interruption(self, cache):
        clock = Clock()

        def timer(candidate):
            if candidate.problem.out == "gkn":
                raise KeyboardInterrupt
            return clock(candidate)

        with pytest.raises(KeyboardInterrupt):
            jgg.autotune(gradients, LHS, RHS, SIZES, cache=cache, timer=timer)
        assert len(jgg.load_tuning(cache).entries) == 1

    def test_damaged_is_an_error_and_stays(self, cache):
        cache.write_text("{")
        clock = Clock()
        with pytest.raises(ValueError, match="damaged"):
            jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, cache=cache, timer=clock)
        assert cache.read_text() == "{" and not clock.timed

    def test_nothing_is_written_without_one(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, timer=Clock())
        assert not list(tmp_path.iterdir())


def test_without_a_suitable_device_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="compute capability 9.0.*cpu"):
        jgg.autotune(jgg.ragged_dot, LHS, RHS, SIZES, cache=tmp_path / "tuning.json")
    assert not list(tmp_path.iterdir())
