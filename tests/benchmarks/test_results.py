"""Tests of how benchmarks process measurements: ratios, and files of results."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.fp8 import quantizers
from benchmarks.harness import measure, results_file
from benchmarks.harness.bandwidth import moved_bytes
from benchmarks.harness.peer import Role
from benchmarks.harness.recorders import Sample


def fake_results(**us: list[float]) -> dict[str, measure.PeerResult]:
    roles = {"ours": Role.OURS, "cublas_dense": Role.CEILING}
    roles |= dict.fromkeys(("copy", "memset"), Role.BANDWIDTH)
    return {
        name: measure.PeerResult(
            roles.get(name, Role.GROUPED), "measured", samples=[Sample(t, None) for t in times]
        )
        for name, times in us.items()
    }


def test_the_floor_is_the_largest_bound():
    traffic, written = 10**9, 9 * 10**8
    copy, memset = [200.0, 100.0, 300.0], [160.0, 80.0, 260.0]
    bytes_us = np.array(copy) * traffic / moved_bytes("copy")
    write_us = np.array(memset) * written / moved_bytes("memset")
    assert np.all(write_us > bytes_us)
    for dense in (write_us / 2, write_us * 2):
        ours = 2 * np.maximum(dense, write_us)
        measured = fake_results(ours=ours, cublas_dense=dense, copy=copy, memset=memset)
        ratios = measure.ratios(traffic, written, measured)
        assert ratios["floor"] == pytest.approx(0.5)
        assert not {"copy", "memset"} & set(ratios)
    assert ratios["write_floor"] == pytest.approx(0.25)
    assert ratios["byte_floor"] == pytest.approx(np.median(bytes_us / ours))
    # If little of the traffic is written, the time of a copy is the floor.
    ratios = measure.ratios(
        traffic, traffic // 100, fake_results(ours=ours, copy=copy, memset=memset)
    )
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


def test_results_are_saved_compactly_and_read_together(tmp_path):
    def record(case: str, **us: float):
        peers = {name: {"us": [time, 2 * time], "names": ["k[0]"]} for name, time in us.items()}
        return {"case": case, "peers": peers, "ratios": us}

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    results_file.save({"cases": [record("a", ours=1.23456789)], "commit": "1"}, first)
    later = [record("a", ours=7.0, stock=70.0), record("b", ours=-0.000123456)]
    results_file.save({"cases": later, "commit": "2", "seconds": 1}, second)
    # Each peer has one line, however many numbers it has.
    line = '    "ours": {"us":[1.2346,2.4691],"names":["k[0]"]}'
    assert line in first.read_text().splitlines()
    both = results_file.load([first, second])
    assert both["commit"] == "1" and both["seconds"] == 1
    a, b = both["cases"]
    assert a["ratios"] == {"ours": 1.2346, "stock": 70.0}
    assert a["peers"]["stock"]["us"] == [70.0, 140.0] and b["ratios"] == {"ours": -0.00012346}


def test_peers_that_are_not_installed_are_left_out_of_files(tmp_path):
    absent = {"status": "skipped", "reason": "quack is not installed"}
    too_large = {"status": "skipped", "reason": "its copies need 112 GiB"}
    results = {"cases": [{"peers": {"ours": {}, "quack": absent, "stock": too_large}}]}
    results_file.save(results, tmp_path / "out.json")
    saved = results_file.load([tmp_path / "out.json"])
    assert saved["cases"][0]["peers"] == {"ours": {}, "stock": too_large}
    assert "not installed" in saved["excerpt"] and "quack" in results["cases"][0]["peers"]


def test_quantisers_may_differ_in_rare_values_but_in_no_scale():
    values = jnp.asarray(np.arange(1, 101) / 32, jnp.float8_e4m3fn)
    scales = jnp.linspace(0.5, 1.5, 8, dtype=jnp.float32)
    expected = (values, scales)
    assert quantizers.differing_share(expected, expected) == 0
    one_off = (values.at[3].set(2.0), scales)
    assert quantizers.differing_share(one_off, expected) == pytest.approx(0.01)
    assert quantizers.differing_share((values, scales.at[3].mul(1 + 2e-7)), expected) == 1
