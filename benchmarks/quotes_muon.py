"""What the pages say of Muon and of programs over several devices."""

from __future__ import annotations

from benchmarks.harness.quoting import table
from benchmarks.records_by_topic import cases

TOPICS = {"muon": "H200", "muon_h100": "H100"}


def milliseconds(us: float) -> str:
    """With three digits or so."""
    return f"{us / 1e3:.1f}"


def muon() -> str:
    """The iteration alone, beside einsums."""
    rows = []
    for topic, card in TOPICS.items():
        for found in cases(topic).values():
            if found["op"] == "newton_schulz":
                us = {name: peer["median_us"] for name, peer in found["peers"].items()}
                rows.append(
                    [
                        " + ".join(f"{g} of {n} x {m}" for g, n, m in found["shape"]["stacks"]),
                        card,
                        *map(milliseconds, (us["ours"], us["standard"], us["einsum_bf16"])),
                        f"{us['einsum_bf16'] / us['ours']:.2f}",
                    ]
                )
    header = ["matrices", "GPU", "ours ms", '`method="standard"`', "einsums in bf16", "times ours"]
    return table(header, rows)


def muon_steps() -> str:
    """Whole steps, beside those of Optax."""
    rows = []
    for topic, card in TOPICS.items():
        for found in cases(topic).values():
            if found["op"] == "step":
                us = {name: peer["median_us"] for name, peer in found["peers"].items()}
                rows.append(
                    [
                        " + ".join(f"{g} of {n} x {m}" for g, n, m in found["shape"]["stacks"]),
                        card,
                        *map(milliseconds, (us["ours"], us["ours_bf16"], us["optax_muon"])),
                        f"{us['optax_muon'] / us['ours']:.2f}",
                        milliseconds(us["adamw"]),
                    ]
                )
    header = ["parameters", "GPU", "ours ms", "in bf16", "`optax.contrib.muon`", "times ours"]
    return table([*header, "AdamW"], rows)


def data_parallel() -> str:
    """What two GPUs do in the time of one."""
    names = {
        "training": "training step of the demo's model",
        "muon": "`optim.muon`, split along the stack",
        "split": "`optim.orthogonalize`, split inside",
    }
    rows = []
    for found in cases("data_parallel").values():
        one, ours = (found["peers"][name]["median_us"] for name in ("one", "ours"))
        rows.append(
            [
                f"{names[found['op']]}, {found['shape']['name']} a GPU",
                *map(milliseconds, (one, ours)),
                f"{found['ratios']['speedup']:.2f}",
                f"{found['ratios']['einsum']:.2f}" if "einsum" in found["ratios"] else "-",
            ]
        )
    header = ["work", "one GPU ms", "two GPUs ms", "times the work", "einsums over ours"]
    return table(header, rows)
