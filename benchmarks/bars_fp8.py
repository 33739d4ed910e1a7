"""What is asked of FP8 products, quantisers and training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes

from benchmarks.bar import Bar, Finding, missing_cases
from benchmarks.fp8.cases import PRODUCTS, QUANTIZED_SHAPES, QUANTIZERS, STEP

# Of one dense cuBLAS FP8 product of the same FLOPs with one scale a tensor.
DENSE_FRACTIONS = {
    "mixtral_up": 0.93,
    "mixtral_down": 0.90,
    "dsv3_up": 0.94,
    "dsv3_down": 0.97,
    "qwen3_up": 0.87,
    "qwen3_down": 0.85,
    "ds256_n512": 0.42,
}
# With and without fast accumulation: the faster one counts.
DENSE_PEERS = ("cublas_dense", "cublas_dense_exact")
DECODE_SHAPES = ("decode_up", "decode_small")
ROWS_KEPT = ("fp8_forward", "fp8_dgrad")
WGRADS = ("wgrad_g4_8192/fp8_wgrad/uniform", "wgrad_g8_4096/fp8_wgrad/uniform")
STEP_CASE = f"dsv3_up/{STEP}/random"


def check(cases: Iterable[Mapping], results: Mapping) -> list[Bar]:
    """All bars, from the records with our time and from what holds for a run as a whole."""
    records = {record["case"]: record for record in cases}
    products = [record for record in records.values() if record["op"] in PRODUCTS]
    return [
        _dense(records),
        _byte_floor(
            "FP8 decoding, of the byte floor",
            records,
            [f"{shape}/{op}/random" for shape in DECODE_SHAPES for op in ROWS_KEPT],
            0.93,
        ),
        _wgrad(records),
        _step(records),
        _byte_floor(
            "FP8 quantisers, of copy bandwidth",
            records,
            [f"{shape}/{op}/random" for shape in QUANTIZED_SHAPES for op in QUANTIZERS],
            0.85,
        ),
        _relative_error(products),
        _cosine(records.values()),
        _training(results.get("fp8_training", [])),
    ]


def _dense(records: Mapping[str, Mapping]) -> Bar:
    wanted = {
        f"{shape}/{op}/random": bar for shape, bar in DENSE_FRACTIONS.items() for op in ROWS_KEPT
    }
    findings = []
    for case, bar in wanted.items():
        ratios = records.get(case, {}).get("ratios", {})
        found = {name: ratios[name] for name in DENSE_PEERS if name in ratios}
        if found:
            name = min(found, key=found.get)
            text = f"{found[name]:.3f} of {name}, asked {bar}"
            findings.append(Finding(case, found[name] / bar, text))
    target = ">= .42 to .97 of dense cuBLAS FP8, by shape"
    return Bar("FP8 forward and dgrad", target, findings, missing_cases(list(wanted), findings))


def _byte_floor(
    name: str, records: Mapping[str, Mapping], wanted: Sequence[str], bar: float
) -> Bar:
    findings = [
        Finding(case, ratio / bar, f"{ratio:.3f}")
        for case in wanted
        if (ratio := records.get(case, {}).get("ratios", {}).get("byte_floor")) is not None
    ]
    return Bar(name, f">= {bar}", findings, missing_cases(wanted, findings))


def _wgrad(records: Mapping[str, Mapping]) -> Bar:
    bar = 950
    findings = [
        Finding(case, tflops / bar, f"{tflops:.0f}")
        for case in WGRADS
        if (tflops := records.get(case, {"peers": {"ours": {}}})["peers"]["ours"].get("tflops"))
    ]
    return Bar("FP8 wgrad", f">= {bar} TFLOP/s", findings, missing_cases(WGRADS, findings))


def _step(records: Mapping[str, Mapping]) -> Bar:
    bar = 1.4
    ratio = records.get(STEP_CASE, {}).get("ratios", {}).get("ours_bf16")
    findings = [] if ratio is None else [Finding(STEP_CASE, ratio / bar, f"{ratio:.3f}")]
    target = f">= {bar} times as fast as three bfloat16 products"
    return Bar(
        "FP8 quantisers and three products", target, findings, missing_cases([STEP_CASE], findings)
    )


def _relative_error(records: Iterable[Mapping]) -> Bar:
    """Of the product of the dequantised operands; a 16-bit result may be rounded on top."""
    limit = 1e-3
    findings = []
    for record in records:
        error = record["peers"]["ours"].get("error")
        if error:
            # Rounding to nearest leaves about a quarter of the distance between two numbers.
            rounding = float(ml_dtypes.finfo(record["out_dtype"]).eps) / 4
            allowed = limit + (0 if record["out_dtype"] == "float32" else rounding)
            total = error["total"]
            findings.append(Finding(record["case"], _margin(allowed, total), f"{total:.1e}"))
    return Bar("FP8 products, relative error", f"<= {limit:g} and the result's rounding", findings)


def _cosine(records: Iterable[Mapping]) -> Bar:
    """Of FP8's result and cotangents with bfloat16's, on normal data."""
    limit = 1e-3
    findings = [
        Finding(f"{record['case']} {name}", _margin(limit, distance), f"{distance:.1e}")
        for record in records
        for name, distance in record.get("cosine_distance", {}).get("ours", {}).items()
    ]
    return Bar("FP8 against unquantised, 1 - cosine", f"<= {limit:g}", findings)


def _training(comparisons: Iterable[Mapping]) -> Bar:
    """Held-out losses of the same training in FP8 and in bfloat16."""
    limit = 0.01
    findings = [
        Finding(
            f"{each['preset']} seed {each['seed']} after {each['steps']} steps",
            _margin(limit, abs(each["ratio"] - 1)),
            f"{each['fp8']:.4f} and {each['bf16']:.4f}, ratio {each['ratio']:.4f}",
        )
        for each in comparisons
        if each["preset"] == "h200"
    ]
    few = [] if len(findings) >= 2 else ["several seeds of the preset h200"]
    return Bar("FP8 training", f"held-out loss within {limit:.0%} of bfloat16's", findings, few)


def _margin(limit: float, value: float) -> float:
    """At least one if `value` is within `limit`; a NaN is not."""
    return limit / max(value, 1e-12) if value == value else 0.0
