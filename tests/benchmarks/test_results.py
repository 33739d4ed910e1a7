"""What the benchmarks make of their measurements: ratios, bars, files."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest


from benchmarks import bars
from benchmarks.harness import cases, measure, results_file
from benchmarks.harness.device_activity import Sample
from benchmarks.fp8 import quantizers
from benchmarks.harness.bandwidth import moved_bytes
from benchmarks.harness.peer import Role


def fake_results(**us: list[float]) -> dict[str, measure.PeerResult]:
    roles = {"ours": Role.OURS, "cublas_dense": Role.CEILING}
    roles |= dict.fromkeys(("copy", "fill", "memset"), Role.BANDWIDTH)
    return {
        name: measure.PeerResult(
            roles.get(name, Role.GROUPED), "measured", samples=[Sample(t, None) for t in times]
        )
        for name, times in us.items()
    }


def test_the_floor_is_the_largest_bound():
    traffic, written = 10**9, 9 * 10**8
    copy = [200.0, 100.0, 300.0]
    fill, memset = [150.0, 90.0, 250.0], [160.0, 80.0, 260.0]
    bytes_us = np.array(copy) * traffic / moved_bytes("copy")
    write_us = np.minimum(fill, memset) * written / moved_bytes("fill")
    assert np.all(write_us > bytes_us)
    for dense in (write_us / 2, write_us * 2):
        ours = 2 * np.maximum(dense, write_us)
        measured = fake_results(ours=ours, cublas_dense=dense, copy=copy, fill=fill, memset=memset)
        ratios = measure.ratios(traffic, written, measured)
        assert ratios["floor"] == pytest.approx(0.5)
        assert not {"copy", "fill", "memset"} & set(ratios)
    assert ratios["write_floor"] == pytest.approx(0.25)
    assert ratios["byte_floor"] == pytest.approx(np.median(bytes_us / ours))
    # Little of it is written: copying bounds it.
    ratios = measure.ratios(traffic, traffic // 100, fake_results(ours=ours, copy=copy, fill=fill))
    assert ratios["floor"] == ratios["byte_floor"] > ratios["write_floor"]


def test_without_our_time_there_are_no_ratios():
    assert measure.ratios(10**9, 10**9, fake_results(stock=[1.0])) == {}


def test_a_second_pass_adds_what_the_first_has_no_time_of():
    def peers(**us):
        return {
            name: {"status": "measured", "median_us": time} if time else {"status": "failed"}
            for name, time in us.items()
        }

    first = {"case": "a", "peers": peers(ours=1, fast=2, broken=None), "ratios": {"fast": 2.0}}
    second = {
        "case": "a",
        "peers": peers(ours=5, fast=None, slow=40, broken=10),
        "ratios": {"slow": 8.0, "broken": 2.0},
    }
    merged = measure.merge(first, second)
    assert merged["peers"] == peers(ours=1, fast=2, slow=40, broken=10)
    assert merged["ratios"] == {"fast": 2.0, "slow": 8.0, "broken": 2.0}


def bar_record(shape: str, op: str, distribution: str, kernels: int = 1, tflops=100.0, **ratios):
    roles = {"cublas_loop": Role.LOOP, "cublas_dense": Role.CEILING}
    peers = {name: {"role": roles.get(name, Role.GROUPED)} for name in ratios}
    ours = {"role": Role.OURS, "kernels": kernels, "tflops": tflops}
    case = cases.Case(cases.SHAPES[shape], cases.OPS[op], distribution)
    return {
        "case": case.name,
        "shape": dataclasses.asdict(case.shape),
        "op": op,
        "distribution": distribution,
        "peers": peers | {"ours": ours},
        "ratios": ratios,
    }


def verdicts(*records, **run) -> dict[str, bool | None]:
    return {bar.name: bar.cleared for bar in bars.check({"cases": list(records)} | run)}


def test_bars_on_ratios():
    name = "forward and dgrad, each shape"
    for grouped, dense, cleared in ((1.06, 0.5, True), (1.04, 0.98, True), (1.04, 0.96, False)):
        record = bar_record("dsv3_up", "dgrad", "random", quack=grouped, cublas_dense=dense)
        assert verdicts(record)[name] is cleared
        # Only random sizes count, and only products that keep their rows.
        skewed = bar_record("dsv3_up", "dgrad", "zipf", quack=grouped, cublas_dense=dense)
        assert verdicts(skewed)[name] is None
        gradient = bar_record("dsv3_up", "wgrad", "random", quack=grouped, cublas_dense=dense)
        assert verdicts(gradient)[name] is None
        assert verdicts(gradient)["wgrad, each shape"] is cleared
    # The fastest peer counts, and the mean is geometric.
    records = [
        bar_record("dsv3_up", "forward", "random", quack=2.0, stock=9.0),
        bar_record("dsv3_down", "forward", "random", tokamax=0.63, stock=9.0),
    ]
    assert verdicts(*records)["forward and dgrad, geometric mean"] is True
    slower = bar_record("dsv3_down", "forward", "random", tokamax=0.62)
    assert verdicts(records[0], slower)["forward and dgrad, geometric mean"] is False
    loop = "cuBLAS loop"
    assert verdicts(bar_record("dsv3_up", "wgrad", "zipf", cublas_loop=0.979))[loop] is False
    assert verdicts(bar_record("dsv3_up", "wgrad", "zipf", cublas_loop=0.981))[loop] is True
    memory = "memory-bound, of the byte floor"
    assert verdicts(bar_record("decode_up", "dgrad", "random", byte_floor=0.91))[memory] is False
    assert verdicts(bar_record("dsv3_up", "dgrad", "random", byte_floor=0.1))[memory] is None


def test_bars_on_skew_kernels_and_host():
    skew = "wgrad, skewed sizes"
    for tflops, cleared in ((92.0, True), (90.0, False)):
        records = [
            bar_record("dsv3_up", "wgrad", "uniform"),
            bar_record("dsv3_up", "wgrad", "zipf", tflops=tflops),
            bar_record("dsv3_up", "wgrad", "random", tflops=1.0),
        ]
        assert verdicts(*records)[skew] is cleared
    kernels = "kernels a call"
    assert verdicts(bar_record("dsv3_up", "forward", "random", kernels=2))[kernels] is False
    assert verdicts(bar_record("decode_up", "forward", "random", kernels=2))[kernels] is True
    assert verdicts(bar_record("decode_up", "forward", "random", kernels=3))[kernels] is False
    slope = {"wall_us": 12.0, "device_us": 4.0, "enqueue_us": 1.0, "call_enqueue_us": 45.0}
    product = "host time a product inside a jitted call"
    assert verdicts(host={"with": slope})[product] is True
    for longer in ({"wall_us": 15.0}, {"enqueue_us": 11.0}):
        assert verdicts(host={"with": slope | longer})[product] is False
    first = {"import_s": 0.6, "first_call_s": 0.5, "trace_s": 0, "compile_s": 0, "run_s": 0}
    assert verdicts(first_call=first)["import and first call"] is False
    assert all(cleared is None for cleared in verdicts().values())


def test_the_report_names_the_worst_case_and_every_miss():
    records = [
        bar_record(shape, "forward", "random", cublas_loop=ratio)
        for shape, ratio in (("dsv3_up", 0.9), ("dsv3_down", 0.8), ("qwen3_up", 1.5))
    ]
    (bar,) = [bar for bar in bars.check({"cases": records}) if bar.name == "cuBLAS loop"]
    head, *missed, missing = bar.lines()
    assert head.startswith("FAIL") and "1 of 3" in head and "dsv3_down" in head
    assert [line.split()[0] for line in missed] == [
        "dsv3_down/forward/random",
        "dsv3_up/forward/random",
    ]
    assert "missing:" in missing and "mixtral_up/forward/random" in missing


def test_results_are_saved_compactly_and_read_together(tmp_path):
    def record(case: str, **us: float):
        peers = {name: {"us": [time, 2 * time], "names": ["k[0]"]} for name, time in us.items()}
        return {"case": case, "peers": peers, "ratios": us}

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    results_file.save({"cases": [record("a", ours=1.23456789)], "host": {"with": 1}}, first)
    later = [record("a", ours=7.0, stock=70.0), record("b", ours=-0.000123456)]
    results_file.save({"cases": later, "host": {"with": 2}, "seconds": 1}, second)
    # A line for a peer, however many numbers it has.
    line = '    "ours": {"us": [1.2346, 2.4691], "names": ["k[0]"]}'
    assert line in first.read_text().splitlines()
    both = results_file.load([first, second])
    assert both["host"] == {"with": 1} and both["seconds"] == 1
    a, b = both["cases"]
    assert a["ratios"] == {"ours": 1.2346, "stock": 70.0}
    assert a["peers"]["stock"]["us"] == [70.0, 140.0] and b["ratios"] == {"ours": -0.00012346}


def test_training_runs_of_several_files_are_kept(tmp_path):
    paths = [tmp_path / f"{seed}.json" for seed in (1, 2)]
    for seed, path in zip((1, 2), paths, strict=True):
        results_file.save({"command": f"{seed}", "fp8_training": [{"seed": seed}]}, path)
    found = results_file.load(paths)
    assert found["fp8_training"] == [{"seed": 1}, {"seed": 2}] and found["command"] == "1"


def test_quantisers_may_differ_in_rare_values_but_in_no_scale():
    values = jnp.asarray(np.arange(1, 101) / 32, jnp.float8_e4m3fn)
    scales = jnp.linspace(0.5, 1.5, 8, dtype=jnp.float32)
    expected = (values, scales)
    assert quantizers.differing_share(expected, expected) == 0
    one_off = (values.at[3].set(2.0), scales)
    assert quantizers.differing_share(one_off, expected) == pytest.approx(0.01)
    assert quantizers.differing_share((values, scales.at[3].mul(1 + 2e-7)), expected) == 1
