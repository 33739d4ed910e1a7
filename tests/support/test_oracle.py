"""The oracle accepts correctly rounded results and rejects small mistakes."""

import ml_dtypes
import numpy as np
import pytest

from tests.support import oracle
from tests.support.ops import random

M, K, N = 96, 80, 24
SIZES = np.array([40, 0, 31], np.int32)
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.fixture
def case(rng):
    lhs, rhs = random(rng, (M, K), np.float32), random(rng, (3, K, N), np.float32)
    return lhs, rhs, oracle.ragged_noncontracting(lhs, rhs, SIZES)


def test_group_rows_clip_sizes_and_windows():
    assert oracle.group_rows([4, -3, 0, 9, 2], 0, 5, 10) == [
        (0, 4),
        (4, 4),
        (4, 4),
        (4, 10),
        (10, 10),
    ]
    assert oracle.group_rows([4, 3], -1, 4, 10) == [(0, 0), (0, 4), (4, 7), (0, 0)]


def test_ragged_matmuls_agree_with_loops(rng):
    lhs, rhs = rng.standard_normal((7, 3)), rng.standard_normal((2, 3, 4))
    out = oracle.ragged_noncontracting(lhs, rhs, [2, 4]).value
    want = [lhs[r] @ rhs[0] for r in range(2)] + [lhs[r] @ rhs[1] for r in range(2, 6)]
    np.testing.assert_allclose(out, np.stack(want + [np.zeros(4)]))
    out = oracle.ragged_contracting(lhs, lhs[:, :2], [2, 4]).value
    want = [sum(np.outer(lhs[r], lhs[r, :2]) for r in rows) for rows in (range(2), range(2, 6))]
    np.testing.assert_allclose(out, np.stack(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accepts_one_rounding(case, dtype):
    oracle.check(case[2].value.astype(dtype), case[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", ["lost product", "lost row", "tail", "nan", "shifted boundary"])
def test_rejects_a_mistake(case, dtype, mistake):
    lhs, rhs, exact = case
    wrong = exact.value.copy()
    if mistake == "lost product":
        k = np.abs(lhs[5] * rhs[0, :, 7]).argmax()
        wrong[5, 7] -= lhs[5, k] * rhs[0, k, 7]
    elif mistake == "lost row":
        wrong[39] = 0
    elif mistake == "tail":
        wrong[M - 1, N - 1] = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    elif mistake == "nan":
        wrong[3, 3] = np.nan
    else:
        wrong[39] = lhs[39] @ rhs[2].astype(np.float64)
    with pytest.raises(AssertionError):
        oracle.check(wrong.astype(dtype), exact)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rejects_accumulation_in_the_output_dtype(case, dtype):
    lhs, rhs, exact = case
    total = np.zeros((40, N), dtype)
    for k in range(K):
        total = (total + np.outer(lhs[:40, k], rhs[0, k])).astype(dtype)
    wrong = exact.value.astype(dtype)
    wrong[:40] = total
    with pytest.raises(AssertionError):
        oracle.check(wrong, exact)


def test_rejects_tf32_products(case):
    lhs, rhs, exact = case

    def tf32(x):
        return (np.float32(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    with pytest.raises(AssertionError, match="group|wrong"):
        oracle.check(
            oracle.ragged_noncontracting(tf32(lhs), tf32(rhs), SIZES).value.astype(np.float32),
            exact,
        )


def test_poison_must_arrive_where_it_belongs(case):
    lhs, rhs, _ = case
    lhs = lhs.copy()
    lhs[4, 2] = np.nan
    exact = oracle.ragged_noncontracting(lhs, rhs, SIZES)
    oracle.check(exact.value.astype(np.float32), exact)
    with pytest.raises(AssertionError):
        oracle.check(np.nan_to_num(exact.value).astype(np.float32), exact)
