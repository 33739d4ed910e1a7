"""Measuring one case: prepare the peers, check their results, time them together."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from benchmarks import check
from benchmarks.cases import Case, Problem, flops, unavoidable_bytes, written_bytes
from benchmarks.device_activity import Sample
from benchmarks.inputs import Inputs
from benchmarks.peers.bandwidth import moved_bytes
from benchmarks.peers.base import Call, NotOffered, Peer, Role
from benchmarks.recorders import Recorder
from benchmarks.timing import HostTimes, host_times, interleave, median_ratio


@dataclass
class PeerResult:
    """What one peer did in one case. Without samples, `status` and `reason` say why."""

    role: Role
    status: str  # measured, skipped (not offered), failed (an error) or wrong (a bad result)
    reason: str = ""
    detail: str = ""
    prepare_s: float | None = None
    error: check.Error | None = None
    samples: list[Sample] = field(default_factory=list)
    host: HostTimes | None = None

    @property
    def us(self) -> list[float]:
        """Device microseconds, a value a round."""
        return [sample.us for sample in self.samples]

    def to_json(self, name: str, work: int) -> dict[str, object]:
        """Plain data with the derived numbers that a reader wants first."""
        result: dict[str, object] = {"role": self.role.value, "status": self.status}
        result |= {
            key: value
            for key in ("reason", "detail", "prepare_s")
            if (value := getattr(self, key)) not in ("", None)
        }
        if self.error:
            result["error"] = dataclasses.asdict(self.error)
        if self.samples:
            result |= _sample_summary(self.samples)
            if self.role == Role.BANDWIDTH:
                result["tbps"] = moved_bytes(name) / result["median_us"] / 1e6
            else:
                result["tflops"] = work / result["median_us"] / 1e6
        if self.host:
            result |= dataclasses.asdict(self.host)
        return result


def _sample_summary(samples: list[Sample]) -> dict[str, object]:
    us = [sample.us for sample in samples]
    summary: dict[str, object] = {"median_us": statistics.median(us), "us": us}
    launches = [sample.activities for sample in samples if sample.activities is not None]
    if launches:
        counts = [len(names) for names in launches]
        summary["kernels"] = statistics.median_low(counts)
        # A call launches the same work every round; if not, the attribution is suspect.
        summary["kernels_vary"] = min(counts) != max(counts)
        # A C++ template's name can be kilobytes long; its beginning tells kernels apart.
        summary["kernel_names"] = sorted({name[:80] for name in launches[-1]})
    return summary


def measure_case(
    case: Case,
    inputs: Inputs,
    peers: Iterable[Peer],
    recorder: Recorder,
    *,
    rounds: int,
    flush: Callable[[], None],
    measure_host: bool = True,
) -> dict[str, object]:
    """Measures the peers of one case against each other and returns plain data for the results."""
    problem = case.problem
    lhs, rhs, sizes = inputs.operands(case)
    expected = check.reference(problem, lhs, rhs, sizes)
    results: dict[str, PeerResult] = {}
    calls: dict[str, Call] = {}
    for peer in peers:
        result, call = _prepare(peer, problem, lhs, rhs, sizes, expected)
        results[peer.name] = result
        if call is not None:
            calls[peer.name] = call
    del expected

    for name, samples in interleave(calls, recorder, rounds, flush, case.seed).items():
        if min(sample.us for sample in samples) > 0:
            results[name].samples = samples
        else:
            results[name].status = "failed"
            results[name].reason = f"{recorder.name} saw no device activity in some rounds"
    if measure_host:
        for name, call in calls.items():
            if results[name].samples:
                results[name].host = host_times(call, statistics.median(results[name].us))
    return _record(case, results)


def _prepare(
    peer: Peer, problem: Problem, lhs, rhs, sizes, expected: jax.Array
) -> tuple[PeerResult, Call | None]:
    """A call of a peer that gives the right result, or the reason why there is none."""
    result = PeerResult(peer.role, "skipped")
    if reason := peer.unavailable_reason():
        result.reason = reason
        return result, None
    start = time.perf_counter()
    try:
        call = peer.prepare(problem, lhs, rhs, sizes)
        result.prepare_s = time.perf_counter() - start
        result.detail = call.detail
        if peer.role.solves_problem:
            result.error = check.compare(call.to_jax(call.run()), expected)
    except NotOffered as reason:
        result.reason = str(reason)
        return result, None
    except Exception as error:
        # One peer's failure, out of memory included, is a result and must not end the run.
        result.status, result.reason = "failed", _first_line(error)
        return result, None
    if result.error and not result.error.acceptable(problem):
        result.status, result.reason = "wrong", f"relative error {result.error.total:.1e}"
        return result, None
    result.status = "measured"
    return result, call


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _record(case: Case, results: Mapping[str, PeerResult]) -> dict[str, object]:
    problem, sizes = case.problem, case.group_sizes
    work, traffic = flops(problem, sizes), unavoidable_bytes(problem, sizes)
    written = written_bytes(problem)
    return {
        "case": case.name,
        "shape": dataclasses.asdict(case.shape),
        "op": case.op.name,
        "distribution": case.distribution,
        "dtype": case.dtype,
        "precision": case.precision,
        "out_dtype": problem.out_dtype,
        "flops": work,
        "bytes": traffic,
        "written_bytes": written,
        "group_sizes": {
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
            "empty": int(np.count_nonzero(sizes == 0)),
        },
        "peers": {name: result.to_json(name, work) for name, result in results.items()},
        "ratios": ratios(traffic, written, results),
    }


def ratios(traffic: int, written: int, results: Mapping[str, PeerResult]) -> dict[str, float]:
    """Median over the rounds of (another's time / our time): above one, we are faster.

    `byte_floor` is the time of a copy scaled to `traffic`, the bytes that must move; `write_floor`
    that of the faster of `fill` and `memset`, scaled to `written`, the part of them that is the
    result. `floor` is the largest, in each round, of those and the dense product's time. None can
    exceed one by more than noise.
    """
    ours = results.get(Role.OURS.value)
    if ours is None or not ours.samples:
        return {}
    times = {name: result.us for name, result in results.items() if result.samples}
    copying = [times.pop(name) for name in ("copy",) if name in times]
    writing = [times.pop(name) for name in ("fill", "memset") if name in times]
    if copying:
        times["byte_floor"] = _scaled(copying, traffic / moved_bytes("copy"))
    if writing:
        times["write_floor"] = _scaled(writing, written / moved_bytes("fill"))
    floors = [
        times[name] for name in ("byte_floor", "write_floor", "cublas_dense") if name in times
    ]
    if floors:
        times["floor"] = [max(bounds) for bounds in zip(*floors, strict=True)]
    del times["ours"]
    return {name: median_ratio(us, ours.us) for name, us in times.items()}


def _scaled(alternatives: list[list[float]], scale: float) -> list[float]:
    """The fastest alternative of each round, times `scale`."""
    return [min(times) * scale for times in zip(*alternatives, strict=True)]


def best_grouped(record: Mapping) -> tuple[str, float] | None:
    """The fastest measured grouped peer of a record and its ratio to us; None without one."""
    measured = {
        name: record["ratios"][name]
        for name, peer in record["peers"].items()
        if peer["role"] == Role.GROUPED and name in record["ratios"]
    }
    if not measured:
        return None
    name = min(measured, key=measured.get)
    return name, measured[name]


def merge(first: dict, second: dict) -> dict:
    """One record for a case that was measured in two passes; the first pass's own times stay.

    Each ratio was taken within one pass, so both passes' ratios hold.
    """
    added = {
        key: {name: value for name, value in second[key].items() if name not in first[key]}
        for key in ("peers", "ratios")
    }
    return first | {key: first[key] | added[key] for key in added}


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))
