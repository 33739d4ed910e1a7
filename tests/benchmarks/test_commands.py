"""Runs every step of the benchmarks' commands, with tiny shapes, on any machine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import (
    accumulate,
    data_parallel,
    expert_parallel,
    fp8_training,
    grouped_gemm,
    memory,
    moe,
    muon,
    optimizer,
    rank_k,
    run,
    targets,
    training,
    weight_only,
)
from benchmarks.fp8 import __main__ as fp8
from benchmarks.fp8.cases import PRODUCTS, QUANTIZERS, STEP
from benchmarks.harness import results_file

TARGET_CONFIG = Path(__file__).parents[1] / "data" / "h200_target_config.txtpb"


@pytest.fixture
def dry_run(tmp_path):
    """Returns a function that runs a command dry, checks the record, and returns cases by name."""

    def run_dry(main, *options: str) -> dict[str, dict]:
        output = tmp_path / "out.json"
        arguments = ["--dry-run", "--commit", "abc", *options, "--output", str(output)]
        returned = main(arguments)
        results = json.loads(output.read_text())
        assert results["command"].startswith("python -m benchmarks.")
        assert "--dry-run" in results["command"]
        assert "--output" not in results["command"]
        assert results["device"] and results["commit"] == "abc" and results["seed"] >= 0
        assert results["machine"]["packages"]["jax"]
        assert results["not_measured"] == []
        assert results["cases"] and isinstance(results["summary"], dict)
        assert [case["case"] for case in returned["cases"]] == [c["case"] for c in results["cases"]]
        for case in results["cases"]:
            assert case["shape"]["name"] and case["op"]
            assert case["peers"].get("ours", {"status": "measured"})["status"] == "measured"
            assert isinstance(case["ratios"], dict)
        return {case["case"]: case for case in results["cases"]}

    return run_dry


def test_data_parallel(dry_run):
    found = dry_run(data_parallel.COMMAND.main, "--devices", "2")
    for record in found.values():
        assert record["devices"] == 2 and record["ratios"]["speedup"] > 0
        assert min(record["peers"]["one"]["us"] + record["peers"]["ours"]["us"]) > 0


def test_ragged_products(dry_run, capsys):
    found = dry_run(run.COMMAND.main, "--ops", "forward", "wgrad", "--seed", "3")
    assert {"tiny/forward/random", "tiny_fine/wgrad/random"} <= set(found)
    for record in found.values():
        if record["op"] in ("forward", "wgrad"):
            # The second pass measured stock JAX. Peers that this machine lacks are left out.
            assert record["peers"]["stock"]["status"] == "measured"
            assert record["peers"].get("quack", {"us": [1]})["us"]
    printed = capsys.readouterr().out
    assert "tiny/forward/random" in printed and "best grouped peer" in printed
    assert importlib.util.find_spec("torch") or "torch is not installed [all cases]" in printed


def test_layers_over_devices(dry_run):
    """A dry run measures the chosen strategies, the naive layer and the local layer."""
    options = "--devices", "2", "--strategies", "ours", "ragged"
    found = dry_run(expert_parallel.COMMAND.main, *options)
    assert set(found) == {"tiny/ep_forward", "tiny/ep_step"}
    for record in found.values():
        statuses = {name: peer["status"] for name, peer in record["peers"].items()}
        measured = dict.fromkeys(("ours", "ragged", "naive", "local"), "measured")
        assert statuses == measured
        assert 0 < record["fractions"]["ours"] and record["max_over_mean"] >= 1
    assert found["tiny/ep_forward"]["links"]["ppermute"]["us"] > 0


def test_accumulate(dry_run):
    found = dry_run(accumulate.COMMAND.main)
    assert set(found) == {"tiny/wgrad_add/random", "tiny_fine/wgrad_add/random"}
    for record in found.values():
        assert record["peers"]["ours_then_add"]["error"]["total"] < 1e-5
        assert record["peers"]["ours_product"]["status"] == "measured"
        assert record["ratios"]["ours_then_add"] > 0


def test_optimizer(dry_run):
    found = dry_run(optimizer.COMMAND.main)
    assert set(found) == {
        "tiny/program/bfloat16",
        "tiny/apply/float32",
        *(f"tiny/adamw/{gradients}" for gradients in optimizer.GRADIENTS),
    }
    for record in found.values():
        for name, peer in record["peers"].items():
            assert peer["status"] == "measured", (name, peer)
        assert record["ratios"]["byte_floor"] > 0
    step = found["tiny/adamw/float32"]
    assert step["ratios"]["optax_copy"] > 0 and step["ratios"]["optax_quantize"] > 0
    assert step["bytes"] == 30 * step["parameters"]


def test_moe(dry_run):
    found = dry_run(moe.COMMAND.main, "--no-host")
    assert set(found) == {"tiny/moe_forward", "tiny/moe_step"}
    for record in found.values():
        ours, unfused = (record["peers"][name] for name in ("ours", "ours_unfused"))
        assert ours["error"]["total"] < 0.02 and ours["temporary_bytes"] > 0
        assert unfused["status"] == "measured" and record["ratios"]["ours_unfused"] > 0
        assert not {"quack", "quack_tuned"} & set(record["peers"])  # they need a GPU


def test_weight_only(dry_run):
    (record,) = dry_run(weight_only.COMMAND.main, "--formats", "int8", "--no-host").values()
    assert record["case"] == "tiny_48/int8" and record["weights"] == "int8"
    for name in ("ours", "dequantised", "bf16"):
        assert record["peers"][name]["error"]["total"] < 0.02


def test_fp8(dry_run, tmp_path):
    found = dry_run(fp8.COMMAND.main, "--shapes", "tiny", "--no-host")
    assert {name.split("/")[1] for name in found} == {*PRODUCTS, *QUANTIZERS, STEP}
    for op in PRODUCTS:
        record = found[f"tiny/{op}/random"]
        assert record["peers"]["ours_bf16"]["status"] == "measured"
        assert record["peers"]["ours"]["error"]["total"] > 0
        assert record["ratios"]["byte_floor"] > 0
    assert found["tiny/quantize_ragged/random"]["peers"]["ours"]["error"]["total"] == 0
    assert found["tiny/quantize_rows/random"]["peers"]["copy"]["tbps"] > 0
    step = found[f"tiny/{STEP}/random"]
    assert step["ratios"]["ours_bf16"] > 0
    assert set(step["cosine_distance"]["ours"]) == {"out", "d_lhs", "d_rhs"}
    verdicts = targets.check(results_file.load([tmp_path / "out.json"]))
    judged = {verdict.target.name: verdict.met for verdict in verdicts}
    assert judged["FP8 products, relative error"] is True
    assert judged["FP8 against unquantised, 1 - cosine"] is True


def test_muon(dry_run):
    pytest.importorskip("optax")
    found = dry_run(muon.COMMAND.main)
    assert set(found) == {"tiny/newton_schulz", "tiny/step"}
    iterations, steps = found["tiny/newton_schulz"], found["tiny/step"]
    assert all(peer["status"] == "measured" for peer in iterations["peers"].values())
    assert iterations["peers"]["ours"]["error"]["total"] < 0.02
    assert iterations["ratios"]["einsum_bf16"] > 0
    assert {"optax_muon", "optax_adamw", "bf16_gradients"} <= set(steps["ratios"])


def test_symmetric_updates(dry_run):
    found = dry_run(rank_k.COMMAND.main, "--ops", "syrk", "her2k_c128")
    shapes = [rank_k.named(shape) for shape in rank_k.TINY_SHAPES]
    assert set(found) == {f"{shape}/{op}" for shape in shapes for op in ("syrk", "her2k_c128")}
    for record in found.values():
        assert "cublas_loop" in record["peers"]
        assert record["peers"]["symmetric"]["error"]["total"] < 0.01
    assert "A@A.T" in found["2x24x16/syrk"]["ratios"]


@pytest.mark.parametrize(
    "dtype, precision, limit",
    [
        ("bfloat16", "default", 0.02),
        ("float32", "default", 2e-3),
        ("float32", "highest", 5e-6),
        ("float64", "default", 1e-14),
    ],
)
def test_lists(dry_run, dtype, precision, limit):
    options = "--dtype", dtype, "--precision", precision
    (record,) = dry_run(grouped_gemm.COMMAND.main, *options).values()
    measured = {n for n, peer in record["peers"].items() if peer["status"] == "measured"}
    assert {"ours", "device unsorted", "cublas_loop"} <= measured
    assert all(record["peers"][name]["error"]["total"] < limit for name in measured)
    assert "CUTLASS kDeviceOnly sorted" in record["peers"]
    # Only records of bfloat16 have the plain name of the op.
    assert (record["op"] == "grouped_gemm") == (dtype == "bfloat16")


def test_bfloat16_has_one_precision(capsys):
    with pytest.raises(SystemExit):
        grouped_gemm.COMMAND.main(["--dry-run", "--precision", "highest"])
    assert "--dtype float32" in capsys.readouterr().err


def test_training(dry_run):
    pytest.importorskip("flax")
    (record,) = dry_run(training.COMMAND.main, "--peers", "ours", "stock").values()
    ours, stock = (record["peers"][name]["run"] for name in ("ours", "stock"))
    ratio = stock["step_seconds"] / ours["step_seconds"]
    assert record["ratios"]["stock"] == pytest.approx(ratio, rel=1e-3)
    assert abs(ours["before"]["train"] - stock["before"]["train"]) < 1e-2

    (record,) = dry_run(fp8_training.COMMAND.main, "--seeds", "1", "--seed", "2").values()
    assert record["case"] == "dry_run/fp8_training/2"
    # Both runs start from equal parameters and differ only by the rounding of three steps.
    assert 0 < abs(record["loss_ratio"] - 1) < 0.05
    assert record["peers"]["ours_bf16"]["run"]["curve"]


def test_memory(dry_run):
    found = dry_run(memory.COMMAND.main, "--ops", "forward")
    for record in found.values():
        assert record["peers"]["stock"]["temporary_bytes"] > 0


def test_memory_of_a_gpu_that_is_not_there(extension, tmp_path):
    results = memory.COMMAND.main(
        ["--shapes", "qwen3_up", "--ops", "forward", "--target-config", str(TARGET_CONFIG)]
    )
    (record,) = results["cases"]
    ours, stock = (record["peers"][name]["temporary_bytes"] for name in ("ours", "stock"))
    assert "H200" in record["compiled_for"] and ours < 2**20 < 2**34 < stock
