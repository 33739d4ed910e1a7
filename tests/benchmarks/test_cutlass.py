"""CUTLASS's kernels as peers: what they are handed, with a library of NumPy in their place."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest


from benchmarks import cutlass, grouped_gemm, rank_k
from benchmarks.harness import cases
from benchmarks.peers import base
from benchmarks.peers import cutlass as peers
from benchmarks.harness.peer import NotOffered

SOURCES = Path(cutlass.__file__).parent


def matrix(pointer: int, rows: int, columns: int, dtype) -> np.ndarray:
    count = rows * columns * np.dtype(dtype).itemsize
    flat = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (count,))
    return flat.view(dtype).reshape(rows, columns)


def multiply(name: str, problem: cutlass.Problem) -> None:
    """What the kernels do, in float64."""
    m, n, k = problem.m, problem.n, problem.k
    if "2k" in name:
        dtype = np.float64 if "f64" in name else np.complex128
        a, b = (matrix(x, n, k, dtype) for x in (problem.a, problem.b))
        lower = np.tril(np.ones((n, n), bool))
        update = a @ b.conj().T + b @ a.conj().T
        matrix(problem.out, n, n, dtype)[lower] = update[lower]
        return
    stored = name[-2:] if "sm90" in name else "nn"
    a = matrix(problem.a, *((k, m) if stored[0] == "t" else (m, k)), ml_dtypes.bfloat16)
    b = matrix(problem.b, *((n, k) if stored[1] == "t" else (k, n)), ml_dtypes.bfloat16)
    a, b = (a.T if stored[0] == "t" else a), (b.T if stored[1] == "t" else b)
    matrix(problem.out, m, n, ml_dtypes.bfloat16)[:] = np.float64(a) @ np.float64(b)


class Library:
    """Has the functions of `interface.cc`."""

    def __init__(self):
        self.made, self.freed = {}, []

    def jgg_cutlass_make(self, name, problems, count, sort, plan):
        if name == b"broken":
            return 1
        listed = list(problems)[:count]
        plan._obj.value = len(self.made) + 1
        self.made[plan._obj.value] = (
            name.decode(),
            sorted(listed, key=lambda problem: -problem.k) if sort else listed,
        )
        return 0

    def jgg_cutlass_run(self, plan, stream):
        name, problems = self.made[plan.value]
        for problem in problems:
            multiply(name, problem)
        return 0

    def jgg_cutlass_free(self, plan):
        self.freed.append(plan.value)

    def jgg_cutlass_error(self):
        return b"as asked"


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setattr(cutlass, "library", lambda: found)
    monkeypatch.setattr(peers, "unavailable_reason", lambda: None)
    monkeypatch.setattr(base.EnqueuedCall, "wait", lambda self, result: None)
    return found


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("kernel", peers.PRODUCTS)
def test_lists_of_products(kernel, sort, library):
    problems = grouped_gemm.random_problems(7, 8, 64, 8, seed=3)
    lhs, rhs = grouped_gemm.operands(problems, "bfloat16")
    call = peers.products(kernel, lhs, rhs, sort)
    outs = call.to_jax(call.run())
    error = grouped_gemm.Check(lhs, rhs, "float32").error(outs)
    assert error < grouped_gemm.BFLOAT16.error_limit
    ((name, listed),) = library.made.values()
    assert name == call.detail == peers.PRODUCTS[kernel]
    depths = [k for _, k, _ in problems]
    assert [problem.k for problem in listed] == (sorted(depths)[::-1] if sort else depths)


@pytest.mark.parametrize("dtype", peers.UPDATES)
def test_updates_write_the_lower_triangle(dtype, library, rng):
    with jax.enable_x64(True):
        shape = (3, 5, 4)
        a, b = (rng.standard_normal(shape) + 1j * rng.standard_normal(shape) for _ in "ab")
        a, b = (jnp.asarray(x if dtype == "complex128" else x.real) for x in (a, b))
        for kernel in peers.UPDATES[dtype]:
            call = peers.updates(kernel, a, b)
            out = np.asarray(call.to_jax(call.run()))
            want = np.einsum("gik,gjk->gij", a, np.conj(b))
            want = want + np.conj(np.swapaxes(want, 1, 2))
            np.testing.assert_allclose(np.tril(out), np.tril(want), rtol=1e-12, atol=1e-12)
            # Nothing else was written.
            assert np.isnan(out[:, *np.triu_indices(5, 1)]).all()


@pytest.mark.parametrize("op", ["forward", "forward_t", "dgrad", "dgrad_t", "wgrad"])
@pytest.mark.parametrize("schedule", ["cooperative", "pingpong"])
def test_ragged_products(op, schedule, library, rng):
    case = cases.Case(cases.SHAPES["tiny"], cases.OPS[op], "random")
    problem, sizes = case.problem, case.group_sizes
    lhs, rhs = (
        jnp.asarray(rng.standard_normal(cases.tensor_shape(case.shape, name)), jnp.bfloat16)
        for name in (case.op.lhs, case.op.rhs)
    )
    call = peers.CutlassGrouped(schedule).prepare(problem, lhs, rhs, jnp.asarray(sizes))
    out = np.float64(call.to_jax(call.run()))
    want = np.zeros(problem.out_shape)
    a, b = np.float64(lhs), np.float64(rhs)
    for group, (start, end) in enumerate(cases.row_ranges(sizes)):
        if problem.contracting:
            want[group] = a[start:end].T @ b[start:end]
        else:
            want[start:end] = a[start:end] @ (b[group].T if problem.transpose_rhs else b[group])
    np.testing.assert_allclose(out, want, rtol=1e-2, atol=1e-2 * np.abs(want).max())


def test_ragged_products_that_are_not_offered(library):
    peer = peers.CutlassGrouped("cooperative")
    shape = cases.SHAPES["tiny"]
    arrays = [jnp.ones(cases.tensor_shape(shape, name), jnp.bfloat16) for name in ("x", "dy")]
    one_hot = cases.Case(shape, cases.OPS["wgrad"], "one_hot")
    with pytest.raises(NotOffered, match="empty groups"):
        peer.prepare(one_hot.problem, *arrays, jnp.asarray(one_hot.group_sizes))
    wide = cases.Case(shape, cases.OPS["wgrad_f32"], "uniform")
    with pytest.raises(NotOffered, match="bfloat16"):
        peer.prepare(wide.problem, *arrays, jnp.asarray(wide.group_sizes))
    # Without rows there is nothing to do, so an empty group of a forward product is left out.
    arrays = [jnp.ones(cases.tensor_shape(shape, name), jnp.bfloat16) for name in ("x", "w")]
    empty = cases.Case(shape, cases.OPS["forward"], "one_hot")
    peer.prepare(empty.problem, *arrays, jnp.asarray(empty.group_sizes))
    ((_, listed),) = library.made.values()
    assert [problem.m for problem in listed] == [shape.rows]


def test_a_plan_is_freed_and_its_failure_has_a_reason(library):
    plan = cutlass.Plan("gemm_sm80_host", [cutlass.Problem(1, 1, 1, None, None, None)])
    del plan
    assert library.freed == [1]
    with pytest.raises(RuntimeError, match="broken: as asked"):
        cutlass.Plan("broken", [])


def test_a_list_with_and_without_the_library(library, monkeypatch, capsys):
    """A wrong result is left out and named, and so is a library that is missing."""
    from benchmarks.harness.recorders import ClockRecorder

    def measured():
        problems = grouped_gemm.random_problems(3, 8, 24, 8, seed=1)
        return grouped_gemm.measure("x", problems, ClockRecorder(), 2, lambda: None)

    right = measured()
    assert set(grouped_gemm.CUTLASS) < set(right["us"]) and not right["left_out"]
    assert len(grouped_gemm.lines(right)) == 2
    monkeypatch.setattr(Library, "jgg_cutlass_run", lambda *_: 0)
    wrong = measured()
    assert set(wrong["us"]) == {*grouped_gemm.VARIANTS, grouped_gemm.LOOP}
    assert set(wrong["left_out"]) == set(grouped_gemm.CUTLASS)
    monkeypatch.setattr(peers, "unavailable_reason", lambda: "not built")
    assert measured()["left_out"] == {"CUTLASS": "not built"}


def test_updates_in_double_precision_have_cutlass_contenders():
    with jax.enable_x64(True):
        a = jnp.ones((1, 8, 8))
        found = rank_k.contenders(rank_k.UPDATES["syr2k_f64"], a, a)
    assert set(peers.UPDATES["float64"]) < set(found)
    a = jnp.ones((1, 8, 8), jnp.bfloat16)
    names = rank_k.contenders(rank_k.UPDATES["syr2k"], a, a)
    assert not any(name.startswith("cutlass") for name in names)


def test_a_missing_library_names_the_command_that_builds_it(monkeypatch, tmp_path):
    monkeypatch.setattr(cutlass, "LIBRARY", tmp_path / "absent.so")
    reason = cutlass.unavailable_reason()
    assert cutlass.BUILD in reason and (Path(__file__).parents[2] / cutlass.BUILD).exists()


def test_every_kernel_that_is_asked_for_is_compiled():
    compiled = set(re.findall(r'\{"(\w+)", \w+\}', (SOURCES / "kernels.h").read_text()))
    asked = set(peers.PRODUCTS.values())
    asked |= {name for names in peers.UPDATES.values() for name in names.values()}
    asked |= {f"gemm_sm90_{s}_{x}" for s in ("cooperative", "pingpong") for x in ("nn", "nt", "tn")}
    assert asked == compiled
