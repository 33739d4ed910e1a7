"""What the problems of products and of updates have in common."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ListProblem(Protocol):
    """Static description of what one call on lists of matrices computes."""

    @property
    def dtype(self) -> np.dtype:
        """Element type of the factors."""

    @property
    def result_dtype(self) -> np.dtype:
        """Element type of the results."""
