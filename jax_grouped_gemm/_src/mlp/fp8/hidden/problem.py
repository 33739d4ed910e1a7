"""The problem of a plan: one elementwise step of an MLP in FP8."""

from __future__ import annotations

import dataclasses

from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenLayer


@dataclasses.dataclass(frozen=True)
class HiddenProblem:
    """Static description of one elementwise step: the name of its operation, its layer, and
    whether its results are `JoinedGradients`."""

    op: str
    layer: HiddenLayer
    joined: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.layer}"
