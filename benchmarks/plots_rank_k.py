"""A plot of symmetric updates: how many times as fast as each expression or call they replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt

from benchmarks.harness.peer import Role
from benchmarks.rank_k import UPDATES

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#E69F00", "#56B4E9", "#009E73")


def updates(results: Mapping, title: str) -> plt.Figure:
    """A panel an update, a group of bars a shape."""
    records = [record for record in results["cases"] if record["op"] in UPDATES]
    ops = list(dict.fromkeys(record["op"] for record in records))
    rows = max(sum(record["op"] == op for record in records) for op in ops)
    size = (1 + 3.6 * len(ops), 2 + 0.5 * rows)
    figure, panels = plt.subplots(1, len(ops), figsize=size, squeeze=False, layout="constrained")
    for axes, op in zip(panels[0], ops, strict=True):
        _panel(axes, [record for record in records if record["op"] == op])
        axes.set_title(op)
    figure.suptitle(title)
    return figure


def _panel(axes: plt.Axes, records: Sequence[Mapping]) -> None:
    others = list(
        dict.fromkeys(
            name
            for record in records
            for name in record["ratios"]
            if record["peers"].get(name, {}).get("role") not in (None, Role.VARIANT)
        )
    )
    height = 0.8 / len(others)
    rows = np.arange(len(records))
    for index, (name, color) in enumerate(zip(others, COLORS, strict=False)):
        ratios = [record["ratios"].get(name, np.nan) for record in records]
        axes.barh(rows + index * height, ratios, height, color=color, label=f"over {name}")
    axes.set_yticks(rows + 0.4 - height / 2, [record["shape"]["name"] for record in records])
    axes.invert_yaxis()
    axes.axvline(1, color="#000000", linewidth=1)
    axes.set_xlabel("times as fast")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=7)
