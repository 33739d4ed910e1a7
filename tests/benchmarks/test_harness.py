"""Tests of the benchmarks' arithmetic: cases, checks of results, device times and ratios."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import struct
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import cases, check, measure, recorders, report, timing
from benchmarks.harness.inputs import Inputs, abstract_operands
from benchmarks.harness.peer import Call, InPlaceCall, NotOffered, Peer, Role
from benchmarks.harness.recorders import Activity, ClockRecorder, Sample, summarize


def all_cases() -> list[cases.Case]:
    return [
        cases.Case(shape, op, distribution)
        for shape in cases.SHAPES.values()
        for op in cases.OPS.values()
        for distribution in cases.DISTRIBUTIONS
    ]


def random_problem(rng: np.random.Generator, op: str, out_dtype: str = "float32"):
    shape = cases.Shape("random", *map(int, rng.integers([2, 1, 1, 1], [9, 700, 40, 40])))
    distribution = str(rng.choice(list(cases.DISTRIBUTIONS)))
    case = cases.Case(shape, cases.OPS[op], distribution, "float32", int(rng.integers(2**31)))
    problem = dataclasses.replace(case.problem, out_dtype=out_dtype)
    lhs, rhs, _ = (
        rng.standard_normal(operand.shape).astype(operand.dtype)
        for operand in abstract_operands(problem)
    )
    return problem, lhs, rhs, case.group_sizes


def group_loop(problem: cases.Problem, lhs, rhs, sizes) -> np.ndarray:
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    out = np.zeros(problem.out_shape)
    for group, (start, end) in enumerate(cases.row_ranges(sizes)):
        if problem.contracting:
            out[group] = lhs[start:end].T @ rhs[start:end]
        else:
            weights = rhs[group].T if problem.transpose_rhs else rhs[group]
            out[start:end] = lhs[start:end] @ weights
    return out


@pytest.mark.parametrize("distribution", cases.DISTRIBUTIONS)
def test_sizes_fill_the_rows_and_repeat(rng, distribution):
    groups, rows, seed = (int(value) for value in rng.integers([1, 0, 0], [300, 9000, 2**31]))
    sizes = cases.group_sizes(distribution, groups, rows, seed)
    assert sizes.dtype == np.int32 and sizes.shape == (groups,)
    assert sizes.min() >= 0 and sizes.sum() == rows
    np.testing.assert_array_equal(sizes, cases.group_sizes(distribution, groups, rows, seed))


def test_distributions_differ_as_their_names_say():
    groups, rows = 128, 65536
    sizes = {name: cases.group_sizes(name, groups, rows) for name in cases.DISTRIBUTIONS}
    assert np.ptp(sizes["uniform"]) <= 1
    assert np.count_nonzero(sizes["one_hot"]) == 1
    names = ["uniform", "multinomial", "random", "lognormal", "zipf"]
    largest = [sizes[name].max() for name in names]
    assert np.all(np.diff(largest) > 0)


def test_every_case_is_a_consistent_product():
    for case in all_cases():
        problem = case.problem
        lhs, rhs, groups = (operand.shape for operand in abstract_operands(problem))
        assert lhs == cases.tensor_shape(case.shape, case.op.lhs)
        assert rhs == cases.tensor_shape(case.shape, case.op.rhs)
        assert groups == (case.shape.groups,)
        work = 2 * case.shape.rows * case.shape.k * case.shape.n
        assert cases.flops(problem, case.group_sizes) == work


@pytest.mark.parametrize("op", cases.OPS)
def test_bytes_count_what_must_move(rng, op):
    problem, lhs, rhs, sizes = random_problem(rng, op, "bfloat16")
    used = np.flatnonzero(sizes)
    read = lhs.nbytes + (rhs.nbytes if problem.contracting else rhs[used].nbytes)
    assert cases.written_bytes(problem) == 2 * np.prod(problem.out_shape)
    assert cases.unavoidable_bytes(problem, sizes) == read + cases.written_bytes(problem)


def test_shapes_are_selected_by_name_and_suite():
    chosen = cases.select_shapes(["dsv3_up", "main", "gpt_oss_up"])
    assert [shape.name for shape in chosen[:2]] == ["dsv3_up", "mixtral_up"]
    assert len(chosen) == len(set(chosen)) == len(cases.SUITES["main"]) + 1
    with pytest.raises(ValueError, match="'no_such_shape'"):
        cases.select_shapes(["no_such_shape"])


@pytest.mark.parametrize("op", cases.OPS)
def test_the_reference_is_a_loop_over_groups(rng, op):
    operands = random_problem(rng, op)
    expected = group_loop(*operands)
    np.testing.assert_allclose(check.reference(*operands), expected, atol=1e-4, rtol=1e-5)


def problem_of(dtype, precision="highest"):
    shape, op = cases.SHAPES["tiny"], cases.OPS["forward"]
    return cases.Case(shape, op, "uniform", dtype, precision=precision).problem


def test_one_bad_row_is_noticed(rng):
    expected = rng.standard_normal((20_000, 64)).astype(np.float32)
    rounded = jnp.asarray(expected, jnp.bfloat16)
    assert check.compare(rounded, expected).acceptable(problem_of("bfloat16"))
    row = int(rng.integers(len(expected)))
    for value in (rounded[row - 1], jnp.nan):
        assert not check.compare(rounded.at[row].set(value), expected).acceptable(
            problem_of("bfloat16")
        )


def test_float32_may_have_the_error_of_tf32_by_default_alone(rng):
    expected = rng.standard_normal((512, 64)).astype(np.float32)
    rounded = jnp.asarray(expected) * (1 + 2.0**-12)
    error = check.compare(rounded, expected)
    assert error.acceptable(problem_of("float32", "default"))
    assert not error.acceptable(problem_of("float32"))


def test_rows_that_must_be_zero_must_be_zero(rng):
    expected = rng.standard_normal((8, 16)).astype(np.float32)
    expected[3] = 0
    assert check.compare(expected, expected).acceptable(problem_of("float32"))
    almost = jnp.asarray(expected).at[3, 5].set(1e-20)
    assert not check.compare(almost, expected).acceptable(problem_of("float32"))


def test_device_time_is_the_union_of_activities():
    activities = [
        Activity(5_000, 9_000, "second"),
        Activity(1_000, 4_000, "first"),
        Activity(6_000, 7_000, "inside the second"),
        Activity(8_000, 11_000, "overlapping the second"),
    ]
    sample = summarize(activities)
    assert sample.us == pytest.approx(3 + 6)
    assert sample.activities[:2] == ("first", "second") and len(sample.activities) == 4
    assert summarize([]).us == 0
    # The time of a part is the sum of its activities, even if they overlap.
    parts = sample.parts(lambda name: "overlaps" if "overlap" in name else "others")
    assert parts == {"others": pytest.approx(3 + 4 + 1), "overlaps": pytest.approx(3)}
    assert Sample(1.0, None).parts(str) is None


class Library:
    """A library whose functions all succeed and record that they were called."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        def function(*arguments):
            self.called.append(name)
            return 0

        return function


@pytest.mark.parametrize("stays", [False, True])
def test_cupti_is_attached_once_or_for_each_case(stays, monkeypatch):
    library = Library()
    monkeypatch.setattr(recorders, "load_library", lambda *names: library)
    monkeypatch.setattr(recorders.ctypes, "CDLL", lambda name: Library())
    recorder = recorders.CuptiRecorder()
    recorder.stays_attached = stays
    for _ in range(3):
        with recorder:
            pass
        assert recorder.samples() == []
    assert library.called.count("cuptiSubscribe") == (1 if stays else 3)
    assert library.called.count("cuptiFinalize") == (0 if stays else 3)
    recorder.detach()
    recorder.detach()
    assert library.called.count("cuptiFinalize") == (1 if stays else 3)


def test_cupti_records_are_decoded():
    start, end = 1_700_000_000_123_456_789, 1_700_000_000_123_460_000
    name = ctypes.create_string_buffer(b"my_kernel")
    kernel = struct.pack("=I12xQQ72xQ", 10, start, end, ctypes.addressof(name))
    expected = {
        kernel: Activity(start, end, "my_kernel"),
        struct.pack("=I12xQQ", 1, start, end): Activity(start, end, "memcpy"),
        struct.pack("=I12xQQ", 2, start, end): Activity(start, end, "memset"),
        struct.pack("=I12xQQ", 3, start, end): None,
    }
    for record, activity in expected.items():
        buffer = ctypes.create_string_buffer(record, len(record))
        assert recorders.read_activity(ctypes.addressof(buffer)) == activity


def test_ratios_are_taken_within_a_round():
    # The chip slows down fourfold meanwhile. A ratio of two medians could mix fast and slow rounds.
    ours, peer = [1.0, 2.0, 4.0], [1.5, 3.0, 6.0]
    assert timing.median_ratio(peer, ours) == 1.5


class CountingRecorder(ClockRecorder):
    """Records the number that a call returns as the time of the call."""

    def record(self, call: Call) -> None:
        self._samples.append(Sample(call.run(), None))


def test_every_round_runs_every_call_once_and_the_first_is_dropped():
    log = []
    calls = {name: Call(lambda name=name: log.append(name) or len(log)) for name in "abc"}
    samples = timing.interleave(calls, CountingRecorder(), 4, lambda: None)
    rounds = [log[i : i + 3] for i in range(0, 15, 3)]
    assert len(log) == 15 and all(sorted(names) == list("abc") for names in rounds)
    for name in "abc":
        ran = [i + 1 for i, other in enumerate(log) if other == name]
        assert [sample.us for sample in samples[name]] == ran[1:]


def test_steps_in_place_follow_each_other_and_free_their_state_at_once(rng):
    # Otherwise gigabytes of the previous case would stay until the garbage collector runs.
    start, more = rng.standard_normal((2, 5), np.float32)
    gc.disable()
    try:
        call = InPlaceCall(lambda state, x: state + x, jnp.array(start), more)
        np.testing.assert_allclose(call.run(), start + 2 * more, rtol=1e-5, atol=1e-6)
        state = weakref.ref(call.state)
        del call
        assert state() is None
    finally:
        gc.enable()


@dataclasses.dataclass
class FakePeer(Peer):
    """A peer whose result is the reference's, distorted by `distort`."""

    name: str
    role: Role
    distort: object
    slow: bool = False

    def unavailable_reason(self):
        return None

    def prepare(self, problem, lhs, rhs, group_sizes):
        out = self.distort(check.reference(problem, lhs, rhs, group_sizes))
        return Call(lambda: out.astype(problem.out_dtype))


def refuse(_):
    raise NotOffered("not on Thursdays")


def break_down(_):
    raise RuntimeError("out of luck\nand more")


@pytest.mark.parametrize("op", ["forward", "wgrad_f32"])
def test_a_case_reports_who_was_right_wrong_absent_or_broken(op):
    case = cases.Case(cases.SHAPES["tiny"], cases.OPS[op], "one_hot")
    peers = [
        FakePeer("ours", Role.OURS, lambda out: out),
        FakePeer("right", Role.GROUPED, lambda out: out),
        FakePeer("wrong", Role.GROUPED, lambda out: out * 1.01),
        FakePeer("absent", Role.GROUPED, refuse),
        FakePeer("broken", Role.GROUPED, break_down),
    ]
    inputs = Inputs(case.shape, case.dtype, seed=1)
    work = measure.ragged_work(case, inputs)
    record = measure.measure(work, peers, ClockRecorder(), rounds=3, flush=lambda: None)
    record = json.loads(json.dumps(record))
    statuses = {name: peer["status"] for name, peer in record["peers"].items()}
    assert statuses == {
        "ours": "measured",
        "right": "measured",
        "wrong": "wrong",
        "absent": "skipped",
        "broken": "failed",
    }
    assert record["peers"]["absent"]["reason"] == "not on Thursdays"
    assert record["peers"]["broken"]["reason"] == "RuntimeError: out of luck"
    assert list(record["ratios"]) == ["right"]
    name, ratio = measure.best_grouped(record)
    assert name == "right" and ratio > 0
    table = report.ratios_table([record])
    assert case.name in table and "right" in table
    assert "out of luck" in report.missing_lines([record])


def test_a_peer_without_memory_beside_the_others_ends_no_case():
    """A peer that gets no memory once all peers are prepared fails alone. Other peers go on."""

    class Greedy(FakePeer):
        def prepare(self, problem, lhs, rhs, group_sizes):
            call, runs = super().prepare(problem, lhs, rhs, group_sizes), []

            def run():
                if runs:
                    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
                runs.append(None)
                return call.run()

            return Call(run)

    case = cases.Case(cases.SHAPES["tiny"], cases.OPS["forward"], "random")
    peers = [
        Greedy("stock", Role.GROUPED, lambda out: out),
        FakePeer("ours", Role.OURS, lambda out: out),
    ]
    work = measure.ragged_work(case, Inputs(case.shape, case.dtype, seed=1))
    record = measure.measure(work, peers, ClockRecorder(), rounds=3, flush=lambda: None)
    assert record["peers"]["ours"]["status"] == "measured"
    assert record["peers"]["stock"]["status"] == "failed"
    assert "RESOURCE_EXHAUSTED" in record["peers"]["stock"]["reason"]
