"""The compiled part of the package: XLA FFI handlers and the kernels behind them."""

from typing import NotRequired, TypedDict

import numpy as np

class KernelConfig(TypedDict):
    op: str
    tile_m: int
    tile_n: int
    cluster: int
    schedule: NotRequired[str]  # of FP8 products

def registrations() -> dict[str, object]:
    """The FFI handlers as capsules, by the name of their custom call target."""

def ffi_api_version() -> tuple[int, int]:
    """Major and minor version of the XLA FFI headers that the handlers were built with."""

def kernel_configs() -> list[KernelConfig]:
    """Every operation and tile that was compiled."""

def ragged_noncontracting_tiles(
    group_sizes: np.ndarray,
    group_offset: np.ndarray,
    batches: int,
    local_groups: int,
    m: int,
    k: int,
    n: int,
    tile_m: int,
    tile_n: int,
    cluster: int,
    align: int,
) -> np.ndarray:
    """The tiles of lhs [b, m, k] . rhs [b, local_groups, k, n], from the code the kernels run.

    Args:
      group_sizes: int32 [batches or 1, groups].
      group_offset: int32 [batches or 1].
      align: rows at a multiple of which tiles start: 8 where rows are the contiguous dimension of
        an operand, else 1.

    Returns:
      int32 [tiles, 11], in the order of the schedule. Columns: unit of work; rank of the CTA in its
      cluster; batch; local group; first row and number of rows of the group, with the rows that
      alignment adds in front; number of those; first row and column of the tile in the group's
      result; mainloop steps (0 for a tile of zeros); the operand that the cluster shares (0 none,
      1 lhs, 2 rhs).
    """

def ragged_contracting_tiles(
    group_sizes: np.ndarray,
    group_offset: np.ndarray,
    batches: int,
    local_groups: int,
    m: int,
    k: int,
    n: int,
    tile_m: int,
    tile_n: int,
    cluster: int,
    align: int,
) -> np.ndarray:
    """The tiles of lhs [b, m, k]^T . rhs [b, m, n]; see `ragged_noncontracting_tiles`."""

def scaled_ragged_contracting_tiles(
    group_sizes: np.ndarray,
    group_offset: np.ndarray,
    batches: int,
    local_groups: int,
    m: int,
    k: int,
    n: int,
    tile_m: int,
    tile_n: int,
    cluster: int,
) -> np.ndarray:
    """The tiles of an FP8 lhs [b, k, p] . rhs [b, n, p]^T; see `ragged_noncontracting_tiles`.

    m is the number of rows before padding; the first row of a group is counted with the padding
    that makes each group start at a multiple of 128.
    """

def float32_workspace_bytes(
    contracting: bool,
    lhs_batched: bool,
    rhs_batched: bool,
    sizes_batched: bool,
    offset_batched: bool,
    batches: int,
    local_groups: int,
    m: int,
    k: int,
    n: int,
    terms: int,
) -> int:
    """Bytes of workspace that a product of float32 operands needs."""

def triangle_entries(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Row and column of entries of a lower triangle by their numbers, int32, row by row."""

def rank_k_tiles(
    stacks: np.ndarray,
    upper: bool,
    clusters: int,
    tile_m: int,
    tile_n: int,
    cluster: int,
) -> np.ndarray:
    """The tiles of one triangle of each of `stacks`, from the code that the kernel runs.

    Args:
      stacks: int32 [stacks, 3]: matrices, their number of rows, mainloop steps of a tile.
      upper: whether the upper triangle is computed.
      clusters: how many clusters take the units of work in turn.

    Returns:
      int32 [tiles, 11] with the columns of `ragged_noncontracting_tiles`: batch is the matrix
      within its stack, group the stack, and the number of rows that of the matrix. A tile whose
      first row is past that is padding.
    """
