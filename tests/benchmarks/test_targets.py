"""Tests of targets: which results meet a target, miss it, or lack its cases."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import expert_parallel, grouped_gemm, moe, rank_k, targets
from benchmarks.fp8.cases import default_cases
from benchmarks.harness import cases, results_file
from benchmarks.harness.target import Target, Verdict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROLES = {"cublas_loop": "loop", "cublas_dense": "ceiling", "byte_floor": "bandwidth"}


def record(case: str, ours: dict | None = None, dtype: str = "bfloat16", **ratios: float) -> dict:
    shape, op, *rest = case.split("/")
    known = cases.SHAPES.get(shape)
    return {
        "case": case,
        "shape": {"name": shape, "rows": known.rows, "groups": known.groups} if known else
        {"name": shape},
        "op": op,
        "distribution": rest[0] if rest else "equal",
        "dtype": dtype,
        "precision": "highest",
        "out_dtype": "bfloat16",
        "peers": {"ours": {"role": "ours"} | (ours or {})}
        | {name: {"role": ROLES.get(name, "grouped")} for name in ratios},
        "ratios": ratios,
    }  # fmt: skip


def judged(name: str, *records: dict) -> Verdict:
    found = [v for v in targets.check({"cases": list(records)}) if v.target.name == name]
    assert len(found) == 1
    return found[0]


LIST = "lists, random, over a cuBLAS loop"


@pytest.mark.parametrize(
    "name, case, passing, failing",
    [
        ("cuBLAS loop", "dsv3_up/wgrad/zipf", {"cublas_loop": 0.981}, {"cublas_loop": 0.979}),
        (
            "memory-bound, of the byte floor",
            "decode_up/dgrad/random",
            {"byte_floor": 0.93},
            {"byte_floor": 0.91},
        ),
        (
            "FP8 decoding, of the byte floor",
            "decode_small/fp8_forward/random",
            {"byte_floor": 0.94},
            {"byte_floor": 0.92},
        ),
        (
            "FP8 quantisers and three products",
            "dsv3_up/fp8_step/random",
            {"ours_bf16": 1.41},
            {"ours_bf16": 1.39},
        ),
        # The faster dense product counts, and each shape has its own bound.
        (
            "FP8 forward and dgrad",
            "dsv3_up/fp8_dgrad/random",
            {"cublas_dense": 0.96, "cublas_dense_exact": 0.95},
            {"cublas_dense": 0.96, "cublas_dense_exact": 0.93},
        ),
        (
            "FP8 forward and dgrad",
            "ds256_n512/fp8_dgrad/random",
            {"cublas_dense": 0.43},
            {"cublas_dense": 0.41},
        ),
        (
            "float64 syr2k over cuBLAS in a loop",
            "16x1024x1024/syr2k_f64",
            {"cublas_loop": 1.95},
            {"cublas_loop": 1.85},
        ),
        (
            "float64 rank-2k over CUTLASS's grouped kernels",
            "16x1024x1024/syr2k_f64",
            {"cutlass_32x32": 1.2, "cutlass_128x128": 1.1},
            {"cutlass_32x32": 1.2, "cutlass_128x128": 0.9},
        ),
        (LIST, "random_24/grouped_gemm", {"cublas_loop": 1.51}, {"cublas_loop": 1.49}),
        (
            "lists, over CUTLASS's grouped kernels",
            "four/grouped_gemm",
            {"CUTLASS a": 1.01, "CUTLASS b": 2.0},
            {"CUTLASS a": 0.99, "CUTLASS b": 2.0},
        ),
    ],
)
def test_ratios(name, case, passing, failing):
    assert judged(name, record(case, **passing)).met is True
    assert judged(name, record(case, **failing)).met is False
    assert judged(name).met is None


def test_each_shape_against_the_fastest_peer_or_dense_cublas():
    name = "forward and dgrad, each shape"
    for grouped, dense, met in ((1.06, 0.5, True), (1.04, 0.98, True), (1.04, 0.96, False)):
        ratios = {"quack": grouped, "stock": 9.0, "cublas_dense": dense}
        assert judged(name, record("dsv3_up/dgrad/random", **ratios)).met is met
        # Only products of 16-bit operands that keep their rows count, with random sizes.
        assert judged(name, record("dsv3_up/dgrad/zipf", **ratios)).met is None
        wgrad = record("dsv3_up/wgrad/random", **ratios)
        assert judged(name, wgrad).met is None and judged("wgrad, each shape", wgrad).met is met
        assert judged(name, record("dsv3_up/dgrad/random", dtype="float32", **ratios)).met is None
    # The geometric mean takes the fastest peer of each case.
    name = "forward and dgrad, geometric mean"
    first = record("dsv3_up/forward/random", quack=2.0, stock=9.0)
    assert judged(name, first, record("dsv3_down/forward/random", tokamax=0.63)).met is True
    assert judged(name, first, record("dsv3_down/forward/random", tokamax=0.62)).met is False


def test_float32_has_a_target_of_its_own():
    slow = record("dsv3_up/forward/random", dtype="float32", cublas_loop=2.9)
    right = record("dsv3_up/dgrad/random", cublas_loop=1.0)
    assert judged("float32 at HIGHEST, against cuBLAS's float32", slow, right).met is False
    assert judged("cuBLAS loop", slow, right).met is True


def test_numbers_that_are_no_ratios():
    skew = "wgrad, skewed sizes"
    for tflops, met in ((92.0, True), (90.0, False)):
        rates = {"uniform": 100.0, "zipf": tflops, "random": 1.0}
        records = [record(f"dsv3_up/wgrad/{x}", {"tflops": rate}) for x, rate in rates.items()]
        assert judged(skew, *records).met is met
    for shape, kernels, met in (("dsv3_up", 2, False), ("decode_up", 2, True)):
        found = record(f"{shape}/forward/random", {"kernels": kernels})
        assert judged("kernels a call", found).met is met
    for total, met in ((1.9e-3, True), (3.5e-3, False), (math.nan, False)):
        found = record("dsv3_up/fp8_forward/random", {"error": {"total": total}})
        assert judged("FP8 products, relative error", found).met is met
    for ours, met in ((2e-7, True), (4e-7, False)):
        found = record("16x1024x1024/syr2k_f32", {"error": {"total": ours}})
        found["peers"]["cublas_loop"] = {"role": "loop", "error": {"total": 3e-7}}
        assert judged("float32 syr2k, error", found).met is met
    for ratio, met in ((1.005, True), (0.985, False)):
        found = record("h200/fp8_training/1") | {"loss_ratio": ratio, "steps": 400}
        verdict = judged("FP8 training", found | {"distribution": None})
        assert verdict.met is met and verdict.missing == ["h200/fp8_training/0"]


def test_the_report_names_the_worst_case_every_miss_and_what_is_missing():
    ratios = {"dsv3_up": 0.9, "dsv3_down": 0.8, "qwen3_up": 1.5}
    records = [record(f"{x}/forward/random", cublas_loop=ratio) for x, ratio in ratios.items()]
    head, *missed, missing = judged("cuBLAS loop", *records).lines()
    assert head.startswith("FAIL") and "1 of 3" in head and "worst dsv3_down" in head
    names = ["dsv3_down/forward/random", "dsv3_up/forward/random"]
    assert [line.split()[0] for line in missed] == names
    assert "missing:" in missing and "mixtral_up/forward/random" in missing
    target = Target("name", lambda _: True, lambda r, _: (r["x"], "x"), 1.0, ["a"])
    assert target.check([]).lines()[0].startswith("not measured")
    assert target.check([{"case": "b", "x": 2.0}]).lines()[0].startswith("incomplete")
    assert target.check([{"case": "a", "x": 2.0}]).lines()[0].startswith("pass")


def test_every_wanted_case_is_one_that_a_benchmark_measures():
    measured = {case.name for case in default_cases()}
    measured |= {
        cases.Case(shape, op, distribution).name
        for shape in cases.SUITES["main"]
        for op in cases.OPS.values()
        for distribution in cases.DISTRIBUTIONS
    }
    measured |= {
        f"{rank_k.named(shape)}/{update.name}"
        for update in rank_k.UPDATES.values()
        for shape in update.shapes
    }
    measured |= {f"{layer}/{op}" for layer in moe.LAYERS for op in moe.OPS}
    measured |= {f"{layer}/{op}" for layer in expert_parallel.LAYERS for op in expert_parallel.OPS}
    measured |= {f"{name}/grouped_gemm" for name in grouped_gemm.lists()}
    measured |= {f"h200/fp8_training/{seed}" for seed in range(3)}
    for target in targets.TARGETS:
        assert set(target.wanted) <= measured, target.name


def test_layers_on_two_gpus():
    """Layers on two GPUs have a target, but layers on other numbers of GPUs have none."""
    name = "layer on two GPUs, forward, of no communication"
    case = record("mixtral/ep_forward") | {"fractions": {"ours": 0.91}, "max_over_mean": 1.0}
    case |= {"devices": 2, "distribution": "uniform"}
    assert judged(name, case).findings[0].margin > 1
    assert judged(name, case | {"fractions": {"ours": 0.89}}).findings[0].margin < 1
    assert not judged(name, case | {"devices": 4}).findings


def test_recorded_results_are_judged():
    lines = []
    path = RESULTS / "h200_main.json"
    verdicts = targets.main([str(path), str(RESULTS / "h200_rank_k.json")], lines.append)
    met = {verdict.target.name: verdict for verdict in verdicts}
    assert len(met["bfloat16 syrk, n >= 2048, over A@A.T"].findings) == 3
    ratios = [
        record["ratios"]["torch_grouped_mm"]
        for record in results_file.load([path])["cases"]
        if record["op"] == "forward"
    ]
    (line,) = [line for line in "\n".join(lines).splitlines() if line.startswith("forward: ")]
    assert f"torch_grouped_mm_geomean {math.prod(ratios) ** (1 / len(ratios)):.3f}," in line
    assert f"torch_grouped_mm_min {min(ratios):.3f}," in line and "copy" not in line
