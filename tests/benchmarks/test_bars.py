"""Bars on FP8 and on symmetric updates: which results pass, fail or are missing."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest


from benchmarks import bars, rank_k
from benchmarks.harness import cases, results_file
from benchmarks.bar import Bar, Finding
from benchmarks.fp8.cases import default_cases

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def record(case: str, ours: dict | None = None, **ratios: float) -> dict:
    shape, op, *rest = case.split("/")
    return {
        "case": case,
        "shape": {"name": shape},
        "op": op,
        "distribution": rest[0] if rest else "equal",
        "peers": {"ours": {"role": "ours"} | (ours or {})},
        "ratios": ratios,
    }


def judged(name: str, *records: dict, **run) -> Bar:
    (bar,) = [bar for bar in bars.check({"cases": list(records)} | run) if bar.name == name]
    return bar


@pytest.mark.parametrize("op", ["fp8_forward", "fp8_dgrad"])
def test_fp8_products_against_the_faster_dense_one(op):
    name = "FP8 forward and dgrad"
    for exact, cleared in ((0.95, True), (0.93, False)):
        found = record(f"dsv3_up/{op}/random", cublas_dense=0.96, cublas_dense_exact=exact)
        bar = judged(name, found)
        assert bar.cleared is cleared
        assert f"dsv3_up/{op}/random" not in bar.missing
        assert f"mixtral_up/{op}/random" in bar.missing
    # Each shape has a bar of its own.
    assert judged(name, record(f"ds256_n512/{op}/random", cublas_dense=0.43)).cleared is True
    assert judged(name, record(f"dsv3_down/{op}/random", cublas_dense=0.96)).cleared is False
    # Neither padding nor equal sizes are asked about.
    assert judged(name, record(f"dsv3_up/{op}/uniform", cublas_dense=0.5)).cleared is None


@pytest.mark.parametrize(
    "name, case, passing, failing",
    [
        (
            "FP8 decoding, of the byte floor",
            "decode_small/fp8_forward/random",
            {"byte_floor": 0.94},
            {"byte_floor": 0.92},
        ),
        (
            "FP8 quantisers, of copy bandwidth",
            "qwen3_up/quantize_ragged/random",
            {"byte_floor": 0.86},
            {"byte_floor": 0.84},
        ),
        (
            "FP8 quantisers and three products",
            "dsv3_up/fp8_step/random",
            {"ours_bf16": 1.41},
            {"ours_bf16": 1.39},
        ),
        (
            "float64 syr2k over cuBLAS in a loop",
            "16x1024x1024/syr2k_f64",
            {"cublas_loop": 1.95},
            {"cublas_loop": 1.85},
        ),
        (
            "complex128 her2k over cuBLAS in a loop",
            "8x2048x2048/her2k_c128",
            {"cublas_loop": 1.05},
            {"cublas_loop": 0.95},
        ),
        (
            "bfloat16 syr2k, many small, over A@B.T alone",
            "16x512x512/syr2k",
            {"A@B.T": 1.01},
            {"A@B.T": 0.99},
        ),
        (
            "float32 syr2k over cuBLAS in a loop",
            "8x2048x2048/syr2k_f32",
            {"cublas_loop": 3.1},
            {"cublas_loop": 2.9},
        ),
    ],
)
def test_bars_on_one_ratio(name, case, passing, failing):
    assert judged(name, record(case, **passing)).cleared is True
    assert judged(name, record(case, **failing)).cleared is False
    nothing = judged(name)
    assert nothing.cleared is None and case in nothing.missing


def test_fp8_wgrad_is_judged_by_its_rate():
    case = "wgrad_g4_8192/fp8_wgrad/uniform"
    for tflops, cleared in ((951.0, True), (949.0, False)):
        assert judged("FP8 wgrad", record(case, {"tflops": tflops})).cleared is cleared


def test_fp8_accuracy():
    name = "FP8 products, relative error"
    case = "dsv3_up/fp8_forward/random"
    for dtype, total, cleared in (
        ("float32", 0.9e-3, True),
        ("float32", 1.1e-3, False),
        # Rounding alone is 1.6e-3.
        ("bfloat16", 1.9e-3, True),
        ("bfloat16", 3.5e-3, False),
        ("bfloat16", float("nan"), False),
    ):
        found = record(case, {"error": {"total": total, "worst_row": total}})
        assert judged(name, found | {"out_dtype": dtype}).cleared is cleared
    name = "FP8 against unquantised, 1 - cosine"
    for distance, cleared in ((7e-4, True), (1.1e-3, False)):
        found = {"ours": {"out": 5e-4, "d_lhs": distance, "d_rhs": 5e-4}}
        step = record("dsv3_up/fp8_step/random") | {"cosine_distance": found}
        assert judged(name, step).cleared is cleared


def test_training_counts_on_the_large_preset_with_several_seeds():
    name = "FP8 training"

    def compared(preset, seed, ratio):
        losses = {"bf16": 1.5, "fp8": 1.5 * ratio, "ratio": ratio}
        return {"preset": preset, "seed": seed, "steps": 400} | losses

    good = [compared("h200", seed, 1.005) for seed in range(3)]
    assert judged(name, fp8_training=good).lines()[0].startswith("pass")
    assert judged(name, fp8_training=[*good, compared("h200", 3, 0.985)]).cleared is False
    assert judged(name, fp8_training=good[:1]).lines()[0].startswith("incomplete")
    assert judged(name, fp8_training=[compared("cpu", 0, 2.0)]).cleared is None


def test_errors_of_float32_updates_are_compared():
    name = "float32 syr2k, error"
    for ours, cleared in ((2e-7, True), (4e-7, False)):
        found = record("16x1024x1024/syr2k_f32", {"error": {"total": ours}})
        found["peers"]["cublas_loop"] = {"role": "loop", "error": {"total": 3e-7}}
        assert judged(name, found).cleared is cleared


def test_what_is_missing_is_named():
    passing = [Finding("a", 1.1, "1.1")]
    complete, partial = (Bar("name", "target", passing, missing) for missing in ((), ("b", "c")))
    assert complete.lines() == ["pass          name: target; 1 of 1, worst a 1.1"]
    head, missing = partial.lines()
    assert head.startswith("incomplete") and missing.split() == ["missing:", "b,", "c"]
    assert Bar("name", "target", (), ("b",)).lines()[0].startswith("not measured")
    failing = Bar("name", "target", [Finding("a", 0.9, "0.9")], ("b",))
    assert failing.lines()[0].startswith("FAIL") and failing.cleared is False


def test_every_wanted_case_is_one_that_a_benchmark_measures():
    measured = {case.name for case in default_cases()}
    measured |= {
        cases.Case(shape, op, distribution).name
        for shape in cases.SUITES["main"]
        for op in cases.OPS.values()
        for distribution in cases.DISTRIBUTIONS
    }
    measured |= {
        f"{'x'.join(map(str, shape))}/{update.name}"
        for update in rank_k.UPDATES.values()
        for shape in update.shapes
    }
    for bar in bars.check({"cases": []}):
        # Seeds are no cases, and lists are named where they are measured.
        if bar.name != "FP8 training" and not bar.name.startswith("lists"):
            assert set(bar.missing) <= measured, bar.name


def test_lists_of_products(tmp_path):
    def of_list(name, ratio):
        us = {"cuBLAS loop": [2.0 * ratio, 8.0 * ratio], "host_precomputed sorted": [2.0, 8.0]}
        return {"list": name, "us": us | {"device sorted": [9.0, 9.0]}}

    name = "lists, random, over a cuBLAS loop"
    two = [of_list("random_24", 2.0), of_list("cutlass_24", 1.2)]
    assert judged(name, *two).cleared is True and "random_300" in judged(name, *two).missing
    assert judged(name, of_list("random_24", 2.0), of_list("cutlass_24", 1.1)).cleared is False
    name = "lists, large, over a cuBLAS loop"
    assert judged(name, of_list("big_8", 0.98)).cleared is True
    assert judged(name, of_list("big_8", 0.96)).cleared is False
    assert judged(name, *two).cleared is None
    # Read from a file among others; the first one's times stay.
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, ratio in zip(paths, (0.98, 0.5), strict=True):
        results_file.save({"cases": [of_list("big_8", ratio)]}, path)
    found = results_file.load([*paths, RESULTS / "h200_rank_k.json"])
    assert {bar.name: bar.cleared for bar in bars.check(found)}[name] is True


def test_lists_are_compared_with_the_fastest_kernel_of_cutlass():
    def of_list(name, **others):
        us = {"cuBLAS loop": [9.0, 9.0], "host_precomputed sorted": [2.0, 4.0]}
        return {"list": name, "us": us | {f"CUTLASS {x}": times for x, times in others.items()}}

    name = "lists, over CUTLASS's grouped kernels"
    assert judged(name, of_list("four")).cleared is None
    faster = of_list("four", one=[6.0, 12.0], other=[2.2, 4.4])
    bar = judged(name, faster)
    assert bar.cleared is True and "big_8" in bar.missing and "four" not in bar.missing
    assert bar.worst.margin == pytest.approx(1.1) and "CUTLASS other" in bar.worst.text
    assert judged(name, faster, of_list("big_8", one=[1.9, 3.8])).cleared is False


def test_updates_are_compared_with_the_fastest_kernel_of_cutlass():
    name = "float64 rank-2k over CUTLASS's grouped kernels"
    shapes = ("16x1024x1024", "8x2048x2048")
    found = [record(f"{x}/syr2k_f64", cutlass_a=1.2, cutlass_b=0.9) for x in shapes]
    bar = judged(name, *found)
    assert bar.cleared is False and bar.worst.margin == 0.9
    assert bar.missing == [f"{x}/her2k_c128" for x in shapes]
    assert judged(name, record(f"{shapes[0]}/syr2k_f64", cublas_loop=0.5)).cleared is None


def test_float32_has_a_bar_of_its_own():
    def loop(dtype, ratio):
        case = cases.Case(cases.SHAPES["dsv3_up"], cases.OPS["forward"], "random")
        found = record(case.name, cublas_loop=ratio) | {"dtype": dtype, "precision": "highest"}
        return found | {"shape": dataclasses.asdict(case.shape)}

    name = "float32 at HIGHEST, against cuBLAS's float32"
    assert judged(name, loop("float32", 2.9), loop("bfloat16", 5.0)).cleared is False
    assert judged("cuBLAS loop", loop("float32", 0.5), loop("bfloat16", 1.0)).cleared is True


def test_recorded_updates_are_read():
    results = results_file.load([RESULTS / "h200_rank_k.json"])
    bar = judged("bfloat16 syrk, n >= 2048, over A@A.T", *results["cases"])
    assert len(bar.findings) == 3 and not bar.missing


def test_says_how_we_compare_with_each_grouped_peer():
    path = RESULTS / "h200_main.json"
    lines = []
    bars.main([str(path)], lines.append)
    ratios = [
        record["ratios"]["torch_grouped_mm"]
        for record in json.loads(path.read_text())["cases"]
        if record["op"] == "forward"
    ]
    (line,) = [line for line in "\n".join(lines).splitlines() if line.startswith("forward: ")]
    assert f"torch_grouped_mm_geomean {math.prod(ratios) ** (1 / len(ratios)):.3f}," in line
    assert f"torch_grouped_mm_min {min(ratios):.3f}," in line
    assert "cublas_dense_geomean" in line and "copy" not in line
