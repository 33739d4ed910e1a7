"""The bars that the kernels are to clear, checked against results: `python -m benchmarks.bars`.

Bars on ratios hold for random sizes, the unaligned load of a trained router. All ratios are other's
time / our time. A bar that no result is about, or some of whose cases none is about, says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import bars_fp8, bars_lists, bars_rank_k
from benchmarks.bar import Bar, Finding, missing_cases
from benchmarks.harness import report
from benchmarks.harness.cases import OPS, SUITES
from benchmarks.harness.measure import best_grouped, geometric_mean
from benchmarks.harness.results_file import load

DISTRIBUTION = "random"
MAIN_SHAPES = tuple(shape.name for shape in SUITES["main"])
MEMORY_BOUND = ("decode_up", "decode_small", "ds256_n512")
SKEWED = ("zipf", "one_hot")
GRADIENTS = tuple(op.name for op in OPS.values() if op.contracting)
PRODUCTS = tuple(op.name for op in OPS.values() if not op.contracting)
# With fewer rows a group than this, splitting the contraction may cost a reduction kernel.
DECODE_ROWS = 64


def _measured(results: Mapping) -> list[Mapping]:
    records = results.get("cases", [])
    return [record for record in records if "ours" in record.get("peers", {})]


def check(results: Mapping) -> list[Bar]:
    """Every bar against the results of one or more runs."""
    cases = _measured(results)
    ragged = [record for record in cases if record["op"] in OPS]
    return [
        *_ragged_bars([record for record in ragged if not _is_float32(record)]),
        _float32([record for record in ragged if _is_float32(record)]),
        _host_time(results.get("host", {})),
        _first_call(results.get("first_call", {})),
        *bars_fp8.check(cases, results),
        *bars_rank_k.check(cases),
        *bars_lists.check(results.get("cases", [])),
    ]


def _ragged_bars(cases: list[Mapping]) -> list[Bar]:
    """Products of 16-bit operands."""
    random = [record for record in cases if record["distribution"] == DISTRIBUTION]
    products = [record for record in random if record["op"] in PRODUCTS]
    gradients = [record for record in random if record["op"] in GRADIENTS]
    memory = [record for record in products if record["shape"]["name"] in MEMORY_BOUND]
    return [
        _each_shape("forward and dgrad, each shape", products, PRODUCTS),
        _mean("forward and dgrad, geometric mean", products, 1.12),
        _each_shape("wgrad, each shape", gradients, GRADIENTS),
        _mean("wgrad, geometric mean", gradients, 1.10),
        _skew(cases),
        _ratio("cuBLAS loop", cases, "cublas_loop", 0.98, _named(PRODUCTS[:1] + GRADIENTS[:1])),
        _ratio(
            "memory-bound, of the byte floor",
            memory,
            "byte_floor",
            0.92,
            _named(PRODUCTS[:1], MEMORY_BOUND),
        ),
        _extra_kernels(cases),
    ]


def _is_float32(record: Mapping) -> bool:
    return record.get("dtype") == "float32"


def _named(
    ops: Iterable[str],
    shapes: Iterable[str] = MAIN_SHAPES,
    distributions: Iterable[str] = (DISTRIBUTION,),
) -> list[str]:
    """Names of cases."""
    return [f"{name}/{op}/{sizes}" for name in shapes for op in ops for sizes in distributions]


def _each_shape(name: str, records: Iterable[Mapping], ops: Iterable[str]) -> Bar:
    grouped, dense = 1.05, 0.97
    findings = []
    for record in records:
        best = best_grouped(record)
        ratios = {
            grouped: best[1] if best else None,
            dense: record["ratios"].get("cublas_dense"),
        }
        margins = [ratio / bar for bar, ratio in ratios.items() if ratio is not None]
        if margins:
            text = f"{_number(best and best[1])} of {best[0] if best else 'no grouped peer'}, "
            text += f"{_number(ratios[dense])} of dense"
            findings.append(Finding(record["case"], max(margins), text))
    target = f">= {grouped} of the fastest grouped peer or >= {dense} of dense cuBLAS"
    return Bar(name, target, findings, missing_cases(_named(ops), findings))


def _mean(name: str, records: Iterable[Mapping], bar: float) -> Bar:
    ratios = [best[1] for record in records if (best := best_grouped(record))]
    findings = []
    if ratios:
        mean = geometric_mean(ratios)
        findings.append(Finding(f"{len(ratios)} cases", mean / bar, f"{mean:.3f}"))
    return Bar(name, f">= {bar:.2f} of the fastest grouped peer of each", findings)


def _ratio(
    name: str, records: Iterable[Mapping], other: str, bar: float, wanted: Sequence[str]
) -> Bar:
    findings = [
        Finding(record["case"], ratio / bar, f"{ratio:.3f}")
        for record in records
        if (ratio := record["ratios"].get(other)) is not None
    ]
    return Bar(name, f">= {bar}", findings, missing_cases(wanted, findings))


def _float32(records: Iterable[Mapping]) -> Bar:
    """Accurate float32 products against cuBLAS's, which do not use the tensor cores."""
    accurate = [record for record in records if record["precision"] == "highest"]
    ops = ("forward", "dgrad", "wgrad")
    return _ratio(
        "float32 at HIGHEST, against cuBLAS's float32", accurate, "cublas_loop", 3.0, _named(ops)
    )


def _skew(records: Iterable[Mapping]) -> Bar:
    """Time per useful FLOP of skewed sizes over that of uniform ones."""
    bar = 1.10
    speed = {
        (record["shape"]["name"], record["op"], record["distribution"]): ours["tflops"]
        for record in records
        if record["op"] in GRADIENTS and "tflops" in (ours := record["peers"]["ours"])
    }
    findings = [
        Finding("/".join(key), bar * speed[key] / uniform, f"{uniform / speed[key]:.3f}")
        for key in speed
        if key[2] in SKEWED and (uniform := speed.get((*key[:2], "uniform")))
    ]
    target = f"<= {bar:.2f} of uniform's time per useful FLOP"
    wanted = _named(GRADIENTS[:1], distributions=SKEWED)
    return Bar("wgrad, skewed sizes", target, findings, missing_cases(wanted, findings))


def _extra_kernels(records: Iterable[Mapping]) -> Bar:
    findings = []
    for record in records:
        kernels = record["peers"]["ours"].get("kernels")
        if kernels is not None:
            allowed = 1 + (record["shape"]["rows"] <= DECODE_ROWS * record["shape"]["groups"])
            findings.append(Finding(record["case"], allowed / kernels, f"{kernels - 1} extra"))
    return Bar("kernels a call", "0 extra, 1 in decoding", findings)


def _host_time(host: Mapping) -> Bar:
    """The host's time that shows: to enqueue a product, or between the kernels of a chain."""
    bar = 10.0
    findings = []
    for name, times in host.items():
        cost = max(times["enqueue_us"], times["wall_us"] - times["device_us"])
        text = (
            f"{cost:.1f} us ({times['enqueue_us']:.1f} to enqueue; {times['wall_us']:.1f} wall, "
            f"{times['device_us']:.1f} of it kernels); JAX's call {times['call_enqueue_us']:.0f} us"
        )
        findings.append(Finding(f"{name} command buffers", bar / max(cost, 0.1), text))
    return Bar("host time a product inside a jitted call", f"< {bar:g} us", findings)


def _first_call(times: Mapping) -> Bar:
    bar = 1.0
    findings = []
    if times:
        text = (
            f"{times['import_s']:.2f} s to import, then {times['first_call_s']:.2f} s: "
            f"trace {times['trace_s']:.2f}, XLA {times['compile_s']:.2f}, "
            f"first run {times['run_s']:.2f}"
        )
        total = times["import_s"] + times["first_call_s"]
        findings.append(Finding("fresh process", bar / total, text))
    return Bar("import and first call", f"< {bar:g} s", findings)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main(
    arguments: Sequence[str] | None = None, write: Callable[[str], object] = print
) -> Sequence[Bar]:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bars", description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="+", help="JSON files of any of the benchmarks, read as one"
    )
    results = load(parser.parse_args(arguments).results)
    bars = check(results)
    for bar in bars:
        write("\n".join(bar.lines()))
    if means := report.summary_lines(_measured(results)):
        write("\n" + means)
    return bars


if __name__ == "__main__":
    sys.exit(any(bar.cleared is False for bar in main()))
