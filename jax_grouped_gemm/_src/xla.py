"""What XLA's own products of 16-bit operands take beside their bytes and multiplications.

Of a product with fewer tiles than the GPU has multiprocessors, XLA cuts the contracted dimension
and adds the parts up. Where that dimension is no multiple of a step, its kernels get operands that
are padded by others before (docs/notes/ragged.md).
"""

from __future__ import annotations

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import BANDWIDTH, Target

TILE = 128  # rows and columns, of what XLA's kernels for large products have
STEP = 64  # of the contracted dimension
# How deep products are that were measured to be padded, what the additional launches take, and how
# many parts there are: of the random products of h200_never_slower.json.
LEAST_CUT_K, PADDING_SECONDS, PARTS = 640, 3e-6, 4


def fills_device(g: int, m: int, n: int, target: Target) -> bool:
    """Whether products [g, m, n] have a tile for each multiprocessor."""
    return g * cdiv(m, TILE) * cdiv(n, TILE) >= target.multiprocessors


def cutting_seconds(g: int, m: int, n: int, k: int, operand_bytes: float, target: Target) -> float:
    """What padding operands and adding parts take, of products [g, m, n] that contract k."""
    if k < LEAST_CUT_K or k % STEP == 0 or fills_device(g, m, n, target):
        return 0.0
    parts_bytes = PARTS * g * m * n * 4  # float32
    return PADDING_SECONDS + 2 * (operand_bytes + parts_bytes) / BANDWIDTH
