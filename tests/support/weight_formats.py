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


def e2m1_bits(step: int, pair: int) -> list[tuple[int, int, bool]]:
    """Returns where the four bits of a code are, from the lowest on.

    A bit has a word of the two steps, a place in a half of the word, and whether the half is the
    other one than that of the code's element.
    """
    own = step % 2
    if pair == 0:
        return [(own, 6, False), (own, 7, False), (own, 8, False), (own, 15, False)]
    if pair == 1:
        return [(own, 0, False), (own, 1, False), (own, 2, False), (own, 9, False)]
    if pair == 2:
        return [(own, 12, False), (own, 13, False), (own, 14, False), (own, 5, True)]
    if own == 0:
        return [(0, 4, False), (1, 3, False), (1, 4, False), (1, 11, False)]
    return [(0, 10, False), (0, 11, False), (1, 10, False), (0, 3, True)]


def record_of_4_bits(record, interleaved: bool) -> np.ndarray:
    """Returns the codes [64, 64] of a record of 2048 bytes."""
    words = np.frombuffer(np.asarray(record).tobytes(), "<u4").reshape(128, 4)
    out = np.full((64, 64), 255, np.uint8)
    for thread, step, pair, half, column, row in threads():
        places = [(step % 2, 4 * pair + bit, False) for bit in range(4)]
        if interleaved:
            places = e2m1_bits(step, pair)
        code = 0
        for bit, (word, place, is_other) in enumerate(places):
            shift = place + 16 * (half != is_other)
            code |= (int(words[thread, step // 2 * 2 + word]) >> shift & 1) << bit
        out[row, column] = code
    return out


E4M3_BITS = [(4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11)]
"""Where the bits of two codes are in a half of a word, from the lowest on."""


def record_of_8_bits(record, interleaved: bool) -> np.ndarray:
    """Returns the bytes [64, 64] of a record of 4096 bytes."""
    words = np.frombuffer(np.asarray(record).tobytes(), "<u4").reshape(2, 128, 2, 2)
    out = np.full((64, 64), 0, np.uint8)
    for thread, step, pair, half, column, row in threads():
        both = int(words[step // 2, thread, step % 2, pair // 2]) >> 16 * half
        places = E4M3_BITS[pair % 2] if interleaved else range(8 * (pair % 2), 8 * (pair % 2) + 8)
        out[row, column] = sum((both >> place & 1) << bit for bit, place in enumerate(places))
    return out


def kernel_pairs(words) -> list[np.ndarray]:
    """Decodes words [threads, 4] of MXFP4 as a kernel does, into two bfloat16 for each pair."""
    x, mask = np.asarray(words, np.uint32), np.uint32(0x81C081C0)

    def rotated(x):
        return x >> np.uint32(6) | x << np.uint32(26)

    of_second = np.uint32(0xC180C180)
    last = x[:, 1::2] << np.uint32(4) & of_second | x[:, ::2] << np.uint32(2) & ~of_second
    both = np.stack([last, rotated(last)], axis=-1).reshape(x.shape)
    return [each & mask for each in (x, x << np.uint32(6), rotated(x), both)]


def in_order(words) -> np.ndarray:
    """Returns bfloat16, as uint32 [k, n], that are two in a word.

    Args:
      words: the words of each pair of a thread's step, [n / 64, k / 64, threads, steps].
    """
    columns, rows = words[0].shape[:2]
    out = np.zeros((rows, 64, columns, 64), np.uint32)
    for thread, step, pair, half, column, row in threads():
        word = words[pair][:, :, thread, step]
        out[:, row, :, column] = (word >> np.uint32(16 * half) & np.uint32(0xFFFF)).T
    return out.reshape(64 * rows, 64 * columns)


def words_of_8_bits(values) -> list[np.ndarray]:
    """Returns the two words of each step, as `in_order` takes them.

    Args:
      values: the records of a matrix, [n / 64, k / 64, 4096].
    """
    values = np.asarray(values)
    x = values.view("<u4").reshape(*values.shape[:2], 2, 128, 2, 2)
    x = np.moveaxis(x, 2, 3).reshape(*values.shape[:2], 128, 4, 2)
    return [x[..., 0], x[..., 1]]


def kernel_e4m3(values) -> np.ndarray:
    """Returns the bfloat16, as uint32 [k, n], that a kernel moves the bits of FP8 codes to."""
    mask, moved_left = np.uint32(0x87F087F0), np.uint32(0x80F080F0)
    words = []
    for x in words_of_8_bits(values):
        second = x << np.uint32(4) & moved_left | x >> np.uint32(4) & ~moved_left
        words += [x & mask, second & mask]
    return in_order(words)


def numbers(bfloat16) -> np.ndarray:
    """Returns, in float64, the numbers whose bits are bfloat16 in uint32."""
    return (bfloat16 << np.uint32(16)).view(np.float32).astype(np.float64)


def kernel_int8(values) -> np.ndarray:
    """Returns the numbers [k, n] to which a kernel decodes int8, in float64."""
    mask = np.uint32(0x00FF00FF)
    words = [x >> np.uint32(8 * i) & mask for x in words_of_8_bits(values) for i in range(2)]
    return in_bfloat16(numbers(in_order(words)) * 2.0**127 - 2)


def kernel_int4(values, scales, zeros) -> np.ndarray:
    """Returns the weights [k, n] to which a kernel decodes int4, in float64.

    Args:
      values: the records of a matrix, [n / 64, k / 64, 2048].
      scales, zeros: the scale and the zero point of each element; `zeros` may be None.
    """
    values = np.asarray(values)
    x = values.view("<u4").reshape(*values.shape[:2], 128, 4)
    moved = [x << np.uint32(4), x, x >> np.uint32(4), x >> np.uint32(8)]
    codes = numbers(in_order([each & np.uint32(0x00F000F0) for each in moved]))
    wide = in_bfloat16(scales * 2.0**60)
    if zeros is None:
        return in_bfloat16(codes * wide + in_bfloat16(wide * -(2.0**-126)))
    return in_bfloat16(in_bfloat16(codes - zeros * 2.0**-129) * wide)


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
