"""Checks results against the targets of the kernels: pass, fail, incomplete, or not measured.

python -m benchmarks.targets benchmarks/results/*.json

`TARGETS` has a row for each target. Ratios are a peer's time over our time. The exit status is 1 if
a target is missed.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import ml_dtypes

from benchmarks.fp8.cases import PRODUCTS as FP8_PRODUCTS
from benchmarks.fp8.cases import QUANTIZED_SHAPES, QUANTIZERS, STEP
from benchmarks.harness import report
from benchmarks.harness.cases import DISTRIBUTIONS, OPS, SUITES
from benchmarks.harness.command import parser_of
from benchmarks.harness.results_file import load
from benchmarks.harness.target import (
    DENSE_RATIO,
    GROUPED_RATIO,
    Record,
    Target,
    Verdict,
    cosine_distance,
    error,
    error_over_cublas,
    loss_difference,
    of_ours,
    of_uniform_time,
    over,
    over_best,
    over_best_or_dense,
    without_communication,
)  # fmt: skip


def of(*ops: str, **fields: object) -> Callable[[Record], bool]:
    """Returns a function that selects records of `ops` with the given fields.

    A tuple of values gives choices. By default, group sizes must be random or equal.
    """
    asked = {"distribution": ("random", "equal", None)} | fields

    def applies(record: Record) -> bool:
        return record["op"] in ops and all(_is(record.get(k), x) for k, x in asked.items())

    return applies


def of_shapes(shapes: Sequence[str], *ops: str, **fields: object) -> Callable[[Record], bool]:
    applies = of(*ops, **fields)
    return lambda record: record["shape"]["name"] in shapes and applies(record)


def _is(value: object, asked: object) -> bool:
    return value in asked if isinstance(asked, tuple) else value == asked


def cases(shapes: Iterable[str], ops: Iterable[str], *distributions: str) -> list[str]:
    ends = [f"/{each}" for each in distributions] or [""]
    return [f"{shape}/{op}{end}" for shape in shapes for op in ops for end in ends]


def by_shape(bounds: Mapping[str, float]) -> Callable[[Record], float]:
    return lambda record: bounds[record["shape"]["name"]]


def rounding_and_1e_3(record: Record) -> float:
    """Returns 1e-3, plus the error of rounding a 16-bit result."""
    if record["out_dtype"] == "float32":
        return 1e-3
    # Rounding to nearest leaves about a quarter of the distance between two numbers.
    return 1e-3 + float(ml_dtypes.finfo(record["out_dtype"]).eps) / 4


def allowed_kernels(record: Record) -> float:
    """Returns 1, or 2 if groups have few rows, because split sums may need a reduction."""
    return 1 + (record["shape"]["rows"] <= 64 * record["shape"]["groups"])


DENSE_FP8 = ("cublas_dense", "cublas_dense_exact")
BEST_OR_DENSE = (
    f">= {GROUPED_RATIO} of the fastest grouped peer or >= {DENSE_RATIO} of dense cuBLAS"
)
SKEWED = ("zipf", "one_hot")
MAIN = [shape.name for shape in SUITES["main"]]
FEW_ROWS = ("decode_up", "decode_small", "ds256_n512")
DECODE = ("decode_up", "decode_small")
GRADIENTS = [op.name for op in OPS.values() if op.contracting]
PRODUCTS = [op.name for op in OPS.values() if not op.contracting]
BITS_16 = {"dtype": ("bfloat16", "float16")}
ANY_SIZES = {"distribution": tuple(DISTRIBUTIONS)}
FP8_KEPT = ("fp8_forward", "fp8_dgrad")
FP8_WGRADS = ("wgrad_g4_8192", "wgrad_g8_4096")
# Speeds over one dense cuBLAS FP8 product of the same FLOPs with a scale for each tensor.
FP8_DENSE = dict(
    mixtral_up=0.93, mixtral_down=0.90, dsv3_up=0.94, dsv3_down=0.97, qwen3_up=0.87,
    qwen3_down=0.85, ds256_n512=0.42,
)  # fmt: skip
TWO_GPUS_STEP = {"dsv3": 0.92, "qwen3_30b": 0.86, "mixtral": 0.93}
TWO_GPUS_FORWARD = {"dsv3": 0.88, "qwen3_30b": 0.78, "mixtral": 0.90}
# Microseconds of whole layers, forward and backward, on an H200, and speeds over QuACK's kernels.
LAYER_US = dict(
    qwen3_30b=3050, sonic_7b=2550, sonic_4096=4200, dsv3_slice=12200, mixtral=12000, gptoss=7050
)
LAYER_OVER_QUACK = dict(zip(LAYER_US, (1.1, 1.02, 1.05, 1.06, 1.04, 1.05), strict=True))
LAYER_OVER_QUACK |= {"nano": 1.02, "granular": 1.02, "qwen3_next": 1.05, "sonic_30b": 1.02}
QUACK_LAYERS = ("quack", "quack_tuned")
LARGE = ("8x2048x2048", "2x4096x4096", "1x8192x8192")
SMALL = ("64x256x1024", "16x512x512", "32x1024x256")
WIDE = ("16x1024x1024", "8x2048x2048")
RANDOM_LISTS = ("cutlass_24", "random_24", "random_79", "random_150", "random_300")

# fmt: off
TARGETS = (
    Target("forward and dgrad, each shape", of(*PRODUCTS, **BITS_16), over_best_or_dense, 1.0,
           cases(MAIN, PRODUCTS, "random"), of=BEST_OR_DENSE),
    Target("forward and dgrad, geometric mean", of(*PRODUCTS, **BITS_16), over_best, 1.12,
           mean=True, of="of the fastest grouped peer of each"),
    Target("wgrad, each shape", of(*GRADIENTS, **BITS_16), over_best_or_dense, 1.0,
           cases(MAIN, GRADIENTS, "random"), of=BEST_OR_DENSE),
    Target("wgrad, geometric mean", of(*GRADIENTS, **BITS_16), over_best, 1.1,
           mean=True, of="of the fastest grouped peer of each"),
    Target("wgrad, skewed sizes", of(*GRADIENTS, distribution=SKEWED, **BITS_16), of_uniform_time,
           1.1, cases(MAIN, ["wgrad"], *SKEWED), at_most=True, of="of uniform's time"),
    Target("cuBLAS loop", of(*OPS, **ANY_SIZES, **BITS_16), over("cublas_loop"), 0.98,
           cases(MAIN, ["forward", "wgrad"], "random")),
    Target("memory-bound, of the byte floor", of_shapes(FEW_ROWS, *PRODUCTS, **BITS_16),
           over("byte_floor"), 0.92, cases(FEW_ROWS, ["forward"], "random")),
    Target("kernels a call", of(*OPS, **ANY_SIZES, **BITS_16), of_ours("kernels", "{}"),
           allowed_kernels,
           at_most=True, of="0 extra, 1 in decoding"),
    Target("float32 at HIGHEST, against cuBLAS's float32",
           of(*OPS, **ANY_SIZES, dtype="float32", precision="highest"), over("cublas_loop"), 3.0,
           cases(MAIN, ["forward", "dgrad", "wgrad"], "random")),

    Target("FP8 forward and dgrad", of_shapes(FP8_DENSE, *FP8_KEPT), over(*DENSE_FP8),
           by_shape(FP8_DENSE), cases(FP8_DENSE, FP8_KEPT, "random"),
           of=">= .42 to .97 of dense cuBLAS FP8, by shape"),
    Target("FP8 decoding, of the byte floor", of_shapes(DECODE, *FP8_KEPT), over("byte_floor"),
           0.93, cases(DECODE, FP8_KEPT, "random")),
    Target("FP8 wgrad", of_shapes(FP8_WGRADS, "fp8_wgrad", distribution="uniform"),
           of_ours("tflops", "{:.0f}"), 950, cases(FP8_WGRADS, ["fp8_wgrad"], "uniform"),
           of="TFLOP/s"),
    Target("FP8 quantisers and three products", of_shapes(["dsv3_up"], STEP), over("ours_bf16"),
           1.4, cases(["dsv3_up"], [STEP], "random"), of="times bfloat16's speed"),
    Target("FP8 quantisers, of copy bandwidth", of_shapes(QUANTIZED_SHAPES, *QUANTIZERS),
           over("byte_floor"), 0.85, cases(QUANTIZED_SHAPES, QUANTIZERS, "random")),
    Target("FP8 products, relative error", of(*FP8_PRODUCTS, **ANY_SIZES), error,
           rounding_and_1e_3, at_most=True, of="<= 0.001 and the result's rounding"),
    Target("FP8 against unquantised, 1 - cosine", of(STEP, **ANY_SIZES), cosine_distance, 1e-3,
           at_most=True),
    Target("FP8 training", of_shapes(["h200"], "fp8_training"), loss_difference, 0.01,
           [f"h200/fp8_training/{seed}" for seed in range(2)], at_most=True,
           of="<= 1 % from bfloat16's held-out loss"),

    Target("MoE layer, forward and backward", of("moe_step"), of_ours("median_us", "{:.0f} us"),
           by_shape(LAYER_US),
           cases(LAYER_US, ["moe_step"]), at_most=True, of="<= 2550 to 12200 us, by layer"),
    Target("MoE layer, forward and backward, over QuACK", of("moe_step"), over(*QUACK_LAYERS),
           by_shape(LAYER_OVER_QUACK), cases(LAYER_OVER_QUACK, ["moe_step"]),
           of=">= 1.02 to 1.1 of the faster of QuACK's, by layer"),
    Target("MoE layer, forward, over QuACK", of("moe_forward"), over(*QUACK_LAYERS), 1.05,
           cases(LAYER_OVER_QUACK, ["moe_forward"])),

    *(
        Target(
            f"layer on two GPUs, {what}, of no communication",
            of(op, distribution="uniform", devices=2), without_communication, by_shape(bounds),
            cases(bounds, [op]), of=f">= {words}, by layer",
        )
        for what, op, bounds, words in (
            ("forward and backward", "ep_step", TWO_GPUS_STEP, ".86 to .93"),
            ("forward", "ep_forward", TWO_GPUS_FORWARD, ".78 to .90"),
        )
    ),

    Target("float64 syr2k over cuBLAS in a loop", of_shapes(WIDE, "syr2k_f64"),
           over("cublas_loop"), by_shape(dict(zip(WIDE, (1.9, 1.0), strict=True))),
           cases(WIDE, ["syr2k_f64"]), of=">= 1.9 and >= 1"),
    Target("complex128 her2k over cuBLAS in a loop", of_shapes(WIDE, "her2k_c128"),
           over("cublas_loop"), by_shape(dict(zip(WIDE, (1.7, 1.0), strict=True))),
           cases(WIDE, ["her2k_c128"]), of=">= 1.7 and >= 1"),
    Target("float64 rank-2k over CUTLASS's grouped kernels",
           of_shapes(WIDE, "syr2k_f64", "her2k_c128"), over("cutlass*"), 1.0,
           cases(WIDE, ["syr2k_f64", "her2k_c128"]), of="of the fastest"),
    Target("bfloat16 syrk, n >= 2048, over A@A.T", of_shapes(LARGE, "syrk"), over("A@A.T"), 1.7,
           cases(LARGE, ["syrk"])),
    Target("bfloat16 syr2k, n >= 2048, over A@B.T + B@A.T", of_shapes(LARGE, "syr2k"),
           over("A@B.T + B@A.T"), 1.9, cases(LARGE, ["syr2k"])),
    Target("bfloat16 syr2k, n >= 2048, over P + P.T", of_shapes(LARGE, "syr2k"),
           over("P + P.T"), 1.15, cases(LARGE, ["syr2k"])),
    Target("bfloat16 syr2k, many small, over A@B.T alone", of_shapes(SMALL, "syr2k"),
           over("A@B.T"), 1.0, cases(SMALL, ["syr2k"])),
    Target("bfloat16 syrk, many small, over A@A.T", of_shapes(SMALL, "syrk"), over("A@A.T"), 1.5,
           cases(SMALL, ["syrk"])),
    Target("float32 syr2k over cuBLAS in a loop", of_shapes(WIDE, "syr2k_f32"),
           over("cublas_loop"), 3.0, cases(WIDE, ["syr2k_f32"])),
    Target("float32 syr2k, error", of_shapes(WIDE, "syr2k_f32"), error_over_cublas, 1.0,
           cases(WIDE, ["syr2k_f32"]), at_most=True, of="of cuBLAS's"),

    Target("lists, random, over a cuBLAS loop", of_shapes(RANDOM_LISTS, "grouped_gemm"),
           over("cublas_loop"), 1.5, cases(RANDOM_LISTS, ["grouped_gemm"]), mean=True),
    Target("lists, large, over a cuBLAS loop", of_shapes(["big_8"], "grouped_gemm"),
           over("cublas_loop"), 0.97, cases(["big_8"], ["grouped_gemm"])),
    Target("lists, over CUTLASS's grouped kernels", of("grouped_gemm"), over("cutlass*"), 1.0,
           cases(["four", *RANDOM_LISTS, "big_8"], ["grouped_gemm"]), of="of the fastest"),
)
# fmt: on


def check(results: Mapping) -> list[Verdict]:
    return [target.check(results["cases"]) for target in TARGETS]


def main(
    arguments: Sequence[str] | None = None, write: Callable[[str], object] = print
) -> list[Verdict]:
    parser = parser_of("benchmarks.targets", __doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files, read as one")
    results = load(parser.parse_args(arguments).results)
    verdicts = check(results)
    for verdict in verdicts:
        write("\n".join(verdict.lines()))
    if means := report.summary_lines(results["cases"]):
        write("\n" + means)
    return verdicts


if __name__ == "__main__":
    sys.exit(any(verdict.met is False for verdict in main()))
