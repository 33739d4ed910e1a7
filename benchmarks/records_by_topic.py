"""Reads the records that pages quote, by topic, and formats their numbers; a dash means none."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.measure import geometric_mean
from benchmarks.harness.report import number
from benchmarks.harness.results_file import load

# Replaces a case that was not measured.
NO_CASE: Mapping = {"peers": {}, "ratios": {}}
RESULTS = Path(__file__).parent / "results"


def stems(pattern: str) -> tuple[str, ...]:
    return tuple(path.stem for path in sorted(RESULTS.glob(f"{pattern}.json")))


# Topics with a record of the same name.
OWN_RECORD = ("majors", "stock", "tokamax", "adapters", "skew", "accumulate", "memory", "fp8",
              "float32_default", "float32_highest", "lists_float32")  # fmt: skip
# The records of each topic.
RECORDS = {
    "ragged": ("h200_main",),
    **{topic: (f"h200_{topic}",) for topic in OWN_RECORD},
    "layers": stems("h200_moe_quack*"),
    "layers_fp8": ("h200_moe_fp8",),
    "layers_stock": ("h200_moe_stock",),
    "layers_decode": ("h200_moe_decode",),
    "layers_packed": stems("h200_weight_only") + stems("h200_weight_only_[!h]*"),
    "layers_packed_peers": stems("h200_weight_only_humming*"),
    "step": ("h200_training",),
    "expert_parallel": ("h200_x2_expert_parallel",),
    "training": stems("h200_fp8_training*"),
    "lists": ("h200_lists", "h200_lists_large", "h200_lists_300"),
    "updates": ("h200_rank_k",),
    "optimizer": ("h100_optimizer", "h100_optimizer_program"),
    "muon": ("h200_muon", "h200_muon_2"),
    "muon_steps": ("h200_muon_steps",),
    "muon_h100": stems("h100_muon*"),
    "data_parallel": ("h200_x2_data_parallel",),
    "h100": ("h100_main",),
    "h100_layers": ("h100_moe",),
    # Layers of about the same commit as those of the H100.
    "h200_layers": ("h200_moe",),
    "layers_fine": ("h200_moe_fine", "h200_moe_fine_2"),
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
    return number(case["peers"].get(peer, {}).get("median_us"))


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
