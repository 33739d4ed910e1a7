"""The device that a plan is made for."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """What a plan depends on beside the operation: the size of the chip.

    Attributes:
      multiprocessors: how many it has.
    """

    multiprocessors: int = 132

    def __post_init__(self) -> None:
        if self.multiprocessors < 1:
            raise ValueError(f"multiprocessors must be positive, got {self.multiprocessors}")

    @classmethod
    def of(cls, device: Any) -> Target:
        """Describes a `jax.Device`, which may be one that is described only, to compile for it."""
        count = getattr(device, "core_count", None)
        return cls(count) if count else H200


H200 = Target()
"""An H100 SXM and a GH200 have as many multiprocessors."""
