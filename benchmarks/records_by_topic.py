"""Reads the records that pages quote, by topic, and formats their numbers; a dash means none."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.measure import geometric_mean
from benchmarks.harness.results_file import load

# Replaces a case that was not measured.
NO_CASE: Mapping = {"peers": {}, "ratios": {}}
RESULTS = Path(__file__).parent / "results"


def stems(pattern: str) -> tuple[str, ...]:
    return tuple(path.stem for path in sorted(RESULTS.glob(f"{pattern}.json")))


# The records of each topic.
RECORDS = {
    "ragged": ("h200_main",),
    "majors": ("h200_majors",),
    "stock": ("h200_stock",),
    "tokamax": ("h200_tokamax",),
    "adapters": ("h200_adapters",),
    "skew": ("h200_skew",),
    "accumulate": ("h200_accumulate",),
    "memory": ("h200_memory",),
    "layers": ("h200_moe",),
    "layers_fp8": ("h200_moe_fp8",),
    "layers_quack": ("h200_moe_quack",),
    "layers_stock": ("h200_moe_stock",),
    "layers_decode": ("h200_moe_decode",),
    "layers_packed": stems("h200_weight_only*"),
    "step": ("h200_training",),
    "expert_parallel": ("h200_x2_expert_parallel",),
    "fp8": ("h200_fp8",),
    "training": stems("h200_fp8_training*"),
    "float32_default": ("h200_float32_default",),
    "float32_highest": ("h200_float32_highest",),
    "lists": ("h200_lists", "h200_lists_large", "h200_lists_300"),
    "lists_float32": ("h200_lists_float32",),
    "updates": ("h200_rank_k",),
    "optimizer": ("h100_optimizer", "h100_optimizer_program"),
    "muon": ("h200_muon", "h200_muon_2"),
    "muon_steps": ("h200_muon_steps",),
    "muon_h100": stems("h100_muon*"),
    "data_parallel": ("h200_x2_data_parallel",),
    "h100": ("h100_main",),
    "h100_layers": ("h100_moe",),
    "layers_fine": ("h200_moe_nano", "h200_moe_fine"),
}
MIB, GIB = 2**20, 2**30


@functools.cache
def cases(topic: str) -> dict[str, Mapping]:
    found = load([RESULTS / f"{stem}.json" for stem in RECORDS[topic]])
    return {case["case"]: case for case in found["cases"]}


def case(topic: str, name: str) -> Mapping:
    return cases(topic).get(name, NO_CASE)


def ours(case: Mapping) -> Mapping:
    return case["peers"]["ours"]


def ratios(topic: str, peer: str, ops: Sequence[str]) -> list[float]:
    found = [case for case in cases(topic).values() if case["op"] in ops]
    return [case["ratios"][peer] for case in found if peer in case["ratios"]]


def memory_of(peer: str, shape: str, op: str) -> int:
    return cases("memory")[f"{shape}/{op}/memory"]["peers"][peer]["temporary_bytes"]


def commits(topic: str) -> str:
    stems = RECORDS[topic]
    found = (json.loads((RESULTS / f"{stem}.json").read_text())["commit"] for stem in stems)
    return ", ".join(dict.fromkeys(commit[:7] for commit in found))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def microseconds(case: Mapping, peer: str = "ours") -> str:
    value = case["peers"].get(peer, {}).get("median_us")
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def time_and_rate(case: Mapping) -> str:
    ours = case["peers"].get("ours", {})
    return f"{ours['median_us']:.0f} ({ours['tflops']:.0f})" if "tflops" in ours else "-"


def ratio(case: Mapping, *others: str) -> str:
    found = [case["ratios"][name] for name in others if name in case["ratios"]]
    return f"{min(found):.2f}" if found else "-"


def span(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def ends(values: Mapping[str, float]) -> str:
    """Returns the least and the largest of some numbers, with their keys."""
    low, high = (each(values, key=values.__getitem__) for each in (min, max))
    return f"{values[low]:.2f} ({low}) to {values[high]:.2f} ({high})"


def mean_and_span(values: Sequence[float]) -> str:
    """Returns the geometric mean, and the least and the largest value in brackets."""
    return f"{geometric_mean(values):.2f} ({span(values)})" if values else "-"
