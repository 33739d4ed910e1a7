"""Decodes quantised weights in NumPy by the formats' definitions, also from packed records."""

from __future__ import annotations

import numpy as np

# Names of weight-only formats, with options of `quantize`.
FORMATS = [
    ("mxfp4", {}),
    *(("int4", dict(group_size=size, zero_points=z)) for size in (32, 64, 128) for z in (0, 1)),
    ("int8", {}),
    ("fp8", {}),
    ("fp8_128x128", {}),
]
FORMATS = [
    (name, {key: bool(x) if key == "zero_points" else x for key, x in options.items()})
    for name, options in FORMATS
]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


def e8m0(exponents) -> np.ndarray:
    """Returns 2^(e - 127), or NaN for 255."""
    exponents = np.asarray(exponents, np.float64)
    return np.where(exponents == 255, np.nan, 2.0 ** (exponents - 127))


def of_rows(scales, size: int, k: int) -> np.ndarray:
    """Returns the scale of every row, [..., k, n]."""
    return np.repeat(np.asarray(scales, np.float64), size, axis=-2)[..., :k, :]


def mxfp4(codes, scales) -> np.ndarray:
    """Returns values [..., k, n]."""
    return E2M1[np.asarray(codes)] * of_rows(e8m0(scales), 32, np.shape(codes)[-2])


def int4(codes, scales, size: int, zero_points=None) -> np.ndarray:
    """Returns values [..., k, n]."""
    k = np.shape(codes)[-2]
    zero = 8 if zero_points is None else of_rows(zero_points, size, k)
    return (np.asarray(codes, np.float64) - zero) * of_rows(scales, size, k)


def channels(codes, scales) -> np.ndarray:
    """Returns values [..., k, n]."""
    return np.asarray(codes, np.float64) * np.asarray(scales, np.float64)[..., None, :]


def threads():
    """Yields (thread, step, pair, half, column, row) for each of the 64 x 64 weights of a record.

    A step is 16 elements of k, for which a thread holds four pairs of codes; see quantized/pack.py.
    A decoded pair fills one register. `half` says whether the weight at `row` and `column` is in
    the low (0) or high (1) half of the register.
    """
    for thread in range(128):
        w, lane = divmod(thread, 32)
        r, t = divmod(lane, 4)
        for step in range(4):
            for pair in range(4):
                for half in range(2):
                    column = 16 * w + r + 8 * (pair % 2)
                    row = 16 * step + 2 * t + 8 * (pair // 2) + half
                    yield thread, step, pair, half, column, row


def record_of_4_bits(record, interleaved: bool) -> np.ndarray:
    """Returns the codes [64, 64] of a record of 2048 bytes."""
    words = np.frombuffer(np.asarray(record).tobytes(), "<u4").reshape(128, 4)
    signs, rests = (15, 12, 14, 13), (6, 3, 0, 9)
    out = np.full((64, 64), 255, np.uint8)
    for thread, step, pair, half, column, row in threads():
        x = int(words[thread, step]) >> 16 * half & 0xFFFF
        if interleaved:
            code = (x >> signs[pair] & 1) << 3 | x >> rests[pair] & 7
        else:
            code = x >> 4 * pair & 15
        out[row, column] = code
    return out


def record_of_8_bits(record) -> np.ndarray:
    """Returns the bytes [64, 64] of a record of 4096 bytes."""
    words = np.frombuffer(np.asarray(record).tobytes(), "<u4").reshape(2, 128, 2, 2)
    out = np.full((64, 64), 0, np.uint8)
    for thread, step, pair, half, column, row in threads():
        word = int(words[step // 2, thread, step % 2, pair // 2])
        out[row, column] = word >> 8 * (pair % 2 + 2 * half) & 255
    return out


def kernel_pairs(words, signs: int = 0x80008000, mask: int = 0x81C081C0) -> list[np.ndarray]:
    """Decodes words of MXFP4 as a kernel does, into four words of two bfloat16 each."""
    x, rest = np.asarray(words, np.uint32), mask & ~signs
    return [
        x & mask,
        x << 3 & mask,
        x << 1 & signs | x << 6 & rest,
        x << 2 & signs | x >> 3 & rest,
    ]


def in_bfloat16(x) -> np.ndarray:
    """Rounds float64 to bfloat16, to the nearest, ties to even, subnormals included."""
    step = np.exp2(np.maximum(np.frexp(x)[1] - 8, -133).astype(np.float64))
    return np.rint(x / step) * step


def kernel_blocks(q) -> np.ndarray:
    """Returns the weights [..., k, n] of "fp8_128x128" that kernels multiply, in float64."""
    k, n = q.matrix
    records = np.asarray(q.scales, np.float64).repeat(64, -3).repeat(64, -2)
    _, high, low, _ = np.moveaxis(records.swapaxes(-3, -2)[..., :k, :n, :], -1, 0)
    moved = np.asarray(q.unpack().codes, np.float64) * 2.0**-120
    rounded = in_bfloat16(moved * high + in_bfloat16(moved * low))
    return rounded * np.asarray(q.channel_scales, np.float64)[..., None, :n]


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")
