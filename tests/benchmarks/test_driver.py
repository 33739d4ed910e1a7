"""Tests of the driver that runs without JAX: its input, and the comparison of two builds."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from benchmarks.driver import ab
from benchmarks.harness import cases

# A script that answers like the driver, with given times.
FAKE_DRIVER = """#!{python}
import sys
times = iter({times})
for line in sys.stdin:
    label = line.split()[1]
    print(label, next(times), 1.0, 500.0, 0.1, {verdict!r}, sep="\\t")
"""


def fake_driver(path: Path, times: list[float], verdict: str = "ok") -> Path:
    path.write_text(FAKE_DRIVER.format(python=sys.executable, times=times, verdict=verdict))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    "op, kind, k, n",
    [
        ("forward", "nn", 7168, 4096),
        ("forward_t", "nt", 7168, 4096),
        ("dgrad", "nt", 4096, 7168),
        ("dgrad_t", "nn", 4096, 7168),
        ("wgrad", "tn", 7168, 4096),
        ("wgrad_f32", "tn_f32", 7168, 4096),
        ("fp8_forward", "fp8_nt", 7168, 4096),
        ("fp8_dgrad", "fp8_nt", 4096, 7168),
        ("fp8_wgrad", "fp8_tn_f32", 7168, 4096),
    ],
)
def test_products_are_written_as_the_driver_reads_them(op, kind, k, n):
    case = cases.Case(cases.SHAPES["dsv3_up"], ab.ALL_OPS[op], "random")
    line = ab.problem_line(op, case.shape, "random", seed=0)
    found_kind, label, groups, rows, *numbers = line.split()
    assert (found_kind, label, groups, rows) == (kind, case.name, "8", "32768")
    assert list(map(int, numbers)) == [k, n, *case.group_sizes]


@pytest.mark.parametrize(
    "op, kind",
    [
        ("wgrad_add", "tn_f32_add"),
        ("wgrad_then_add", "tn_f32_then_add"),
        ("quantize_ragged", "quantize_ragged"),
    ],
)
def test_other_ops_are_written_as_the_driver_reads_them(op, kind):
    options = ab.parse_arguments(["driver", "--ops", op, "--shapes", "dsv3_up"])
    (line,) = ab.problem_lines(options)
    found_kind, label, *numbers = line.split()
    sizes = cases.Case(cases.SHAPES["dsv3_up"], cases.OPS["forward"], "random").group_sizes
    assert (found_kind, label) == (kind, f"dsv3_up/{op}/random")
    assert list(map(int, numbers)) == [8, 32768, 7168, 4096, *sizes]


def test_updates_are_written_as_the_driver_reads_them():
    options = ab.parse_arguments(["driver", "--ops", "syr2k_f64", "--shapes", "tiny_fine"])
    assert "syr2k_f64 16x1024x1024/syr2k_f64 16 1024 1024 1024" in ab.problem_lines(options)


def test_two_builds_take_turns(tmp_path, capsys):
    drivers = [fake_driver(tmp_path / "a", [30.0, 8.0]), fake_driver(tmp_path / "b", [20.0, 10.0])]
    ab.main(
        [*map(str, drivers), "--shapes", "tiny_fine", "--ops", "forward", "wgrad", "--rounds", "3"]
    )
    header, forward, wgrad = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["ratio", "range"]
    assert forward.startswith("tiny_fine/forward/random") and " 1.500 " in forward
    assert wgrad.startswith("tiny_fine/wgrad/random") and " 0.800 " in wgrad


def test_a_wrong_result_is_no_time(tmp_path):
    driver = fake_driver(tmp_path / "wrong", [30.0], "WRONG")
    with pytest.raises(RuntimeError, match="tiny_fine/forward/random"):
        ab.main([str(driver), "--shapes", "tiny_fine", "--ops", "forward", "--rounds", "1"])
