"""The packed layout: matrices [k, n] as records of 64 columns and 64 rows, in the order of threads.

A record holds 64 x 64 weights in the order of the 128 threads of a warpgroup. Here, a step is 16
elements of k. Thread 32 w + l, with r = l // 4 and t = l % 4, has the columns 16 w + r and
16 w + r + 8. In each step it has the elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of both columns.
These are the elements that `mma.sync.m16n8k16` and WGMMA expect in the thread's registers of their
first operand. A thread has eight codes in each step, as four pairs. Pair j has the column
16 w + r + 8 (j % 2), and its elements 2 t + 8 (j // 2) and the next one are the low and the high
half of a register.

Codes of 4 bits fill one word in each step, and the four words of a thread are contiguous. In MXFP4,
bits interleave, and two words hold the codes of two steps.

Codes of 8 bits fill two words in each step, one for pairs 0 and 1 and one for pairs 2 and 3. The
first half of such a record holds steps 0 and 1 and the second half steps 2 and 3, so that loads of
16 bytes for each thread have no bank conflicts. An int8 number is stored as the number plus 128. In
FP8, the bits of every two consecutive bytes interleave, see fp8/weight_formats.py.

Matrices are padded to multiples of 64 with codes that decode to zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv, round_up

SIDE = 64
"""Columns and rows of a record."""


class _Field(NamedTuple):
    """Consecutive bits of the codes of a pair, and where they are in the words of two steps."""

    step: int  # 0 or 1, of the codes
    pair: int
    low: int  # the lowest of the bits
    mask: int
    word: int  # 0 or 1
    place: int  # in a half of the word
    crosses: bool = False  # whether the low code is in the high half, and the high code in the low


_INT4 = [_Field(step, j, 0, 0xF, step, 4 * j) for step in range(2) for j in range(4)]

# In MXFP4 the bits of codes interleave, so that shifts, rotations and masks move a pair to the
# sign, exponent and mantissa of a bfloat16. Each word has pairs 0 to 2 of its step: in their
# places, 6 bits to the right, and rotated to the left by 6 bits. Kernels merge the other bits of
# both words. They are then pair 3 of the first step, and that of the second step rotated by 6 bits.
_E2M1 = [
    *(_Field(step, 0, 3, 1, step, 15) for step in range(2)),
    *(_Field(step, 0, 0, 7, step, 6) for step in range(2)),
    *(_Field(step, 1, 3, 1, step, 9) for step in range(2)),
    *(_Field(step, 1, 0, 7, step, 0) for step in range(2)),
    *(_Field(step, 2, 3, 1, step, 5, True) for step in range(2)),
    *(_Field(step, 2, 0, 7, step, 12) for step in range(2)),
    _Field(0, 3, 3, 1, 1, 11),
    _Field(0, 3, 1, 3, 1, 3),
    _Field(0, 3, 0, 1, 0, 4),
    _Field(1, 3, 3, 1, 0, 3, True),
    _Field(1, 3, 2, 1, 1, 10),
    _Field(1, 3, 0, 3, 0, 10),
]

# The dimensions of a record, see above: step, half of the step, t, low or high along k; and warp w,
# half of its columns, r along n.
_SPLIT_K = (4, 2, 4, 2)
_SPLIT_N = (4, 2, 8)


def _to_threads(codes: jax.Array, fill: int) -> jax.Array:
    """Returns uint8 [k, n], padded to [K, N] with `fill`, in the order of threads.

    The result is [N/64, K/64, w, r, t, step, half of step, half of columns, low or high].
    """
    k, n = codes.shape
    padded = jnp.pad(
        codes, ((0, round_up(k, SIDE) - k), (0, round_up(n, SIDE) - n)), constant_values=fill
    )
    split = padded.reshape(cdiv(k, SIDE), *_SPLIT_K, cdiv(n, SIDE), *_SPLIT_N)
    # records of k, step, kh, t, lh, records of n, w, jn, r
    return split.transpose(5, 0, 6, 8, 3, 1, 2, 7, 4)


def _of_threads(split: jax.Array, matrix: tuple[int, int]) -> jax.Array:
    k, n = matrix
    split = split.transpose(1, 5, 6, 4, 8, 0, 2, 7, 3)
    return split.reshape(round_up(k, SIDE), round_up(n, SIDE))[:k, :n]


def _record_shape(matrix: tuple[int, int]) -> tuple[int, int]:
    k, n = matrix
    return cdiv(n, SIDE), cdiv(k, SIDE)


def pack4(codes: jax.Array, *, fp4: bool, fill: int = 0) -> jax.Array:
    """Packs codes of 4 bits into records, uint8 [N/64, K/64, 2048].

    Args:
      codes: uint8 [k, n] in 0..15.
      fp4: whether to interleave bits as MXFP4 does; otherwise nibbles lie in order.
      fill: the code of padding.
    """
    x = _to_threads(codes, fill).astype(jnp.uint16)
    x = x.reshape(*x.shape[:5], 2, 2, 4, 2)  # two steps, step, pair, low or high
    words = [jnp.zeros((*x.shape[:6], 2), jnp.uint16) for _ in range(2)]
    for f in _E2M1 if fp4 else _INT4:
        bits = ((x[..., f.step, f.pair, :] >> f.low) & f.mask) << f.place
        words[f.word] |= bits[..., ::-1] if f.crosses else bits
    halves = jnp.stack(words, axis=-2)
    each = jnp.stack([halves & 0xFF, halves >> 8], axis=-1).astype(jnp.uint8)
    return each.reshape(*x.shape[:2], 2048)


def unpack4(values: jax.Array, matrix: tuple[int, int], *, fp4: bool) -> jax.Array:
    """Returns the codes that `pack4` packed."""
    each = values.reshape(*_record_shape(matrix), 4, 8, 4, 2, 2, 2, 2).astype(jnp.uint16)
    halves = each[..., 0] | each[..., 1] << 8  # ..., two steps, word, half
    codes = [[jnp.zeros_like(halves[..., 0, :]) for _ in range(4)] for _ in range(2)]
    for f in _E2M1 if fp4 else _INT4:
        half = halves[..., f.word, :]
        bits = ((half[..., ::-1] if f.crosses else half) >> f.place) & f.mask
        codes[f.step][f.pair] |= bits << f.low
    split = jnp.stack([jnp.stack(pairs, axis=-2) for pairs in codes], axis=-3).astype(jnp.uint8)
    return _of_threads(split.reshape(*split.shape[:5], 4, 2, 2, 2), matrix)


def pack8(codes: jax.Array, *, fill: int = 0) -> jax.Array:
    """Packs uint8 [k, n] into records, uint8 [N/64, K/64, 4096]. Padding has the code `fill`."""
    x = _to_threads(codes, fill)
    x = x.reshape(*x.shape[:5], 2, 2, *x.shape[6:])  # half of the record, step in it
    # Bytes 0 and 2 of a word are one pair, bytes 1 and 3 the other pair.
    x = x.transpose(0, 1, 5, 2, 3, 4, 6, 7, 9, 8)
    return x.reshape(*x.shape[:2], 4096)


def unpack8(values: jax.Array, matrix: tuple[int, int]) -> jax.Array:
    """Returns the codes that `pack8` packed."""
    x = values.reshape(*_record_shape(matrix), 2, 4, 8, 4, 2, 2, 2, 2)
    x = x.transpose(0, 1, 3, 4, 5, 2, 6, 7, 9, 8)
    return _of_threads(x.reshape(*x.shape[:5], 4, *x.shape[7:]), matrix)


def pack_groups(scales: jax.Array, *, record: int = 1) -> jax.Array:
    """Packs scales or zero points [groups, n] as [N/64, ceil(groups / record), 64 record].

    Element 8 w + r of a record has the numbers for the columns 16 w + r and 16 w + r + 8 of its
    first group, then those of its next groups. Padding is zero.

    Args:
      scales: one number for each group along k and each column.
      record: number of groups in a record.
    """
    groups, n = scales.shape
    padded = jnp.pad(scales, ((0, round_up(groups, record) - groups), (0, round_up(n, SIDE) - n)))
    split = padded.reshape(cdiv(groups, record), record, cdiv(n, SIDE), *_SPLIT_N)
    split = split.transpose(2, 0, 3, 5, 1, 4)  # records of n and k, w, r, group, half of columns
    return split.reshape(*split.shape[:2], SIDE * record)


def unpack_groups(packed: jax.Array, shape: tuple[int, int], *, record: int = 1) -> jax.Array:
    """Returns the numbers, of `shape` [groups, n], that `pack_groups` packed."""
    groups, n = shape
    split = packed.reshape(*packed.shape[:2], 4, 8, record, 2).transpose(1, 4, 0, 2, 5, 3)
    whole = split.reshape(packed.shape[1] * record, packed.shape[0] * SIDE)
    return whole[:groups, :n]


def pad_columns(x: jax.Array, fill: float) -> jax.Array:
    """Pads [n] with `fill` to a multiple of 64."""
    n = x.shape[0]
    return jnp.pad(x, (0, round_up(n, SIDE) - n), constant_values=fill)


def bits_of(x: jax.Array) -> jax.Array:
    """Returns an array of one-byte elements as uint8."""
    return lax.bitcast_convert_type(x, jnp.uint8)
