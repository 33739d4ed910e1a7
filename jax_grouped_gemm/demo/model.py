"""A decoder-only byte-level language model: causal attention and mixture-of-experts layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.rows.routing import count_tokens
from jax_grouped_gemm.demo.presets import ModelConfig
from jax_grouped_gemm.flax.nnx import MoE
from jax_grouped_gemm.moe import AuxiliaryLosses, Implementation, route

NUM_BYTES = 256
EXPERT_AXIS = "expert"  # the mesh axis along which experts and tokens are divided


class Attention(nnx.Module):
    """Causal multi-head self-attention with rotary positions: [batch, length, embed] -> same."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        options = dict(use_bias=False, dtype=config.dtype, rngs=rngs)
        self.qkv = nnx.Linear(config.embed, 3 * config.embed, **options)
        self.out = nnx.Linear(config.embed, config.embed, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(x).reshape(*x.shape[:2], 3 * self.num_heads, -1)
        query, key, value = jnp.split(heads, 3, axis=2)
        turns = rotations(x.shape[1], query.shape[3])
        query, key = rotate(query, turns), rotate(key, turns)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.reshape(x.shape))


class Block(nnx.Module):
    """Attention, then a mixture of experts, each with a pre-norm and a residual connection."""

    def __init__(
        self,
        config: ModelConfig,
        implementation: Implementation,
        recipe: Recipe | None,
        mesh: jax.sharding.Mesh | None,
        *,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = nnx.RMSNorm(config.embed, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.embed, dtype=config.dtype, rngs=rngs)
        self.moe = MoE(
            in_features=config.embed,
            hidden_features=config.hidden,
            num_experts=config.num_experts,
            top_k=config.top_k,
            dtype=config.dtype,
            implementation=implementation,
            recipe=recipe,
            mesh=mesh,
            expert_axis=None if mesh is None else EXPERT_AXIS,
            rngs=rngs,
        )

    def attend(self, x: jax.Array) -> jax.Array:
        """Applies the first half of the block, which is the attention."""
        return x + self.attention(self.attention_norm(x))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, AuxiliaryLosses]:
        x = self.attend(x)
        y, losses = self.moe(self.moe_norm(x))
        return x + y, losses


class LanguageModel(nnx.Module):
    """Maps bytes [batch, length] to float32 logits [batch, length, 256] of the next bytes."""

    def __init__(
        self,
        config: ModelConfig,
        implementation: Implementation = None,
        recipe: Recipe | None = None,
        mesh: jax.sharding.Mesh | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Embed(NUM_BYTES, config.embed, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List(
            [
                Block(config, implementation, recipe, mesh, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = nnx.RMSNorm(config.embed, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(
            config.embed, NUM_BYTES, use_bias=False, dtype=config.dtype, rngs=rngs
        )

    def __call__(self, text: jax.Array) -> tuple[jax.Array, AuxiliaryLosses]:
        """Returns the logits and the router losses, averaged over the layers."""
        x = self.embed(text)
        losses = []
        for block in self.blocks:
            x, block_losses = block(x)
            losses.append(block_losses)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return logits, jax.tree.map(lambda *values: sum(values) / len(values), *losses)

    def choices(self, text: jax.Array) -> jax.Array:
        """Returns how many tokens choose each expert: int32 [layers, experts]."""
        x, counts = self.embed(text), []
        for block in self.blocks:
            x = block.attend(x)
            tokens = block.moe_norm(x)
            counts.append(count_tokens(route(block.moe.gate(tokens), block.moe.top_k)))
            x = x + block.moe(tokens)[0]
        return jnp.stack(counts)


def rotations(length: int, head_dim: int, base: float = 1e4) -> tuple[jax.Array, jax.Array]:
    """Returns two factors for `rotate`, [length, 1, 2, head_dim / 2]: the cosine and the sine."""
    half = head_dim // 2
    frequency = base ** (-jnp.arange(half) / half)
    angle = jnp.arange(length)[:, None, None] * frequency
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cosine, cosine], axis=2), jnp.stack([-sine, sine], axis=2)


def rotate(x: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies rotary position embedding (arXiv:2104.09864) to [batch, length, heads, head_dim]."""
    cosine, sine = turns
    # Flip instead of cutting into halves, so that XLA fuses the rotation with its neighbours.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    rotated = halves * cosine + jnp.flip(halves, axis=-2) * sine
    return rotated.reshape(x.shape).astype(x.dtype)
