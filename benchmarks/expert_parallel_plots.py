"""Plots of layers over several GPUs: speed as predicted and measured, and where time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.moe import Layer
from jax_grouped_gemm._src.expert_parallel.prediction import Prediction, Shape, choose

FORWARD, STEP = "ep_forward", "ep_step"
DEVICES = (1, 2, 4, 8)
LEGS = {FORWARD: 2, STEP: 4}  # of tokens or their gradients


def predictions(layer: Layer, copy_engines: bool) -> list[Prediction]:
    """Of as many experts in all as in the record, by the number of GPUs."""
    sizes = layer.tokens, layer.embed, layer.hidden, layer.experts, layer.top_k
    return [
        choose(Shape(*sizes, n), copy_engines=copy_engines)
        for n in DEVICES
        if layer.experts % n == 0
    ]


def fraction(prediction: Prediction, op: str) -> float:
    """Of the speed without communication."""
    return prediction.forward_fraction if op == FORWARD else prediction.step_fraction


def draw_scaling(axes: Any, records: Sequence[Mapping], op: str, colors: Sequence[str]) -> None:
    """Lines as predicted, points as measured, a colour a layer."""
    of_op = [record for record in records if record["op"] == op]
    for color, record in zip(colors, of_op, strict=False):
        layer = Layer(**record["shape"])
        predicted = [fraction(p, op) for p in predictions(layer, record["copy_engines"])]
        axes.plot(DEVICES[: len(predicted)], predicted, color=color, label=layer.name)
        if (measured := record["fractions"].get("ours")) is not None:
            axes.plot([record["devices"]], [measured], "o", color=color)
    axes.set(xscale="log", xticks=DEVICES, ylim=(0, 1.05), xlabel="GPUs")
    axes.set_xticks([], minor=True)
    axes.set_xticklabels(map(str, DEVICES))
    axes.set_ylabel("of the speed without communication")
    axes.set_title({FORWARD: "forward", STEP: "forward and backward"}[op])
    axes.legend(title="line: predicted, point: measured")


def parts(record: Mapping, links: Mapping) -> dict[str, float]:
    """Milliseconds of a call of ours: the layer alone, its legs by themselves, and what is left."""
    whole = record["peers"]["ours"]["median_us"]
    alone = record["peers"]["local"]["median_us"]
    legs = LEGS[record["op"]] * links["ppermute"]["us"]
    found = {"one GPU's share": alone, "collectives": legs, "the rest": whole - alone - legs}
    return {name: max(us, 0.0) / 1e3 for name, us in found.items()}


def draw_parts(axes: Any, records: Sequence[Mapping], op: str, colors: Sequence[str]) -> None:
    """A bar a layer."""
    links = {record["shape"]["name"]: record["links"] for record in records if "links" in record}
    of_op = [r for r in records if r["op"] == op and r["shape"]["name"] in links]
    names = [record["shape"]["name"] for record in of_op]
    stacks = [parts(record, links[name]) for record, name in zip(of_op, names, strict=True)]
    left = [0.0] * len(stacks)
    for color, part in zip(colors, stacks[0] if stacks else (), strict=False):
        widths = [stack[part] for stack in stacks]
        axes.barh(names, widths, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="milliseconds")
    axes.legend()
