"""What is asked of symmetric updates, against JAX's expressions, cuBLAS and CUTLASS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.bar import Bar, Finding, missing_cases

LARGE = ("8x2048x2048", "2x4096x4096", "1x8192x8192")
SMALL = ("64x256x1024", "16x512x512", "32x1024x256")
WIDE = ("16x1024x1024", "8x2048x2048")
LOOP = "cublas_loop"
CUTLASS = "cutlass_"


def check(cases: Iterable[Mapping]) -> list[Bar]:
    """All bars, from the records with our time."""
    records = {record["case"]: record for record in cases}

    def bar(name: str, op: str, other: str, asked: Mapping[str, float]) -> Bar:
        return _ratios(name, records, op, other, asked)

    return [
        bar("float64 syr2k over cuBLAS in a loop", "syr2k_f64", LOOP, _each(WIDE, 1.9, 1.0)),
        bar("complex128 her2k over cuBLAS in a loop", "her2k_c128", LOOP, _each(WIDE, 1.7, 1.0)),
        _cutlass(records),
        bar("bfloat16 syrk, n >= 2048, over A@A.T", "syrk", "A@A.T", _each(LARGE, 1.7)),
        bar(
            "bfloat16 syr2k, n >= 2048, over A@B.T + B@A.T",
            "syr2k",
            "A@B.T + B@A.T",
            _each(LARGE, 1.9),
        ),
        bar("bfloat16 syr2k, n >= 2048, over P + P.T", "syr2k", "P + P.T", _each(LARGE, 1.15)),
        bar("bfloat16 syr2k, many small, over A@B.T alone", "syr2k", "A@B.T", _each(SMALL, 1.0)),
        bar("bfloat16 syrk, many small, over A@A.T", "syrk", "A@A.T", _each(SMALL, 1.5)),
        bar("float32 syr2k over cuBLAS in a loop", "syr2k_f32", LOOP, _each(WIDE, 3.0)),
        _errors(records),
    ]


def _each(shapes: Sequence[str], *bars: float) -> dict[str, float]:
    """A bar for each shape, or one for all."""
    return dict(zip(shapes, bars if len(bars) > 1 else bars * len(shapes), strict=True))


def _ratios(
    name: str,
    records: Mapping[str, Mapping],
    op: str,
    other: str,
    asked: Mapping[str, float],
) -> Bar:
    findings = []
    for shape, bar in asked.items():
        case = f"{shape}/{op}"
        ratio = records.get(case, {}).get("ratios", {}).get(other)
        if ratio is not None:
            findings.append(Finding(case, ratio / bar, f"{ratio:.3f}, asked {bar:g}"))
    target = " and ".join(f">= {bar:g}" for bar in dict.fromkeys(asked.values()))
    return Bar(name, target, findings, missing_cases([f"{s}/{op}" for s in asked], findings))


def _cutlass(records: Mapping[str, Mapping]) -> Bar:
    """Over the fastest of CUTLASS's grouped kernels."""
    wanted = [f"{shape}/{op}" for op in ("syr2k_f64", "her2k_c128") for shape in WIDE]
    findings = []
    for case in wanted:
        ratios = records.get(case, {}).get("ratios", {})
        found = {name: ratio for name, ratio in ratios.items() if name.startswith(CUTLASS)}
        if found:
            fastest = min(found, key=found.get)
            findings.append(Finding(case, found[fastest], f"{found[fastest]:.3f} of {fastest}"))
    return Bar(
        "float64 rank-2k over CUTLASS's grouped kernels",
        ">= 1 of the fastest",
        findings,
        missing_cases(wanted, findings),
    )


def _errors(records: Mapping[str, Mapping]) -> Bar:
    """Of float32 results against float64 ones."""
    wanted = [f"{shape}/syr2k_f32" for shape in WIDE]
    findings = []
    for case in wanted:
        peers = records.get(case, {}).get("peers", {})
        errors = [peers.get(name, {}).get("error", {}).get("total") for name in ("ours", LOOP)]
        if None not in errors:
            text = f"{errors[0]:.1e}, cuBLAS {errors[1]:.1e}"
            findings.append(Finding(case, errors[1] / max(errors[0], 1e-30), text))
    return Bar(
        "float32 syr2k, error", "no larger than cuBLAS's", findings, missing_cases(wanted, findings)
    )
