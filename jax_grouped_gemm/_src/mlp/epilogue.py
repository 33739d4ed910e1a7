"""Activations as the kernels know them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_grouped_gemm._src.activations import Activation


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """hidden = g sigmoid(alpha g (1 + cubic g^2)) (up + shift), named as the kernels' attributes.

    Before that, gate is cut at `limit` from above, to g, and up on both sides.
    """

    alpha: float
    cubic: float
    limit: float
    shift: float

    @classmethod
    def of(cls, activation: Activation) -> Epilogue | None:
        """The epilogue with `activation`, None if no kernel has it."""
        limit = math.inf if activation.limit is None else activation.limit
        match activation.function:
            case "silu":
                return cls(activation.alpha, 0.0, limit, activation.up_offset)
            case "gelu_tanh":
                # (1 + tanh x) / 2 = sigmoid(2 x)
                return cls(math.sqrt(8 / math.pi), 0.044715, limit, activation.up_offset)
        return None

    def attributes(self) -> dict[str, np.float32]:
        """The attributes of a custom call."""
        return {name: np.float32(value) for name, value in dataclasses.asdict(self).items()}
