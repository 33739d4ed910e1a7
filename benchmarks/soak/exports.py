"""Exported programs: those of this version run, those of another version are refused by name."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jax_grouped_gemm as jgg
from benchmarks.harness.measure import first_line
from benchmarks.harness.peer import on_gpu

OTHER_VERSION = b"9"  # of any target
VERSION = re.compile(rb"(jax_grouped_gemm\.[a-z0-9_]+\.v)\d")


def exported_products() -> dict[str, export.Exported]:
    """Small programs for the GPU, made on any machine."""
    m, k, n, g = 200, 136, 264, 5
    sizes = jax.ShapeDtypeStruct((g,), jnp.int32)

    def of(dtype):
        return [jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (g, k, n))]

    # Small products would be XLA's own.
    ragged_dot, fp8_ragged_dot, grouped_syrk = (
        functools.partial(function, implementation="cuda")
        for function in (jgg.ragged_dot, jgg.fp8_ragged_dot, jgg.grouped_syrk)
    )
    programs = {
        "ragged_dot": (ragged_dot, (*of(jnp.bfloat16), sizes)),
        "fp8_ragged_dot": (fp8_ragged_dot, (*of(jnp.bfloat16), sizes)),
        "ragged_dot of float32": (ragged_dot, (*of(jnp.float32), sizes)),
        "grouped_syrk": (grouped_syrk, of(jnp.bfloat16)[1:]),
        "grouped_gemm": (
            lambda a, b: jgg.grouped_gemm([a], [b], implementation="cuda"),
            (of(jnp.bfloat16)[0], jax.ShapeDtypeStruct((k, n), jnp.bfloat16)),
        ),
    }
    return {
        name: export.export(
            jax.jit(function), platforms=["cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
        )(*operands)
        for name, (function, operands) in programs.items()
    }


def in_another_version(exported: export.Exported) -> tuple[export.Exported, set[str]]:
    """The same program with targets of a version that does not exist, and their names."""
    module = exported.mlir_module_serialized
    names = {(name + OTHER_VERSION).decode() for name in VERSION.findall(module)}
    changed = VERSION.sub(rb"\g<1>" + OTHER_VERSION, module)
    return dataclasses.replace(exported, mlir_module_serialized=changed), names


def check() -> dict[str, Any]:
    """Runs programs of this version and tries those of another; counts, and what went wrong."""
    ran = refused = 0
    failures: list[str] = []
    rng = np.random.default_rng(0)
    programs = exported_products()
    for name, exported in programs.items():
        again = export.deserialize(exported.serialize())
        other, targets = in_another_version(again)
        if not targets:
            failures.append(f"{name} calls no target of ours")
        if not on_gpu():
            continue
        operands = [
            np.full(aval.shape, 40, np.int32)
            if aval.dtype == np.int32
            else rng.standard_normal(aval.shape, np.float32).astype(aval.dtype)
            for aval in again.in_avals
        ]
        jax.block_until_ready(again.call(*operands))
        ran += 1
        try:
            jax.block_until_ready(other.call(*operands))
        except Exception as error:
            if any(target in str(error) for target in targets):
                refused += 1
            else:
                failures.append(f"{name} does not say which target: {first_line(error)}")
        else:
            failures.append(f"{name} ran with targets of another version")
    return {
        "programs": len(programs),
        "ran": ran,
        "refused_by_name": refused,
        "failures": failures,
    }
