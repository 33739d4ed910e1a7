"""What the first page says of the recorded products: each number beside the sizes that it is of."""

from __future__ import annotations

from benchmarks.harness.cases import SHAPES, SUITES, Shape
from benchmarks.harness.quoting import microseconds, table
from benchmarks.records_by_topic import GIB, case, cases, memory_of, ours

# Where the sizes of the shapes come from.
PROJECTIONS = {
    "mixtral_up": "Mixtral 8x7B, gate or up",
    "mixtral_down": "Mixtral 8x7B, down",
    "dsv3_up": "DeepSeek-V3, gate and up",
    "dsv3_down": "DeepSeek-V3, down",
    "qwen3_up": "Qwen3-30B-A3B, gate and up",
    "qwen3_down": "Qwen3-30B-A3B, down",
    "ds256_n512": "DeepSeek-V3, an eighth of gate and up",
    "decode_up": "DeepSeek-V3, decoding",
    "decode_small": "Qwen3-30B-A3B, decoding",
}


def sizes(shape: Shape) -> str:
    """In words."""
    return f"{shape.groups} experts, {shape.rows} rows, {shape.k} to {shape.n} columns"


def stock_example() -> str:
    """The call that the first page begins with."""
    name = "qwen3_up"
    stock = cases("stock")[f"{name}/forward/random"]["peers"]["stock"]["median_us"] / 1e3
    needed = memory_of("stock", name, "forward") / GIB
    return (
        f"{stock:.0f} ms and {needed:.0f} GiB of temporary memory for the gate and up projections "
        f"of a Qwen3-30B-A3B layer in bf16 ({sizes(SHAPES[name])}). Here the same call takes "
        f"{ours(cases('ragged')[f'{name}/forward/random'])['median_us'] / 1e3:.1f} ms and "
        f"{memory_of('ours', name, 'forward')} bytes"
    )


def products() -> str:
    """The nine shapes, and our times on an H200 and on an H100."""
    ops = ("forward", "dgrad", "wgrad")
    rows = []
    for shape in SUITES["main"]:
        row = [f"`{shape.name}`: {PROJECTIONS[shape.name]}"]
        row += [str(size) for size in (shape.groups, shape.rows)]
        row.append(f"{shape.k}, {shape.n}")
        for op in ops:
            times = (
                microseconds(case(topic, f"{shape.name}/{op}/random"))
                for topic in ("ragged", "h100")
            )
            row.append(" / ".join(times))
        rows.append(row)
    return table(["us on H200 / H100", "experts", "rows", "k, n", *ops], rows)
