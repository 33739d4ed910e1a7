"""The benchmark of lists of products: its lists, its arithmetic, and a run of every step."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest


from benchmarks import grouped_gemm


def test_dry_run(tmp_path, capsys):
    output = tmp_path / "lists.json"
    grouped_gemm.main(["--dry-run", "--output", str(output)])
    (case,) = json.loads(output.read_text())["cases"]
    assert case["us"].keys() == {*grouped_gemm.VARIANTS, grouped_gemm.LOOP}
    assert all(len(times) == 2 for times in case["us"].values())
    assert max(case["error"].values()) < 0.01
    assert "geometric means" in capsys.readouterr().out


@pytest.mark.parametrize(
    "dtype, precision, limit",
    [("float32", "default", 2e-3), ("float32", "highest", 5e-6), ("float64", "default", 1e-14)],
)
def test_dry_run_in_wider_types(dtype, precision, limit, tmp_path):
    """Whose records are no records of bfloat16."""
    output = tmp_path / "lists.json"
    options = ["--dtype", dtype, "--precision", precision]
    grouped_gemm.main(["--dry-run", *options, "--output", str(output)])
    (case,) = json.loads(output.read_text())["cases"]
    assert case["list"] == f"tiny/{dtype}/{precision}" and case["left_out"]
    assert max(case["error"].values()) < limit


def test_bfloat16_has_one_precision(capsys):
    with pytest.raises(SystemExit):
        grouped_gemm.main(["--dry-run", "--precision", "highest"])
    assert "--dtype float32" in capsys.readouterr().err


def test_lists():
    found = grouped_gemm.lists()
    assert found == grouped_gemm.lists()
    for name, problems in found.items():
        sides = np.array(problems)
        assert (sides % 8 == 0).all() and sides.min() >= 24, name
    assert {len(found[f"random_{n}"]) - n for n in (24, 79, 150, 300)} == {0}


def test_ratios():
    us = {variant: [2.0, 4.0, 8.0] for variant in grouped_gemm.VARIANTS}
    case = {"list": "x", "problems": [(8, 8, 8)], "us": {**us, grouped_gemm.LOOP: [3.0, 8.0, 8.0]}}
    case["us"]["CUTLASS kDeviceOnly sorted"] = [1.0, 4.0, 16.0]
    ratios = grouped_gemm.ratios(case)
    assert ratios.pop("CUTLASS kDeviceOnly sorted") == 2.0
    assert set(ratios) == set(grouped_gemm.VARIANTS) and set(ratios.values()) == {1.5}
    assert grouped_gemm.geometric_means([case, case])[grouped_gemm.DEFAULT] == pytest.approx(1.5)


def test_a_wrong_result_is_an_error(monkeypatch):
    monkeypatch.setattr(grouped_gemm, "ours", lambda *_: lambda a, b: [0 * x for x in a])
    problems = [(8, 8, 8)]
    with pytest.raises(RuntimeError, match="wrong"):
        grouped_gemm.measure("x", problems, None, 1, None)
