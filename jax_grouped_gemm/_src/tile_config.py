"""Configurations of the compiled kernels."""

from __future__ import annotations

import dataclasses

WGMMA_ROWS = 64  # of one instruction


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One compiled kernel configuration.

    Attributes:
      tile_m: rows of the result that a thread block computes at a time.
      tile_n: columns of the result that a thread block computes at a time.
      cluster: number of thread blocks that share operand tiles.
      stream_k: whether the last wave of tiles is cut along K, see `_src.ragged.schedules`.
    """

    tile_m: int
    tile_n: int
    cluster: int
    stream_k: bool = False

    @property
    def transposed(self) -> bool:
        """Whether rows and columns change places, in kernels for groups of few rows."""
        return self.tile_m <= WGMMA_ROWS

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
"""What every ragged product can be computed in."""
