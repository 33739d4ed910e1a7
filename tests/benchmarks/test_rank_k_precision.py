"""The benchmark of symmetric updates: every row is computed at the precision that it names."""

import sys
from pathlib import Path

import jax
import pytest


import jax_grouped_gemm as jgg
from benchmarks import rank_k
from benchmarks.harness.peer import Role

FLOAT32 = [update for update in rank_k.UPDATES.values() if update.dtype == "float32"]


@pytest.mark.parametrize("update", FLOAT32, ids=lambda update: update.name)
def test_precision_is_that_of_the_row_wherever_it_is_called(update, monkeypatch):
    """What is timed is called after, and outside, all that has prepared it."""
    jitted = []
    monkeypatch.setattr(rank_k, "jax_call", lambda function, a, b: jitted.append(function))
    monkeypatch.setattr(rank_k, "kernels_unavailable_reason", lambda: None)
    monkeypatch.setattr(rank_k, "on_gpu", lambda: True)
    a, b = rank_k.operands(update, (2, 24, 16), 0)
    with jax.enable_x64(True):
        found = rank_k.contenders(update, a, b)
    for contender in found.values():
        if contender.role != Role.LOOP:
            contender.prepare()
    assert len(jitted) == len(found) - 1
    want = "HIGHEST" if update.precision == "highest" else "DEFAULT"
    for function in jitted:
        text = str(jax.make_jaxpr(function)(a, b))
        assert want in text
        for plan in jgg.explain(function, a, b).plans:
            assert plan.terms == (3 if update.precision == "highest" else 1)


def test_the_accurate_rows_are_those_that_bars_ask_for():
    assert {update.name: update.precision for update in FLOAT32} == {
        "syrk_f32": "highest",
        "syr2k_f32": "highest",
        "syr2k_f32_default": "default",
    }
