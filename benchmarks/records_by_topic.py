"""The records that the pages quote, by topic, and their cases."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.quoting import NO_CASE
from benchmarks.harness.results_file import load

RESULTS = Path(__file__).parent / "results"
# The records that a topic is quoted from.
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
    "layers_recipes": ("h200_moe_recipes",),
    "layers_quack": ("h200_moe_quack",),
    "layers_stock": ("h200_moe_stock",),
    "layers_decode": ("h200_moe_decode",),
    "step": ("h200_training",),
    "expert_parallel": ("h200_x2_expert_parallel",),
    "fp8": ("h200_fp8",),
    "training": ("h200_fp8_training",),
    "float32_default": ("h200_float32_default",),
    "float32_highest": ("h200_float32_highest",),
    "lists": ("h200_lists", "h200_lists_large", "h200_lists_300"),
    "lists_float32": ("h200_lists_float32",),
    "updates": ("h200_rank_k",),
    "muon": ("h200_muon",),
    "muon_h100": ("h100_muon",),
    "data_parallel": ("h200_x2_data_parallel",),
    "h100": ("h100_main",),
    "h100_layers": ("h100_moe",),
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
