"""Activations as the kernels know them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_grouped_gemm._src.activations import Activation

FUNCTIONS = ("silu", "gelu", "relu", "relu2")
"""Functions in the order of the kernels' numbers. "silu" also stands for "gelu_tanh", because both
multiply the gate by a sigmoid."""


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The parameters of hidden = function(g) (up + shift), named like the kernels' attributes.

    g is gate, clipped from above at `limit`; up is first clipped on both sides. `function` is the
    index in `FUNCTIONS` of g sigmoid(alpha g (1 + cubic g^2)), gelu, relu or the square of relu.
    """

    alpha: float
    cubic: float
    limit: float
    shift: float
    function: int = 0

    @classmethod
    def of(cls, activation: Activation) -> Epilogue | None:
        """Returns the epilogue with `activation`, or None if no kernel has it."""
        if activation.limit_after:
            return None
        limit = math.inf if activation.limit is None else activation.limit
        match activation.function:
            case "silu":
                return cls(activation.alpha, 0.0, limit, activation.up_offset)
            case "gelu_tanh":
                # (1 + tanh x) / 2 = sigmoid(2 x)
                return cls(math.sqrt(8 / math.pi), 0.044715, limit, activation.up_offset)
            case str(name) if name in FUNCTIONS:
                return cls(1.0, 0.0, limit, activation.up_offset, FUNCTIONS.index(name))
        return None

    @property
    def is_sigmoid(self) -> bool:
        """Whether the function is a gate times its sigmoid, which all kernels have."""
        return self.function == 0

    def attributes(self) -> dict[str, np.float32]:
        """Returns the attributes of a custom call, without the function."""
        values = dataclasses.asdict(self)
        return {name: np.float32(value) for name, value in values.items() if name != "function"}
