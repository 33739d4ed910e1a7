"""What the kernels do on the device, run on the host: built for tests alone."""

from typing import TypedDict

import numpy as np

class KernelConfig(TypedDict):
    op: str
    tile_m: int
    tile_n: int
    cluster: int

def kernel_configs() -> list[KernelConfig]:
    """Every operation and tile compiled; of float32, all tiles of lists, 128x256 of others."""

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
    clusters: int = 1,
    zeroes_unowned: bool = True,
    shares_lhs: bool = False,
) -> np.ndarray:
    """The tiles of lhs [b, m, k] . rhs [b, local_groups, k, n], from the code the kernels run.

    Args:
      group_sizes: int32 [batches or 1, groups].
      group_offset: int32 [batches or 1].
      align: rows at a multiple of which tiles start: 8 where rows are the contiguous dimension of
        an operand, else 1.
      clusters: how many clusters share the work.
      zeroes_unowned: whether rows that no local group owns have tiles.
      shares_lhs: whether the CTAs of every cluster have the same rows.

    Returns:
      int32 [tiles, 12], in the order of the schedule. Columns: unit of work; rank of the CTA in its
      cluster; the cluster that takes the unit; batch; local group; first row and number of rows of
      the group, with the rows that alignment adds in front; number of those; first row and column
      of the tile in the group's result; mainloop steps (0 for a tile of zeros); the operand that
      the cluster shares (0 none, 1 lhs, 2 rhs).
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
    clusters: int = 1,
    gathers: bool = False,
) -> np.ndarray:
    """The tiles of lhs [b, m, k]^T . rhs [b, m, n]; see `ragged_noncontracting_tiles`.

    With `gathers`, they are in the order of products whose rows lie anywhere in memory.
    """

def ragged_noncontracting_pieces(
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
    clusters: int,
) -> np.ndarray:
    """The same tiles where the last wave is cut along K, on a grid of `clusters` clusters.

    Returns:
      int32 [tiles, 14], the tiles of one cluster after those of another, each in its order.
      Columns: number of the cluster in the grid; rank; those of `ragged_noncontracting_tiles` from
      batch on; first of the tile's steps; partials, see `assignment`; the place of the sum that is
      handed over, or else of the first of those that are added.
    """

def ragged_contracting_pieces(
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
    clusters: int,
    length: int,
    longest: int,
    shares_lhs: bool = False,
) -> np.ndarray:
    """The tiles of groups with rows where they are cut along their rows.

    Args:
      length, longest: of the chains that the cuts are made for, see `chain_ranges`.

    Returns:
      int32 [tiles, 14], see `ragged_noncontracting_pieces`. First row and number of rows are those
      of the piece; the sums that are added follow one another.
    """

def chain_ranges(chains: int, length: int, longest: int, clusters: int) -> np.ndarray:
    """How chains, the unit of the same number of each group after one another, are dealt out.

    Args:
      length: steps of a chain.
      longest: steps of the longest tile of a chain.

    Returns:
      int32 [ranges, 5], the ranges of one cluster after those of another, each in its order.
      Columns: cluster; chain; first step; the step after the last one, 2^31 - 1 for the end of the
      chain; how many ranges of the chain come before.
    """

def most_chain_sums(chains: int, clusters: int) -> int:
    """Sums for which there must be room to cut chains of any length."""

def worthwhile_chain_length(
    group_sizes: np.ndarray,
    group_offset: np.ndarray,
    batches: int,
    local_groups: int,
    m: int,
    units: int,
    zeros_cost: int,
    most_sums: int,
    clusters: int,
) -> int:
    """Steps of the chains that a kernel cuts, 0 if it computes whole tiles.

    Args:
      units: units of work of each group.
      zeros_cost: what a unit of an empty group costs, in steps.
      most_sums: sums for which there is room.
    """

def assignment(units: int, steps: int, clusters: int) -> np.ndarray:
    """How units of work of `steps` steps each are dealt to clusters that cut the last wave.

    Returns:
      int32 [pieces, 5], the pieces of one cluster after those of another, each in its order.
      Columns: cluster; unit; first step; number of steps; partials, which is -1 where the sum is
      handed over, and else the number of clusters just before this one whose sums are added.
    """

def stream_k_workspace_bytes(tile_m: int, tile_n: int, cluster: int, blocks: int) -> int:
    """Bytes of workspace for partial sums of `blocks` thread blocks."""

def scaled_ragged_noncontracting_tiles(
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
    clusters: int = 1,
) -> np.ndarray:
    """The tiles of an FP8 lhs [b, m, k] . rhs [b, g, n, k]^T; see `ragged_noncontracting_tiles`."""

def scaled_ragged_noncontracting_pieces(
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
    clusters: int,
) -> np.ndarray:
    """The same tiles where the last wave is cut along K; see `ragged_noncontracting_pieces`."""

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
    clusters: int = 1,
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

def float32_list_workspace_bytes(stacks: list[tuple[int, int]], terms: int) -> int:
    """The same for lists of float32 operands.

    Args:
      stacks: of every operand, the number of matrices and the elements of each.
    """

def triangle_entries(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Row and column of entries of a lower triangle by their numbers, int32, row by row."""

MAX_LISTED_PROBLEMS: int
"""Problems to a launch of `grouped_gemm`."""

def grouped_gemm_tiles(
    problems: np.ndarray,
    schedule: np.ndarray,
    clusters: int,
    tile_m: int,
    tile_n: int,
    cluster: int,
) -> np.ndarray:
    """The tiles of a list of products, from the code that the kernel runs.

    Args:
      problems: int32 [problems, 4]: matrices, their rows and columns, mainloop steps of a tile.
      schedule: int32 [rounds, clusters, 2], the problem and the unit of it that each cluster
        computes in each round, -1 where it has nothing left; with 0 rounds, clusters search the
        list for their units.
      clusters: how many clusters walk the schedule; those of `schedule`, or fewer, or more.

    Returns:
      int32 [tiles, 12] with the columns of `ragged_noncontracting_tiles`, cluster by cluster, each
      in the order in which it computes: batch is the matrix within its problem, group the problem,
      and the number of rows that of the matrix. Tiles past the columns, and those of a matrix of no
      rows, are padding.
    """

def square_triangle_tiles(stacks: np.ndarray, upper: bool, blocks: int, tile: int) -> np.ndarray:
    """The tiles of one triangle of each of `stacks`, from the code that the FP64 kernels run.

    Args:
      stacks: int32 [stacks, 4]: matrices, their number of rows, mainloop steps of a tile off the
        diagonal and of one on it.
      upper: whether the upper triangle is computed.
      blocks: how many thread blocks take the tiles in turn.
      tile: rows and columns of a tile.

    Returns:
      int32 [tiles, 8]: round, block, stack, matrix, first row, first column, mainloop steps and
      whether the tile is on the diagonal, in the order of rounds and blocks.
    """

def square_product_tiles(products: np.ndarray, blocks: int, tile: int) -> np.ndarray:
    """The tiles of a list of products, from the code that the FP64 kernels run.

    Args:
      products: int32 [products, 3]: rows and columns of the result, mainloop steps of a tile.
      blocks: how many thread blocks take the tiles in turn.
      tile: rows and columns of a tile.

    Returns:
      int32 [tiles, 6]: round, block, product, first row, first column and mainloop steps, in the
      order of rounds and blocks.
    """

def rank_k_gains_by_halves(
    matrices: int,
    n: int,
    steps: int,
    upper: bool,
    clusters: int,
    tile_m: int,
    tile_n: int,
    cluster: int,
) -> bool:
    """Whether so many clusters are done sooner if narrow tiles come in halves.

    Args:
      matrices, n, steps: how many results there are, their rows, and mainloop steps of a tile.
      upper: whether the upper triangle is computed.
      clusters: how many clusters take the units of work, each the next one when it is free.
    """

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
      stacks: int32 [stacks, 5]: matrices, their number of rows, mainloop steps of a tile, and of a
        narrow tile on the diagonal; whether both CTAs of a cluster take one narrow tile, half of
        its steps each.
      upper: whether the upper triangle is computed.
      clusters: how many clusters take the units of work, each the next one when it is free.

    Returns:
      int32 [tiles, 12] with the columns of `ragged_noncontracting_tiles`: batch is the matrix
      within its stack, group the stack, and the number of rows that of the matrix. A tile whose
      first row is past that is padding.
    """
