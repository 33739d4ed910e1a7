"""Measures one case: prepares the peers, checks their results, and times them together."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import check
from benchmarks.harness.bandwidth import moved_bytes
from benchmarks.harness.cases import Case, flops, unavoidable_bytes, written_bytes
from benchmarks.harness.inputs import Inputs
from benchmarks.harness.peer import Call, NotOffered, Peer, Role, is_checked
from benchmarks.harness.recorders import Recorder, Sample
from benchmarks.harness.timing import HostTimes, host_times, interleave, median_ratio


@dataclass
class PeerResult:
    """The result of a peer in a case. If there are no samples, `status` and `reason` say why."""

    role: Role
    status: str  # measured, skipped (not offered), failed (an error) or wrong (a bad result)
    reason: str = ""
    detail: str = ""
    error: check.Error | None = None
    samples: list[Sample] = field(default_factory=list)
    part_of: Callable[[str], str] | None = None
    host: HostTimes | None = None

    @property
    def us(self) -> list[float]:
        return [sample.us for sample in self.samples]

    def to_json(self, name: str, work: int) -> dict[str, object]:
        """Returns plain data, with the numbers derived from samples first."""
        result: dict[str, object] = {"role": self.role.value, "status": self.status}
        result |= {key: value for key in ("reason", "detail") if (value := getattr(self, key))}
        if self.error:
            error = dataclasses.asdict(self.error)
            result["error"] = {key: value for key, value in error.items() if value is not None}
        if self.samples:
            median = statistics.median(self.us)
            result |= {"median_us": median, "us": self.us}
            if counts := [len(s.activities) for s in self.samples if s.activities is not None]:
                result["kernels"] = statistics.median_low(counts)
            if self.role == Role.BANDWIDTH:
                result["tbps"] = moved_bytes(name) / median / 1e6
            elif work:
                result["tflops"] = work / median / 1e6
            if self.part_of:
                result["parts_us"] = _median_parts(self.samples, self.part_of)
        if self.host:
            result |= dataclasses.asdict(self.host)
        return result


def _median_parts(samples: list[Sample], part_of: Callable[[str], str]) -> dict[str, float]:
    """Returns the median microseconds of each part over the rounds; empty without kernel times."""
    found = [parts for sample in samples if (parts := sample.parts(part_of)) is not None]
    names = dict.fromkeys(name for parts in found for name in parts)
    return {name: statistics.median(parts.get(name, 0.0) for parts in found) for name in names}


@dataclass(frozen=True)
class Workload:
    """A row of the results to measure: the arguments of peers, and the judge of their results.

    `problem` and `operands` are arguments of `Peer.prepare`. `judge` returns the error of a call's
    result, and whether it is acceptable. `description` has the other fields of the case's record,
    in JSON's types: at least `shape`, with a `name`, and `op`.
    """

    case: str
    problem: Any
    operands: tuple
    judge: Callable[[Call], tuple[check.Error, bool]]
    description: Mapping[str, object]
    flops: int
    bytes: int
    written_bytes: int
    seed: int = 0


def measure(
    work: Workload,
    peers: Iterable[Peer],
    recorder: Recorder,
    *,
    rounds: int,
    flush: Callable[[], None],
    measure_host: bool = True,
) -> dict[str, object]:
    """Prepares and checks all peers, times those with right results, and returns their record."""
    results: dict[str, PeerResult] = {}
    calls: dict[str, Call] = {}
    for peer in peers:
        results[peer.name], call = _prepare(peer, work)
        if call is not None:
            calls[peer.name] = call
    # A call that ran alone may find too little memory when all peers hold theirs.
    for name, call in list(calls.items()):
        try:
            call.wait(call.run())
        except Exception as error:
            results[name].status, results[name].reason = "failed", first_line(error)
            del calls[name]
    for name, samples in interleave(calls, recorder, rounds, flush, work.seed).items():
        if min(sample.us for sample in samples) > 0:
            results[name].samples = samples
            results[name].part_of = calls[name].part_of
        else:
            results[name].status = "failed"
            results[name].reason = f"{recorder.name} saw no device activity in some rounds"
    if measure_host:
        for name, call in calls.items():
            if results[name].samples:
                results[name].host = host_times(call, statistics.median(results[name].us))
    return {
        "case": work.case,
        **work.description,
        "flops": work.flops,
        "bytes": work.bytes,
        "written_bytes": work.written_bytes,
        "peers": {name: result.to_json(name, work.flops) for name, result in results.items()},
        "ratios": ratios(work.bytes, work.written_bytes, results),
    }


def ragged_work(case: Case, inputs: Inputs) -> Workload:
    """Returns the workload of a ragged product of a shape's tensors, judged by a reference."""
    operands = inputs.operands(case)
    expected = inputs.reference(case, operands)

    def judge(call: Call) -> tuple[check.Error, bool]:
        exact = expected if call.reference is None else call.reference()
        error = check.compare(call.to_jax(call.run()), exact)
        return error, error.acceptable(case.problem, call.tolerance)

    return ragged_workload(case, operands, judge)


def described(case: Case, **more: object) -> dict[str, object]:
    """Returns the description of a case's workload, with other fields."""
    found = dict(shape=dataclasses.asdict(case.shape), op=case.op.name)
    return found | dict(distribution=case.distribution, dtype=case.dtype) | more


def ragged_workload(
    case: Case, operands: tuple, judge: Callable[[Call], tuple[check.Error, bool]]
) -> Workload:
    """Returns the workload of a ragged product of `operands`, judged by `judge`."""
    problem, sizes = case.problem, case.group_sizes
    return Workload(
        case.name,
        problem,
        operands,
        judge,
        description=described(case, precision=case.precision, out_dtype=problem.out_dtype),
        flops=flops(problem, sizes),
        bytes=unavoidable_bytes(problem, sizes),
        written_bytes=written_bytes(problem),
        seed=case.seed,
    )


def _prepare(peer: Peer, work: Workload) -> tuple[PeerResult, Call | None]:
    """Returns a call that gives the right result, or a result with the reason for its absence."""
    result = PeerResult(peer.role, "skipped")
    if reason := peer.unavailable_reason():
        result.reason = reason
        return result, None
    acceptable = True
    try:
        call = peer.prepare(work.problem, *work.operands)
        result.detail = call.detail
        if is_checked(peer):
            result.error, acceptable = work.judge(call)
    except NotOffered as reason:
        result.reason = str(reason)
        return result, None
    except Exception as error:
        # Record any failure of a peer, such as out of memory, because it must not end the run.
        result.status, result.reason = "failed", first_line(error)
        return result, None
    if not acceptable:
        result.status, result.reason = "wrong", f"relative error {result.error.total:.1e}"
        return result, None
    result.status = "measured"
    return result, call


def first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def ratios(traffic: int, written: int, results: Mapping[str, PeerResult]) -> dict[str, float]:
    """Returns medians over the rounds of (a peer's time / our time). Above one, we are faster.

    `byte_floor` is the time of a copy, scaled to `traffic`, the bytes that must move. `write_floor`
    is the time of `memset`, scaled to `written`, the bytes of the result. `floor` is the largest of
    these two times and the dense product's, in each round. These ratios exceed one only by noise.
    """
    ours = results.get(Role.OURS.value)
    if ours is None or not ours.samples:
        return {}
    times = {name: result.us for name, result in results.items() if result.samples}
    for name, floor, size in (("copy", "byte_floor", traffic), ("memset", "write_floor", written)):
        if us := times.pop(name, None):
            times[floor] = [each * size / moved_bytes(name) for each in us]
    floors = [
        times[name] for name in ("byte_floor", "write_floor", "cublas_dense") if name in times
    ]
    if floors:
        times["floor"] = [max(bounds) for bounds in zip(*floors, strict=True)]
    del times["ours"]
    return {name: median_ratio(us, ours.us) for name, us in times.items()}


def best_grouped(record: Mapping) -> tuple[str, float] | None:
    """Returns the fastest measured grouped peer of a record and its ratio to us, None without."""
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
    """Returns one record for a case that was measured in two passes.

    Peers that the first pass did not measure come from the second. Ratios of both passes are valid,
    because each ratio was taken within one pass.
    """
    measured = {
        n: p for n, p in first["peers"].items() if p.get("status", "measured") == "measured"
    }
    return first | {
        "peers": first["peers"] | second["peers"] | measured,
        "ratios": second["ratios"] | first["ratios"],
    }


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))
