"""Configurations of the compiled kernels, and those of the ragged products of one dtype."""

from __future__ import annotations

import dataclasses

NUM_SMS = 132  # of an H200, and of an H100 SXM
WGMMA_ROWS = 64  # of one instruction


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One compiled kernel configuration.

    Attributes:
      tile_m: rows of the result that a thread block computes at a time.
      tile_n: columns of the result that a thread block computes at a time.
      cluster: number of thread blocks that share operand tiles.
      stream_k: whether the last wave of tiles is cut along K, see `_src.ragged.stream_k`.
    """

    tile_m: int
    tile_n: int
    cluster: int
    stream_k: bool = False

    @property
    def transposed(self) -> bool:
        """Whether rows and columns change places, in kernels for groups of few rows."""
        return self.tile_m <= WGMMA_ROWS

    def places(self, blocks: int = 1) -> int:
        """Thread blocks that the device runs at a time, with so many to a multiprocessor."""
        return NUM_SMS // self.cluster * self.cluster * blocks

    def sizes(self) -> dict[str, int]:
        """The numbers by name, as every handler takes them."""
        return dict(tile_m=self.tile_m, tile_n=self.tile_n, cluster=self.cluster)

    def __str__(self) -> str:
        words = [f"{self.tile_m}x{self.tile_n}", f"cluster {self.cluster}"]
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.default not in (dataclasses.MISSING, value):
                words.append(option.name.replace("_", "-") if value is True else str(value))
        return ", ".join(words)


DEFAULT_TILE = TileConfig(tile_m=128, tile_n=256, cluster=2)

TILE_CONFIGS = (DEFAULT_TILE,)
"""Of the ragged products of bfloat16 and float16."""

FLOAT32_TILE_CONFIGS = (DEFAULT_TILE,)
"""Of the ragged products of float32."""

FLOAT32_FEW_ROWS_TILE = TileConfig(tile_m=64, tile_n=128, cluster=1)
"""Of non-contracting products of float32 with lhs [m, k] and few rows a group."""

PINGPONG_TILE_CONFIGS = (TileConfig(tile_m=128, tile_n=192, cluster=2),)
"""Of contracting products of bfloat16 or float16, lhs [m, k] and rhs [m, n], into float32, see
`_src.ragged.pingpong`."""

CUT_TILE = DEFAULT_TILE
"""What contracting products of unequal groups are computed in, see `_src.ragged.skew`."""

STREAM_K_TILE_CONFIGS = (TileConfig(tile_m=128, tile_n=256, cluster=2, stream_k=True),)
"""Of non-contracting products of bfloat16 or float16 with lhs [m, k]."""
