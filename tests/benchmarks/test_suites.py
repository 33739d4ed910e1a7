"""Tests of benchmark suites: sweeps, a suite in one file, and time limits."""

from __future__ import annotations

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import cases, check, measure, results_file
from benchmarks.harness.command import Command
from benchmarks.harness.peer import Call, JaxPeer, NotOffered, Role
from benchmarks.harness.recorders import ClockRecorder, Sample
from benchmarks.harness.session import Job
from benchmarks.peers.sweep import Sweep


@dataclasses.dataclass(frozen=True)
class Tile:
    """A configuration of an imagined peer, which fails if the tile is too large."""

    size: int


def prepared_tiles(log: list[int], milliseconds: dict[int, float]):
    def prepare(tile: Tile) -> Call:
        log.append(tile.size)
        if tile.size > 256:
            raise ValueError(f"{tile.size} does not fit")
        return Call(lambda: time.sleep(milliseconds[tile.size] / 1e3))

    return prepare


def test_a_sweep_keeps_the_fastest_and_remembers_it(tmp_path):
    shape = cases.SHAPES["tiny"]
    problem = cases.Case(shape, cases.OPS["forward"], "random").problem
    tiles = [Tile(size) for size in (512, 64, 128, 256)]
    milliseconds = {64: 30, 128: 1, 256: 0}
    log = []
    prepare = prepared_tiles(log, milliseconds)
    first = Sweep("imagined", limit=3, retune=False, directory=tmp_path)
    assert first.best(problem, tiles, prepare).detail == str(Tile(128))
    assert sorted(log) == [64, 128, 512]
    # Neither the same run nor a later run tries the other tiles again, except with `retune`.
    for sweep in (first, Sweep("imagined", limit=4, retune=False, directory=tmp_path)):
        log.clear()
        assert sweep.best(problem, tiles, prepare).detail == str(Tile(128))
        assert log == [128]
    retuned = Sweep("imagined", limit=4, retune=True, directory=tmp_path)
    assert retuned.best(problem, tiles, prepare).detail == str(Tile(256))
    other = dataclasses.replace(problem, m=problem.m + 1)
    with pytest.raises(ValueError, match="512 does not fit"):
        retuned.best(other, tiles[:1], prepare)
    with pytest.raises(NotOffered):
        retuned.best(other, [], prepare)


class TwoKernels(ClockRecorder):
    """Records the same two kernels for every call."""

    def record(self, call: Call) -> None:
        call.wait(call.run())
        self._samples.append(Sample(5.0, ("gemm_up", "gemm_down"), (2.0, 3.0)))


def test_a_suite_is_one_file(rng, tmp_path, capsys):
    """A new suite consists only of cases, peers and a command."""
    x = rng.standard_normal((4, 8)).astype(np.float32)

    def work(scale: float) -> measure.Workload:
        def judge(call: Call) -> tuple[check.Error, bool]:
            error = check.Error(float(np.abs(np.asarray(call.run()) - scale * x).max()))
            return error, error.within(1e-6)

        return measure.Workload(
            f"tiny/scale/{scale}",
            problem=scale,
            operands=(jnp.asarray(x),),
            judge=judge,
            description={"shape": {"name": "tiny"}, "op": "scale", "dtype": "float32"},
            flops=x.size,
            bytes=2 * x.nbytes,
            written_bytes=x.nbytes,
        )

    def peers(scale: float) -> list[JaxPeer]:
        part = {"gemm_up": "up", "gemm_down": "down"}.get
        return [
            JaxPeer("ours", Role.OURS, lambda x: scale * x, part_of=part),
            JaxPeer("sums", Role.GROUPED, lambda x: x + (scale - 1) * x),
            JaxPeer("wrong", Role.GROUPED, lambda x: x),
        ]

    def jobs(options, session):
        session.recorder = TwoKernels()
        return [
            Job(f"{scale}", lambda scale=scale: session.compare(work(scale), peers(scale)))
            for scale in options.scales
        ]

    command = Command(
        "benchmarks.scale",
        "A suite.",
        jobs,
        add_arguments=lambda parser: parser.add_argument(
            "--scales", type=float, nargs="+", default=[2.0]
        ),
    )
    output = tmp_path / "out.json"
    command.main(["--dry-run", "--scales", "2", "3", "--output", str(output)])
    found = results_file.load([output])
    assert [case["case"] for case in found["cases"]] == ["tiny/scale/2.0", "tiny/scale/3.0"]
    for case in found["cases"]:
        statuses = {name: peer["status"] for name, peer in case["peers"].items()}
        assert statuses == {"ours": "measured", "sums": "measured", "wrong": "wrong"}
        assert case["peers"]["ours"]["parts_us"] == {"up": 2.0, "down": 3.0}
        assert case["ratios"] == {"sums": 1.0}
    assert found["summary"]["scale"]["sums_geomean"] == 1.0
    printed = capsys.readouterr().out
    assert "tiny/scale/2.0" in printed and "down" in printed


def test_a_time_limit_leaves_out_what_does_not_fit(tmp_path):
    def jobs(options, session):
        def slow() -> dict:
            time.sleep(0.3)
            return {"case": "a", "shape": {"name": "a"}, "op": "a", "peers": {}, "ratios": {}}

        return [Job("first", slow), Job("broken", lambda: {}["x"]), Job("last", slow)]

    command = Command("benchmarks.slow", "A suite.", jobs, timed=False)
    results = command.main(["--time-limit", "0.5"])
    assert [case["case"] for case in results["cases"]] == ["a"]
    assert results["not_measured"][-1] == "last" and results["recorder"] is None
