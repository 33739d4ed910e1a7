"""Activations as the kernels know them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_grouped_gemm._src.activations import Activation

SIGMOID, RELU = 0, 1


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """hidden = act(gate) (up + shift) of one of two families, named as the kernels' attributes are.

    SIGMOID: act = g sigmoid(alpha g (1 + cubic g^2)), gate cut at `limit` from above and up on both
    sides. RELU: act = max(g, 0)^power.
    """

    activation: int
    alpha: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    shift: float = 0.0
    power: float = 1.0

    @classmethod
    def of(cls, activation: Activation) -> Epilogue | None:
        """That of `activation`, None if no kernel has it."""
        clipped = dict(
            limit=math.inf if activation.limit is None else activation.limit,
            shift=activation.up_offset,
        )
        match activation.function:
            case "silu":
                return cls(SIGMOID, alpha=activation.alpha, **clipped)
            case "gelu_tanh":
                # (1 + tanh x) / 2 = sigmoid(2 x)
                return cls(SIGMOID, alpha=math.sqrt(8 / math.pi), cubic=0.044715, **clipped)
            case "relu" | "relu2" if activation.limit is None and not activation.up_offset:
                return cls(RELU, power=2.0 if activation.function == "relu2" else 1.0)
        return None

    def attributes(self) -> dict[str, np.generic]:
        """Those of a custom call."""
        values = dataclasses.asdict(self)
        return {"activation": np.int32(values.pop("activation"))} | {
            name: np.float32(value) for name, value in values.items()
        }
