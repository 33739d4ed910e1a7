"""Peers whose libraries this machine may lack: what is handed to them, and what they are asked."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest


import jax_grouped_gemm as jgg
from benchmarks.harness import cases
from benchmarks.fp8 import deep_gemm
from benchmarks.harness.fp8_inputs import ScaledInputs, dequantize, reference, rowwise
from benchmarks.peers.ours_fp8 import OursScaled
from benchmarks.peers import base, cublas_symmetric, variants
from benchmarks.harness.peer import NotOffered, Role
from benchmarks.peers.ours import Variant, ragged_product


class Blas:
    """Symmetric updates with cuBLAS's arguments, of matrices that are stored column by column."""

    def __getattr__(self, name):
        dtype = {"S": "float32", "D": "float64", "Z": "complex128"}[name[6]]
        real = np.zeros((), dtype).real.dtype
        hermitian, two_operands = name[7:9] == "he", "2k" in name

        def number(pointer, dtype):
            kind = np.ctypeslib.as_ctypes_type(np.zeros((), dtype).real.dtype)
            count = 2 if np.dtype(dtype).kind == "c" else 1
            parts = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (count,))
            return parts.view(dtype)[0]

        def matrix(pointer, rows, columns):
            kind = np.ctypeslib.as_ctypes_type(real)
            count = rows * columns * (2 if np.dtype(dtype).kind == "c" else 1)
            flat = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (count,))
            return flat.view(dtype).reshape(columns, rows).T

        def update(handle, uplo, operation, n, k, alpha, *rest):
            assert handle.value == 7 and operation == (2 if hermitian else 1)
            alpha = number(alpha, real if hermitian and not two_operands else dtype)
            operands, rest = rest[: 4 if two_operands else 2], rest[4 if two_operands else 2 :]
            a, *b = (matrix(p, stride, n) for p, stride in zip(*[iter(operands)] * 2, strict=True))
            assert a.shape == (k, n)
            beta, c, stride = rest
            assert number(beta, real if hermitian else dtype) == 0 and stride == n
            turned = np.conj if hermitian else np.asarray
            b = b[0] if b else None
            if b is None:
                product = alpha * turned(a).T @ a
            else:
                product = alpha * turned(a).T @ b + turned(alpha) * turned(b).T @ a
            c, kept = matrix(c, n, n), (np.triu if uplo == 1 else np.tril)(np.ones((n, n), bool))
            c[kept] = product[kept]
            return 0

        return update


@pytest.mark.parametrize("two_operands", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_cublas_is_asked_for_lower_triangles_of_rows(dtype, two_operands, rng, monkeypatch):
    monkeypatch.setattr(cublas_symmetric, "_cublas", lambda: (Blas(), ctypes.c_void_p(7)))
    monkeypatch.setattr(base.EnqueuedCall, "wait", lambda self, result: None)
    with jax.enable_x64(True):
        a, b = (
            (rng.standard_normal((2, 5, 3)) + 1j * rng.standard_normal((2, 5, 3))) for _ in "ab"
        )
        a, b = (x.astype(dtype) if dtype == "complex128" else x.real.astype(dtype) for x in (a, b))
        given = jnp.asarray(a), jnp.asarray(b) if two_operands else None
        call = cublas_symmetric.loop(*given, hermitian=dtype == "complex128")
        out = np.asarray(call.to_jax(call.run()))
    products = a @ np.conj(b).mT + b @ np.conj(a).mT if two_operands else a @ np.conj(a).mT
    np.testing.assert_allclose(np.tril(out), np.tril(products), rtol=1e-5, atol=1e-5)
    assert not np.triu(out, 1).any()


def test_cublas_has_no_update_of_bfloat16():
    with pytest.raises(NotOffered, match="bfloat16"):
        cublas_symmetric.loop(jnp.ones((1, 2, 2), jnp.bfloat16), None, hermitian=False)


def scaled_case(op: str, seed: int):
    case = cases.Case(cases.SHAPES["tiny_fine"], op, "random", "float8_e4m3fn", seed)
    return case, ScaledInputs(case.shape, seed)


FORWARD = cases.Op("fp8_forward", "x", "wt", transpose_rhs=True, out_dtype="bfloat16")
WGRAD = cases.Op("fp8_wgrad", "x", "dy", contracting=True, out_dtype="float32")


@pytest.mark.parametrize("op", [FORWARD, WGRAD])
def test_the_fp8_reference_is_close_to_the_product_of_the_sources(op, rng):
    case, inputs = scaled_case(op, int(rng.integers(2**31)))
    lhs, rhs, sizes = inputs.operands(case)
    found = np.asarray(inputs.reference(case, (lhs, rhs, sizes)))
    x, y = (np.float64(source) for source in (lhs.source, rhs.source))
    expected = np.zeros(case.problem.out_shape)
    for group, (start, end) in enumerate(cases.row_ranges(case.group_sizes)):
        if op.contracting:
            expected[group] = x[start:end].T @ y[start:end]
        else:
            expected[start:end] = x[start:end] @ y[group].T
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    # What three bits of mantissa leave; a misplaced scale or row is far above it.
    assert 0.01 < error < 0.06


def test_rowwise_scales_use_the_whole_range(rng):
    x = jnp.asarray(rng.standard_normal((3, 40, 130)) * 10.0 ** rng.integers(-3, 4, (3, 40, 1)))
    values, scales = rowwise(x)
    assert scales.shape == (3, 40, 1)
    assert np.all(np.abs(np.float32(values)).max(-1) == 448)
    np.testing.assert_allclose(dequantize(values, scales), x, rtol=2**-4, atol=0.01 * x.max())


def test_rows_are_padded_for_deep_gemm():
    sizes = np.array([3, 0, 130, 128])
    positions, groups = deep_gemm.padded_rows(sizes)
    assert len(positions) == sizes.sum() and len(groups) == 128 + 256 + 128
    np.testing.assert_array_equal(groups[positions], np.repeat([0, 2, 3], [3, 130, 128]))
    assert positions[0] == 0 and positions[3] == 128 and positions[133] == 384
    # Every tile of 128 rows is of one group.
    assert all(len(set(tile)) == 1 for tile in groups.reshape(-1, 128))


@pytest.mark.parametrize("peer", [Variant, OursScaled])
def test_variants_ask_for_their_configuration(peer, monkeypatch):
    asked = []

    @contextlib.contextmanager
    def use_tiles(*, forward):
        asked.append(forward)
        yield

    case, inputs = scaled_case(FORWARD, 0)
    operands, problem = inputs.operands(case), case.problem
    if peer is Variant:
        problem = cases.Case(case.shape, cases.OPS["forward_t"], "random").problem
        operands = (operands[0].source, operands[1].source, operands[2])
    monkeypatch.setattr(jgg, "use_tiles", use_tiles)
    variant = peer(0)
    op = "ragged_noncontracting" if peer is Variant else "scaled_ragged_noncontracting"
    assert variant.role == Role.VARIANT
    # Another test may have asked for the same product.
    ragged_product.cache_clear()
    variant.prepare(problem, *operands).run()
    assert set(asked) == {variants.compiled(op)[0]}
    with pytest.raises(NotOffered):
        peer(len(variants.compiled(op))).prepare(problem, *operands)


def test_the_reference_takes_any_scales(rng):
    case, inputs = scaled_case(FORWARD, 1)
    lhs, rhs, sizes = inputs.operands(case)
    doubled = lhs._replace(scales=2 * lhs.scales)
    np.testing.assert_allclose(
        reference(case.problem, doubled, rhs, sizes),
        2 * reference(case.problem, lhs, rhs, sizes),
        rtol=1e-5,
    )
