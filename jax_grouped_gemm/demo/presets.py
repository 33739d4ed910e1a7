"""Sizes of the model and of its training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer whose feed-forward layers are mixtures of experts."""

    num_layers: int
    embed: int
    num_heads: int
    hidden: int  # width of one expert
    num_experts: int
    top_k: int
    dtype: Any  # dtype of the computation; parameters are float32


@dataclass(frozen=True)
class Preset:
    model: ModelConfig
    batch: int
    sequence_length: int
    steps: int
    compare_steps: int  # steps of every implementation with --compare
    learning_rate: float  # the peak of the schedule
    warmup: float  # share of the steps before the peak
    evaluation_batches: int

    def with_dtype(self, dtype: Any) -> Preset:
        """Returns the preset with a model that computes in `dtype`."""
        return replace(self, model=replace(self.model, dtype=dtype))

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence_length


PRESETS = {
    "cpu": Preset(
        model=ModelConfig(
            num_layers=2,
            embed=128,
            num_heads=4,
            hidden=128,
            num_experts=8,
            top_k=2,
            dtype=jnp.float32,
        ),
        batch=8,
        sequence_length=128,
        steps=100,
        compare_steps=60,
        learning_rate=3e-3,
        warmup=0.05,
        evaluation_batches=8,
    ),
    "h200": Preset(
        model=ModelConfig(
            num_layers=4,
            embed=2048,
            num_heads=16,
            hidden=1408,
            num_experts=32,
            top_k=4,
            dtype=jnp.bfloat16,
        ),
        batch=16,
        sequence_length=1024,
        steps=400,
        compare_steps=20,
        # With a steeper warm-up, an FP8 run and a bfloat16 run of the same seed end with losses
        # several per cent apart, and either loss may be the smaller one.
        learning_rate=2e-4,
        warmup=0.25,
        evaluation_batches=4,
    ),
}
