"""Weight gradients of unequal groups: cutting tiles along their rows.

A tile of a contracting product takes as many steps as its group has rows, so where one group has
most of the rows, its few tiles keep few multiprocessors busy. The kernel looks at the group sizes
when it starts (`csrc/scheduler/skew.h`). Where whole tiles can be dealt out evenly, it does that.
Otherwise it cuts tiles into pieces whose sums pass through memory (`csrc/scheduler/chains.h`), and
warps without other work write the zeros of empty groups. Which sums are added, and in which order,
depends on the sizes alone, so the same inputs give the same bits.

Sizes are known on the device alone, so the workspace has to be there for any of them; this is for
plans.
"""

from __future__ import annotations

from jax_grouped_gemm._src.ragged import stream_k

TILE_K = stream_k.STEP_BYTES // 2  # of 16-bit operands

# Shapes of which no sizes are worth cutting, or of which the kernel would look too long.
LEAST_STEPS = 64
MOST_UNITS = 1 << 16
MOST_GROUPS = 1 << 10

MOST_PIECES = 8


def is_possible(*, rows: int, units: int, groups: int) -> bool:
    """Whether there are group sizes for which tiles are cut.

    Args:
      rows: extent of the ragged dimension.
      units: tiles of one group, those counted once that a cluster computes together.
      groups: local groups of all batches.
    """
    return rows // TILE_K >= LEAST_STEPS and units < MOST_UNITS and groups <= MOST_GROUPS


def workspace_bytes(*, units: int, tile_m: int, tile_n: int, cluster: int, num_blocks: int) -> int:
    """Room for all sums that `num_blocks` thread blocks can hand over.

    Tiles of one group that are left over when every cluster has the same number are cut into as
    many pieces as there are clusters for, and then once more for those that have none.
    """
    clusters = num_blocks // cluster
    left_over = units % clusters
    if left_over == 0:
        return 0
    sums = left_over * (min(clusters // left_over, MOST_PIECES) + 1)
    return stream_k.workspace_bytes(tile_m, tile_n, sums * cluster)
