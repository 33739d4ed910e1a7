"""What the pages say of the recorded results: tables and numbers, each from the named records."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from benchmarks import quotes_first_page as first_page
from benchmarks import quotes_h100, quotes_muon
from benchmarks import quotes_layers as layers
from benchmarks.harness.cases import SUITES
from benchmarks.harness.measure import best_grouped
from benchmarks.harness.quoting import (
    ends,
    mean_and_span,
    microseconds,
    ratio,
    span,
    table,
    time_and_rate,
)
from benchmarks.harness.results_file import load
from benchmarks.records_by_topic import (
    GIB,
    RECORDS,
    RESULTS,
    case,
    cases,
    commits,
    memory_of,
    ours,
    ratios,
)

# In a table of the fastest, and in words.
PEERS = {
    "quack": ("q", "QuACK"),
    "torch_grouped_mm": ("t", "`torch._grouped_mm`"),
    "pallas_mgpu": ("p", "Pallas Mosaic GPU"),
    "tokamax": ("k", "tokamax"),
    "cutlass_cooperative": ("c", "CUTLASS, cooperative"),
    "cutlass_pingpong": ("c", "CUTLASS, ping-pong"),
    "stock": ("s", "`jax.lax.ragged_dot_general`"),
}
DENSE_FP8 = ("cublas_dense", "cublas_dense_exact")


def ragged() -> str:
    """The four products of the nine shapes."""
    ops = {"forward": "forward", "dgrad": "dgrad", "wgrad": "wgrad", "wgrad_f32": "wgrad to f32"}
    header = ["groups x rows, k, n"]
    for name in ops.values():
        header += [f"{name} us (TFLOP/s)", "vs best", "of floor"]
    rows = []
    for shape in SUITES["main"]:
        row = [f"`{shape.name}` {shape.groups} x {shape.rows}, {shape.k}, {shape.n}"]
        for op in ops:
            found = case("ragged", f"{shape.name}/{op}/random")
            best = best_grouped(found)
            row += [time_and_rate(found), f"{best[1]:.2f} {PEERS[best[0]][0]}" if best else "-"]
            row.append(ratio(found, "floor"))
        rows.append(row)
    return table(header, rows)


def ragged_letters() -> str:
    """What the letters of that table stand for."""
    found = [best_grouped(each) for each in cases("ragged").values() if "bytes" in each]
    names = sorted({best[0] for best in found if best}, key=list(PEERS).index)
    return " and ".join("{} is {}".format(*PEERS[name]) for name in names)


def ragged_peers() -> str:
    """Means and ranges of the ratios to each peer, over all shapes."""
    columns = {
        "forward": ("ragged", "forward"),
        "dgrad": ("ragged", "dgrad"),
        "wgrad": ("ragged", "wgrad"),
        "wgrad to f32": ("ragged", "wgrad_f32"),
        "forward, w [n, k]": ("majors", "forward_t"),
        "dgrad, w [k, n]": ("majors", "dgrad_t"),
    }
    older = {"`jax.lax.ragged_dot_general`": "stock", "tokamax 0.0.12": "tokamax"}

    def best(topic: str, op: str) -> list[float]:
        found = [best_grouped(each) for each in cases(topic).values() if each["op"] == op]
        return [best[1] for best in found if best]

    firsts = (mean_and_span(best(*each)) for each in columns.values())
    rows = [["the fastest of each shape", *firsts]]
    for name, (_, label) in (PEERS | {"cublas_loop": ("", "cuBLAS, a call a group")}).items():
        found = [ratios(topic, name, [op]) for topic, op in columns.values()]
        if any(found):
            rows.append([label, *map(mean_and_span, found)])
    for label, topic in older.items():
        found = (ratios(topic, topic, [op]) for _, op in columns.values())
        rows.append([f"{label} ({commits(topic)})", *map(mean_and_span, found)])
    return table(["geometric mean (range)", *columns], rows)


def ragged_summary() -> str:
    """The first page's table: ratios to those that read the sizes on the device too."""
    ops = {"forward": "forward", "dgrad": "dgrad", "wgrad": "wgrad"}
    rows = []
    for name in ("quack", "torch_grouped_mm", "pallas_mgpu"):
        found = (mean_and_span(ratios("ragged", name, [op])) for op in ops)
        rows.append([f"over {PEERS[name][1]}", *found])
    found = (mean_and_span(ratios("stock", "stock", [op])) for op in ops)
    rows.append(["over `jax.lax.ragged_dot`", *found])
    return table(["", *ops.values()], rows)


def decode() -> str:
    """Products of few rows a group in bf16 and in FP8."""
    rows = []
    for shape in SUITES["main"]:
        if not shape.name.startswith("decode"):
            continue
        bf16 = case("ragged", f"{shape.name}/forward/random")
        fp8 = case("fp8", f"{shape.name}/fp8_forward/random")
        rows.append(
            [
                f"`{shape.name}`: {shape.groups} experts, {shape.k} x {shape.n}",
                f"{shape.rows} ({shape.rows / shape.groups:.0f})",
                microseconds(bf16),
                ratio(bf16, "floor"),
                microseconds(fp8),
                ratio(fp8, "byte_floor"),
            ]
        )
    header = ["product", "rows (an expert)", "bf16 us", "of the floor", "FP8 us", "of the floor"]
    return table(header, rows)


def adapters() -> str:
    """Products of low-rank adapters, and their speed over torch's."""
    ops = "forward", "dgrad", "wgrad"
    header = ["groups x rows, k, n"]
    for op in ops:
        header += [f"{op} us", "vs torch"]
    rows = []
    for shape in SUITES["adapters"]:
        row = [f"`{shape.name}` {shape.groups} x {shape.rows}, {shape.k}, {shape.n}"]
        for op in ops:
            found = case("adapters", f"{shape.name}/{op}/random")
            row += [microseconds(found), ratio(found, "torch_grouped_mm")]
        rows.append(row)
    return table(header, rows)


def skew() -> str:
    """Weight gradients of unequal groups: time for a useful FLOP over that of equal ones."""

    def over_uniform(distribution: str) -> str:
        found = []
        for shape in SUITES["main"]:
            rates = [
                ours(cases("skew")[f"{shape.name}/wgrad/{each}"])["tflops"]
                for each in ("uniform", distribution)
            ]
            found.append(rates[0] / rates[1])
        return span(found)

    return (
        f"with one hot group they take {over_uniform('one_hot')} times as long as with uniform "
        f"sizes, and with Zipf's {over_uniform('zipf')} times"
    )


def accumulate() -> str:
    """How much faster the sum in place is."""
    found = {
        case["shape"]["name"]: case["ratios"]["ours_then_add"]
        for case in cases("accumulate").values()
    }
    low, high = (each(found, key=found.get) for each in (min, max))
    return f"{found[low]:.2f} (`{low}`) to {found[high]:.2f} times (`{high}`)"


def memory() -> str:
    """What ours and stock JAX need on one shape, and the most that ours need on any."""
    stock = (memory_of("stock", "qwen3_up", op) / GIB for op in ("forward", "wgrad"))
    most = max(ours(case)["temporary_bytes"] for case in cases("memory").values()) / 1e6
    return (
        f"{memory_of('ours', 'qwen3_up', 'forward')} bytes, and up to {most:.0f} MB where tiles "
        "are cut, against {:.0f} GiB (forward) and {:.0f} GiB (wgrad)".format(*stock)
    )


def float32() -> str:
    """Ragged products of float32 operands at both precisions."""
    ops = ("forward", "dgrad", "wgrad")
    kinds = {"`DEFAULT`": "float32_default", "`HIGHEST`": "float32_highest"}
    header = ["float32"]
    for kind in kinds:
        header += [f"{kind} {op} us (TFLOP/s), over cuBLAS" for op in ops]
    shapes = dict.fromkeys(c["shape"]["name"] for c in cases("float32_highest").values())
    rows = []
    for shape in shapes:
        row = [f"`{shape}`"]
        for topic in kinds.values():
            for op in ops:
                found = case(topic, f"{shape}/{op}/random")
                row.append(f"{time_and_rate(found)}, {ratio(found, 'cublas_loop')}")
        rows.append(row)
    return table(header, rows)


def float32_speedups() -> str:
    """Of lists and of symmetric updates at HIGHEST, over cuBLAS."""
    lists = ratios("lists_float32", "cublas_loop", ["grouped_gemm_f32"])
    updates = ratios("updates", "cublas_loop", ["syrk_f32", "syr2k_f32"])
    return f"{span(lists, 1)} and {span(updates, 1)} times"


def fp8() -> str:
    """FP8 forward and dgrad."""
    header = ["FP8"]
    for op in ("forward", "dgrad"):
        header += [f"{op} us (TFLOP/s)", "of dense cuBLAS", "vs torch"]
    rows = []
    for shape in SUITES["main"]:
        row = [f"`{shape.name}`"]
        for op in ("fp8_forward", "fp8_dgrad"):
            found = case("fp8", f"{shape.name}/{op}/random")
            dense = ratio(found, *DENSE_FP8)
            if shape.name.startswith("decode"):
                dense = f"{ratio(found, 'byte_floor')} of the byte floor"
            row += [time_and_rate(found), dense, ratio(found, "torch_scaled_grouped_mm")]
        rows.append(row)
    return table(header, rows)


def fp8_range() -> str:
    """Of dense cuBLAS, all shapes with many rows a group."""
    found = {
        f"`{shape.name}` {op.removeprefix('fp8_')}": min(
            case("fp8", f"{shape.name}/{op}/random")["ratios"][name] for name in DENSE_FP8
        )
        for shape in SUITES["main"]
        for op in ("fp8_forward", "fp8_dgrad")
        if shape.rows >= 256 * shape.groups
    }
    return ends(found)


def fp8_rest() -> str:
    """Weight gradients, steps of training and quantisers."""

    def rate(shape: str) -> str:
        return f"{ours(cases('fp8')[f'{shape}/fp8_wgrad/uniform'])['tflops']:.0f}"

    steps = {
        shape: cases("fp8")[f"{shape}/fp8_step/random"]["ratios"]["ours_bf16"]
        for shape in ("dsv3_up", "mixtral_up", "qwen3_up")
    }
    copies = [
        span(ratios("fp8", "byte_floor", [op]))
        for op in ("quantize_rows", "quantize_weights", "quantize_ragged")
    ]
    return "\n".join(
        [
            "Weight gradients with scales of 1 x 128 on both sides reach "
            f"{rate('wgrad_g4_8192')} TFLOP/s (4 groups of 8192 rows, 4096 x 7168)",
            f"and {rate('wgrad_g8_4096')} (8 of 4096, 7168 x 2048). Three bfloat16 products take "
            + ", ".join(f"{ratio:.2f} (`{shape}`)" for shape, ratio in steps.items()),
            "times as long as three FP8 products with their quantisers. Of the speed of a copy, "
            f"rows are quantised at {copies[0]},",
            f"weights with their transpose at {copies[1]}, and rows with their transpose in whole "
            f"blocks at {copies[2]}.",
        ]
    )


LISTS = {
    "four": "CUTLASS's example: 1152 x 768 and 768 x 1152 with k 128 and 1024",
    "cutlass_24": "24 problems of 24 to 520 a side",
    "random_24": "24 problems of 24 to 1024 a side",
    "random_79": "79 problems of 24 to 1024 a side",
    "random_150": "150 problems of 24 to 1024 a side",
    "random_300": "300 problems of 24 to 1024 a side",
    "big_8": "8 large problems",
}


def lists() -> str:
    """Lists of products in bfloat16."""
    rows = []
    for name, what in LISTS.items():
        found = case("lists", f"{name}/grouped_gemm")
        row = [f"`{name}`: {what}", microseconds(found)]
        for other in ("cublas_loop", fastest_cutlass(found)):
            row.append(f"{microseconds(found, other)} ({ratio(found, other)})")
        rows.append(row)
    header = ["list", "ours", "one cuBLAS call each", "fastest of CUTLASS's grouped kernels"]
    return table(header, rows)


def fastest_cutlass(case: Mapping) -> str:
    """The name of CUTLASS's kernel with the least ratio to us."""
    names = [name for name in case["ratios"] if name.startswith("CUTLASS")]
    return min(names, key=case["ratios"].get, default="CUTLASS")


def lists_example() -> str:
    """Two lists in a sentence."""
    found = [cases("lists")[f"{name}/grouped_gemm"] for name in ("random_24", "random_79")]
    loop = " and ".join(f"{case['ratios']['cublas_loop']:.2f}" for case in found)
    cutlass = " and ".join(f"{case['ratios'][fastest_cutlass(case)]:.2f}" for case in found)
    return (
        f"{loop} times as fast as one cuBLAS call a problem, and {cutlass} times as fast as the "
        "fastest of CUTLASS's own grouped kernels"
    )


def updates() -> str:
    """Symmetric updates in bfloat16."""
    rows = []
    for shape in (
        "1x8192x8192", "2x4096x4096", "8x2048x2048", "16x1024x1024", "64x256x1024",
        "16x512x512", "32x1024x256",
    ):  # fmt: skip
        one, two = (case("updates", f"{shape}/{op}") for op in ("syrk", "syr2k"))
        row = [shape.replace("x", " x "), microseconds(one), ratio(one, "A@A.T")]
        both = ratio(two, "A@B.T + B@A.T")
        rows.append([*row, microseconds(two), both, ratio(two, "P + P.T")])
    others = "over `A@B.T + B@A.T`", "over `P = A@B.T; P + P.T`"
    return table(["g x n x k", "syrk us", "over `A@A.T`", "syr2k us", *others], rows)


def wide_updates() -> str:
    """Symmetric updates of wider types."""
    shapes = ("16x1024x1024", "8x2048x2048")
    kinds = {
        "syr2k_f64": "float64 `syr2k`",
        "her2k_c128": "complex128 `her2k`",
        "syr2k_f32": "float32 `syr2k` at `HIGHEST`, at a fifth of cuBLAS's error",
        "syrk_f32": "float32 `syrk` at `HIGHEST`",
    }

    def cell(found: Mapping) -> str:
        return f"{microseconds(found)} us, {ratio(found, 'cublas_loop')}"

    rows = [
        [label, *(cell(case("updates", f"{shape}/{op}")) for shape in shapes)]
        for op, label in kinds.items()
    ]
    return table(["", *(shape.replace("x", " x ") for shape in shapes)], rows)


def updates_at_8192() -> str:
    """`syrk` and `syr2k` of one large matrix over plain products."""
    one = cases("updates")["1x8192x8192/syrk"]["ratios"]["A@A.T"]
    two = cases("updates")["1x8192x8192/syr2k"]["ratios"]["A@B.T + B@A.T"]
    return f"{one:.2f} and {two:.2f} times"


def loop_shortfall() -> str:
    """How much faster a loop of cuBLAS's products is where it is fastest."""
    ops = ("forward", "dgrad", "wgrad", "wgrad_f32")
    found = {
        f"`{each['shape']['name']}` {each['op']}": each["ratios"]["cublas_loop"]
        for each in cases("ragged").values()
        if each["op"] in ops and "cublas_loop" in each["ratios"]
    }
    least = min(found, key=found.__getitem__)
    return f"{100 * (1 / found[least] - 1):.0f} % ({least})"


def tf32_shortfall() -> str:
    """How much faster TF32 in cuBLAS is with 64 rows a group."""
    ops = ("forward", "dgrad", "wgrad")
    found = [cases("float32_default")[f"decode_r64/{op}/random"] for op in ops]
    return f"{1 / min(case['ratios']['cublas_loop'] for case in found):.1f} times"


def cutlass_updates() -> str:
    """The faster of CUTLASS's rank-2k kernels, over a slower state of ours."""
    found = load([RESULTS / "h200_rank_2k_fp64_cutlass.json"])["cases"]
    best = (min(x for n, x in case["ratios"].items() if "cutlass" in n) for case in found)
    return f"{span(best)} times"


QUOTES: dict[str, Callable[[], str]] = {
    text.__name__: text
    for text in (
        ragged, ragged_summary, decode, ragged_letters, ragged_peers, adapters, skew, accumulate,
        first_page.stock_example, first_page.products, memory, float32,
        float32_speedups, fp8, fp8_range, fp8_rest, lists, lists_example, updates,
        wide_updates, updates_at_8192, cutlass_updates, loop_shortfall, tf32_shortfall,
        layers.layers, layers.layers_fp8_range, layers.layers_recipes, layers.layers_quack,
        layers.layers_decode, layers.step, layers.expert_parallel, layers.training,
        layers.training_steps,
        quotes_muon.muon, quotes_muon.muon_steps, quotes_muon.data_parallel,
        quotes_h100.h100, quotes_h100.h100_products, quotes_h100.h100_layers,
    )
}  # fmt: skip
QUOTES |= {f"{topic}_commits": functools.partial(commits, topic) for topic in RECORDS}
