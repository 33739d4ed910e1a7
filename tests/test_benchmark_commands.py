"""Every step of the benchmarks' command lines, with tiny shapes, on any machine."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

# Last on the path: the checkout's own package must not hide an installed one with kernels.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import accumulate, bars, fp8_training, rank_k, results_file, run
from benchmarks.fp8 import __main__ as fp8
from benchmarks.fp8.cases import PRODUCTS, QUANTIZERS, STEP


def records(path: Path) -> dict[str, dict]:
    results = json.loads(path.read_text())
    assert results["not_measured"] == []
    assert all(record["peers"]["ours"]["status"] == "measured" for record in results["cases"])
    return {record["case"]: record for record in results["cases"]}


def test_ragged_products(tmp_path):
    output = tmp_path / "out.json"
    run.main(["--dry-run", "--ops", "forward", "wgrad", "--variants", "--output", str(output)])
    found = records(output)
    assert {"tiny/forward/random", "tiny_fine/wgrad/random"} <= set(found)
    for record in found.values():
        # Both passes, and the peers that this machine lacks with the reason.
        assert record["peers"]["stock"]["status"] == "measured"
        assert record["peers"]["quack"]["reason"] or record["peers"]["quack"]["us"]
        assert "config0" in record["peers"]
    results = json.loads(output.read_text())
    assert set(results["host"]) == {"with", "without"} and results["first_call"]["run_s"] > 0


def test_accumulate(tmp_path):
    output = tmp_path / "out.json"
    accumulate.main(["--dry-run", "--output", str(output)])
    found = records(output)
    assert set(found) == {"tiny/wgrad_add/random", "tiny_fine/wgrad_add/random"}
    for record in found.values():
        assert record["peers"]["ours_then_add"]["status"] == "measured"
        assert record["peers"]["ours_then_add"]["error"]["total"] > 0
        assert record["peers"]["ours_product"]["status"] == "measured"
        assert record["ratios"]["ours_then_add"] > 0


def test_fp8(tmp_path):
    output = tmp_path / "out.json"
    fp8.main(["--dry-run", "--shapes", "tiny", "--no-host", "--output", str(output)])
    found = records(output)
    assert {name.split("/")[1] for name in found} == {*PRODUCTS, *QUANTIZERS, STEP}
    for op in PRODUCTS:
        record = found[f"tiny/{op}/random"]
        assert record["peers"]["ours_bf16"]["status"] == "measured"
        assert record["peers"]["ours"]["error"]["total"] > 0
        assert record["ratios"]["byte_floor"] > 0
    assert found["tiny/quantize_ragged/random"]["peers"]["ours"]["error"]["total"] == 0
    step = found[f"tiny/{STEP}/random"]
    assert step["ratios"]["ours_bf16"] > 0
    assert set(step["cosine_distance"]["ours"]) == {"out", "d_lhs", "d_rhs"}
    judged = {bar.name: bar for bar in bars.check(results_file.load([output]))}
    assert judged["FP8 products, relative error"].cleared is True
    assert judged["FP8 against unquantised, 1 - cosine"].cleared is True


def test_symmetric_updates(tmp_path):
    output = tmp_path / "out.json"
    rank_k.main(["--dry-run", "--ops", "syrk", "her2k_c128", "--output", str(output)])
    found = records(output)
    assert set(found) == {
        f"{'x'.join(map(str, shape))}/{op}"
        for shape in rank_k.TINY_SHAPES
        for op in ("syrk", "her2k_c128")
    }
    for record in found.values():
        assert "cublas_loop" in record["peers"]
        assert record["peers"]["symmetric"]["status"] == "measured"
    assert "A@A.T" in found["2x24x16/syrk"]["ratios"]


def test_training(tmp_path):
    pytest.importorskip("flax")
    output = tmp_path / "out.json"
    compared = fp8_training.main(
        ["--dry-run", "--seeds", "1", "--first-seed", "2", "--output", str(output)]
    )
    assert [each["seed"] for each in compared] == [2]
    # The same start: the runs differ by the rounding of three steps.
    assert all(0 < abs(each["ratio"] - 1) < 0.05 for each in compared)
    results = json.loads(output.read_text())
    assert len(results["training_runs"]) == 2 and results["fp8_training"][0]["bf16"] > 0


def test_balance(schedules, capsys):
    from benchmarks import balance  # needs the schedules

    balance.main(
        ["--shapes", "qwen3_down", "--distributions", "random", "zipf", "one_hot", "--draws", "1"]
    )
    gradients, updates = capsys.readouterr().out.split("\n\n")
    *_, random, zipf, one_hot = gradients.splitlines()
    for line, in_turn_at_least in ((random, 1.03), (zipf, 1.1)):
        turns, in_turn, cut = map(float, line.split()[2:])
        assert 1 <= turns < 1.03 and in_turn_at_least < in_turn and math.isnan(cut)
    turns, in_turn, cut = map(float, one_hot.split()[2:])
    assert 1 <= cut < 1.03 and in_turn >= turns > 2

    steps = {name: (int(a), int(b)) for name, a, b in map(str.split, updates.splitlines()[1:])}
    # About half of all tiles are needed.
    triangle, everything = steps["1x8192x8192"]
    assert 1.9 * triangle < everything
    assert all(triangle <= everything for triangle, everything in steps.values())
