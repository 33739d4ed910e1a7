"""Makes the tables and numbers that pages quote from recorded results."""

import functools
from collections.abc import Callable, Iterable, Mapping

from benchmarks import quotes_layers as layers
from benchmarks.harness.cases import SHAPES, SUITES, Shape
from benchmarks.harness.measure import best_grouped
from benchmarks.harness.results_file import load
from benchmarks.records_by_topic import (
    GIB,
    RECORDS,
    RESULTS,
    case,
    cases,
    commits,
    ends,
    mean_and_span,
    memory_of,
    microseconds,
    ours,
    ratio,
    ratios,
    span,
    table,
    time_and_rate,
)

# A letter for tables of the fastest peers, and a name for texts.
PEERS = {
    "quack": ("q", "QuACK"),
    "torch_grouped_mm": ("t", "`torch._grouped_mm`"),
    "pallas_mgpu": ("p", "Pallas Mosaic GPU"),
    "tokamax": ("k", "tokamax"),
    "stock": ("s", "`jax.lax.ragged_dot_general`"),
}
DENSE_FP8 = ("cublas_dense", "cublas_dense_exact")
THREE = ("forward", "dgrad", "wgrad")
FOUR = (*THREE, "wgrad_f32")
# The models and layers from which the shapes come.
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


def by_shape(
    header: Iterable[str],
    shapes: Iterable[Shape],
    columns: Iterable[tuple[str, str]],
    cells: Callable[[Mapping], Iterable[str]],
    first: Callable[[Shape], Iterable[str]] = lambda shape: [f"`{shape.name}`"],
) -> str:
    """Returns a table with a row for each shape; `columns` has the topic and op of its cases."""
    rows = []
    for shape in shapes:
        found = (case(topic, f"{shape.name}/{op}/random") for topic, op in columns)
        rows.append([*first(shape), *(cell for each in found for cell in cells(each))])
    return table(list(header), rows)


def with_sizes(shape: Shape) -> list[str]:
    return [f"`{shape.name}` {shape.groups} x {shape.rows}, {shape.k}, {shape.n}"]


def ragged() -> str:
    def cells(found):
        best = best_grouped(found)
        over = f"{best[1]:.2f} {PEERS[best[0]][0]}" if best else "-"
        return time_and_rate(found), over, ratio(found, "floor")

    header = ["groups x rows, k, n"]
    for name in (*THREE, "wgrad to f32"):
        header += [f"{name} us (TFLOP/s)", "vs best", "of floor"]
    columns = [("ragged", op) for op in FOUR]
    return by_shape(header, SUITES["main"], columns, cells, with_sizes)


def ragged_letters() -> str:
    found = [best_grouped(each) for each in cases("ragged").values() if "bytes" in each]
    names = sorted({best[0] for best in found if best}, key=list(PEERS).index)
    return " and ".join("{} is {}".format(*PEERS[name]) for name in names)


def ragged_peers() -> str:
    columns = {
        "forward": ("ragged", "forward"),
        "dgrad": ("ragged", "dgrad"),
        "wgrad": ("ragged", "wgrad"),
        "wgrad to f32": ("ragged", "wgrad_f32"),
        "forward, w [n, k]": ("majors", "forward_t"),
        "dgrad, w [n, k]": ("majors", "dgrad_t"),
    }

    def best(topic: str, op: str) -> list[float]:
        found = [best_grouped(each) for each in cases(topic).values() if each["op"] == op]
        return [best[1] for best in found if best]

    rows = [["fastest peer of each shape", *(mean_and_span(best(*x)) for x in columns.values())]]
    for name, (_, label) in (PEERS | {"cublas_loop": ("", "cuBLAS, a call a group")}).items():
        found = [ratios(topic, name, [op]) for topic, op in columns.values()]
        if any(found):
            rows.append([label, *map(mean_and_span, found)])
    older = {"`jax.lax.ragged_dot_general`": "stock", "tokamax 0.0.12": "tokamax"}
    for label, topic in older.items():
        found = (ratios(topic, topic, [op]) for _, op in columns.values())
        rows.append([f"{label} ({commits(topic)})", *map(mean_and_span, found)])
    return table(["geometric mean (range)", *columns], rows)


def ragged_summary() -> str:
    peers = [("ragged", name, PEERS[name][1]) for name in list(PEERS)[:3]]
    rows = [
        [f"over {label}", *(mean_and_span(ratios(topic, name, [op])) for op in THREE)]
        for topic, name, label in (*peers, ("stock", "stock", "`jax.lax.ragged_dot`"))
    ]
    return table(["", *THREE], rows)


def stock_example() -> str:
    name = "qwen3_up"
    stock = cases("stock")[f"{name}/forward/random"]["peers"]["stock"]["median_us"] / 1e3
    needed, shape = memory_of("stock", name, "forward") / GIB, SHAPES[name]
    return (
        f"{stock:.0f} ms and {needed:.0f} GiB of temporary memory for the gate and up projections "
        f"of a Qwen3-30B-A3B layer in bf16 ({shape.groups} experts, {shape.rows} rows, {shape.k} "
        f"to {shape.n} columns). With this package, the same call takes "
        f"{ours(cases('ragged')[f'{name}/forward/random'])['median_us'] / 1e3:.1f} ms and "
        f"{memory_of('ours', name, 'forward')} bytes"
    )


def products() -> str:
    rows = []
    for shape in SUITES["main"]:
        sizes = str(shape.groups), str(shape.rows), f"{shape.k}, {shape.n}"
        times = (
            " / ".join(
                microseconds(case(topic, f"{shape.name}/{op}/random"))
                for topic in ("ragged", "h100")
            )
            for op in THREE
        )
        rows.append([f"`{shape.name}`: {PROJECTIONS[shape.name]}", *sizes, *times])
    return table(["us on H200 / H100", "experts", "rows", "k, n", *THREE], rows)


def decode() -> str:
    rows = []
    for shape in SUITES["main"]:
        if shape.name.startswith("decode"):
            bf16 = case("ragged", f"{shape.name}/forward/random")
            fp8 = case("fp8", f"{shape.name}/fp8_forward/random")
            what = f"`{shape.name}`: {shape.groups} experts, {shape.k} x {shape.n}"
            of_bf16 = microseconds(bf16), ratio(bf16, "floor")
            of_fp8 = microseconds(fp8), ratio(fp8, "byte_floor")
            count = f"{shape.rows} ({shape.rows / shape.groups:.0f})"
            rows.append([what, count, *of_bf16, *of_fp8])
    header = ["product", "rows (an expert)", "bf16 us", "of the floor", "FP8 us", "of the floor"]
    return table(header, rows)


def adapters() -> str:
    header = ["groups x rows, k, n"]
    for op in THREE:
        header += [f"{op} us", "vs torch"]
    columns = [("adapters", op) for op in THREE]

    def cells(found):
        return microseconds(found), ratio(found, "torch_grouped_mm")

    return by_shape(header, SUITES["adapters"], columns, cells, with_sizes)


def skew() -> str:
    def over_uniform(distribution: str) -> str:
        """Returns the range of the time of a useful FLOP over its time with equal groups."""
        found = []
        for shape in SUITES["main"]:
            rates = [
                ours(cases("skew")[f"{shape.name}/wgrad/{each}"])["tflops"]
                for each in ("uniform", distribution)
            ]
            found.append(rates[0] / rates[1])
        return span(found)

    return (
        f"with all rows in one group they take {over_uniform('one_hot')} times as long as with "
        f"uniform sizes, and with sizes of Zipf's law {over_uniform('zipf')} times"
    )


def accumulate() -> str:
    found = {
        case["shape"]["name"]: case["ratios"]["ours_then_add"]
        for case in cases("accumulate").values()
    }
    low, high = (each(found, key=found.get) for each in (min, max))
    return f"{found[low]:.2f} (`{low}`) to {found[high]:.2f} times (`{high}`)"


def memory() -> str:
    stock = (memory_of("stock", "qwen3_up", op) / GIB for op in ("forward", "wgrad"))
    most = max(ours(case)["temporary_bytes"] for case in cases("memory").values()) / 1e6
    return (
        f"{memory_of('ours', 'qwen3_up', 'forward')} bytes, and up to {most:.0f} MB where tiles "
        "are cut, against {:.0f} GiB (forward) and {:.0f} GiB (wgrad)".format(*stock)
    )


def float32() -> str:
    kinds = {"`DEFAULT`": "float32_default", "`HIGHEST`": "float32_highest"}
    header = [f"{kind} {op} us (TFLOP/s), over cuBLAS" for kind in kinds for op in THREE]
    names = dict.fromkeys(c["shape"]["name"] for c in cases("float32_highest").values())
    columns = [(topic, op) for topic in kinds.values() for op in THREE]

    def cells(found):
        return [f"{time_and_rate(found)}, {ratio(found, 'cublas_loop')}"]

    return by_shape(["float32", *header], map(SHAPES.get, names), columns, cells)


def float32_speedups() -> str:
    lists = ratios("lists_float32", "cublas_loop", ["grouped_gemm_f32"])
    updates = ratios("updates", "cublas_loop", ["syrk_f32", "syr2k_f32"])
    return f"{span(lists, 1)} and {span(updates, 1)} times"


def fp8() -> str:
    header = ["FP8"]
    for op in ("forward", "dgrad"):
        header += [f"{op} us (TFLOP/s)", "of dense cuBLAS", "vs torch"]

    def cells(found):
        dense = ratio(found, *DENSE_FP8)
        if found.get("shape", {}).get("name", "").startswith("decode"):
            dense = f"{ratio(found, 'byte_floor')} of the byte floor"
        return time_and_rate(found), dense, ratio(found, "torch_scaled_grouped_mm")

    columns = [("fp8", "fp8_forward"), ("fp8", "fp8_dgrad")]
    return by_shape(header, SUITES["main"], columns, cells)


def fp8_range() -> str:
    return ends(
        {
            f"`{shape.name}` {op}": min(
                case("fp8", f"{shape.name}/fp8_{op}/random")["ratios"][name] for name in DENSE_FP8
            )
            for shape in SUITES["main"]
            for op in ("forward", "dgrad")
            if shape.rows >= 256 * shape.groups
        }
    )


def fp8_rest() -> str:
    def rate(shape: str) -> str:
        return f"{ours(cases('fp8')[f'{shape}/fp8_wgrad/uniform'])['tflops']:.0f}"

    steps = ", ".join(
        f"{cases('fp8')[f'{shape}/fp8_step/random']['ratios']['ours_bf16']:.2f} (`{shape}`)"
        for shape in ("dsv3_up", "mixtral_up", "qwen3_up")
    )
    copies = [
        span(ratios("fp8", "byte_floor", [f"quantize_{what}"]))
        for what in ("rows", "weights", "ragged")
    ]
    return "\n".join(
        [
            "Weight gradients with scales of 1 x 128 on both sides reach "
            f"{rate('wgrad_g4_8192')} TFLOP/s (4 groups of 8192 rows, 4096 x 7168)",
            f"and {rate('wgrad_g8_4096')} (8 of 4096, 7168 x 2048). Three bfloat16 products take "
            + steps,
            "times as long as three FP8 products and their quantisers. Relative to a copy's speed,",
            f"quantisers reach {copies[0]} for rows, {copies[1]} for weights with their transpose,",
            f"and {copies[2]} for rows with their transpose, each group padded to blocks of 128.",
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
    names = [name for name in case["ratios"] if name.startswith("CUTLASS")]
    return min(names, key=case["ratios"].get, default="CUTLASS")


def lists_example() -> str:
    found = [cases("lists")[f"{name}/grouped_gemm"] for name in ("random_24", "random_79")]
    loop = " and ".join(f"{case['ratios']['cublas_loop']:.2f}" for case in found)
    cutlass = " and ".join(f"{case['ratios'][fastest_cutlass(case)]:.2f}" for case in found)
    return (
        f"{loop} times as fast as one cuBLAS call a problem, and {cutlass} times as fast as the "
        "fastest of CUTLASS's own grouped kernels"
    )


def updates() -> str:
    rows = []
    for shape in (
        "1x8192x8192", "2x4096x4096", "8x2048x2048", "16x1024x1024", "64x256x1024",
        "16x512x512", "32x1024x256",
    ):  # fmt: skip
        one, two = (case("updates", f"{shape}/{op}") for op in ("syrk", "syr2k"))
        both = ratio(two, "A@B.T + B@A.T"), ratio(two, "P + P.T")
        syrk = microseconds(one), ratio(one, "A@A.T")
        rows.append([shape.replace("x", " x "), *syrk, microseconds(two), *both])
    others = "over `A@B.T + B@A.T`", "over `P = A@B.T; P + P.T`"
    return table(["g x n x k", "syrk us", "over `A@A.T`", "syr2k us", *others], rows)


def wide_updates() -> str:
    shapes = ("16x1024x1024", "8x2048x2048")
    kinds = {
        "syr2k_f64": "float64 `syr2k`",
        "her2k_c128": "complex128 `her2k`",
        "syr2k_f32": "float32 `syr2k` at `HIGHEST`, at a fifth of cuBLAS's error",
        "syrk_f32": "float32 `syrk` at `HIGHEST`",
    }
    rows = []
    for op, label in kinds.items():
        found = (case("updates", f"{shape}/{op}") for shape in shapes)
        rows.append([label, *(f"{microseconds(x)} us, {ratio(x, 'cublas_loop')}" for x in found)])
    return table(["", *(shape.replace("x", " x ") for shape in shapes)], rows)


def updates_at_8192() -> str:
    one = cases("updates")["1x8192x8192/syrk"]["ratios"]["A@A.T"]
    two = cases("updates")["1x8192x8192/syr2k"]["ratios"]["A@B.T + B@A.T"]
    return f"{one:.2f} and {two:.2f} times"


def loop_shortfall() -> str:
    """Returns by how much a loop of cuBLAS's products is faster in its best case."""
    found = {
        f"`{each['shape']['name']}` {each['op']}": each["ratios"]["cublas_loop"]
        for each in cases("ragged").values()
        if each["op"] in FOUR and "cublas_loop" in each["ratios"]
    }
    least = min(found, key=found.__getitem__)
    return f"{100 * (1 / found[least] - 1):.0f} % ({least})"


def tf32_shortfall() -> str:
    """Returns how many times as fast as ours cuBLAS's TF32 is with 64 rows in each group."""
    found = [cases("float32_default")[f"decode_r64/{op}/random"] for op in THREE]
    return f"{1 / min(case['ratios']['cublas_loop'] for case in found):.1f} times"


def cutlass_updates() -> str:
    """Returns the time of CUTLASS's faster rank-2k kernel over that of an older kernel of ours."""
    found = load([RESULTS / "h200_rank_2k_fp64_cutlass.json"])["cases"]
    best = (min(x for n, x in case["ratios"].items() if "cutlass" in n) for case in found)
    return f"{span(best)} times"


QUOTES: dict[str, Callable[[], str]] = {
    text.__name__: text
    for text in (
        ragged, ragged_summary, decode, ragged_letters, ragged_peers, adapters, skew, accumulate,
        stock_example, products, memory, float32, float32_speedups, fp8, fp8_range, fp8_rest,
        lists, lists_example, updates, wide_updates, updates_at_8192, cutlass_updates,
        loop_shortfall, tf32_shortfall, *layers.QUOTES,
    )
}  # fmt: skip
QUOTES |= {f"{topic}_commits": functools.partial(commits, topic) for topic in RECORDS}
