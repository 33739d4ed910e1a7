"""A decoder-only MoE transformer with the geometry of Qwen3-30B-A3B, in Flax NNX.

`examples/pretrain_moe.py` trains the `Transformer`. Shapes: B sequences, S tokens of a sequence,
D embed, V vocabulary, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jax_grouped_gemm as jgg
from jax_grouped_gemm.demo.model import rotate, rotations
from jax_grouped_gemm.flax.nnx import MoE

LOAD_BALANCING, ROUTER_Z = 1e-2, 1e-3  # weights of the router's losses
ROTARY_BASE = 1e6


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a batch."""

    layers: int
    embed: int
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_dim: int
    experts: int
    hidden: int  # of an expert
    top_k: int
    vocabulary: int
    batch: int  # sequences of a device and step
    length: int  # tokens of a sequence
    learning_rate: float
    loss_chunks: int  # parts of a sequence whose logits are in memory at a time
    dtype: Any  # of the computation
    scan: bool  # whether layers are one compiled loop
    balanced: bool = False  # whether tokens choose experts at random, so that loads are even

    @property
    def active_parameters(self) -> int:
        """Elements of the matrices that multiply a token, except embedding and head."""
        of_heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        of_experts = self.experts + 3 * self.top_k * self.hidden
        return self.layers * self.embed * (of_heads + of_experts)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward, without embedding, head and rematerialisation.

        Each active parameter takes 6 FLOPs. A layer of attention takes 12 S heads head_dim FLOPs,
        which the causal mask halves.
        """
        attention = 6 * self.layers * self.length * self.heads * self.head_dim
        return 6 * self.active_parameters + attention


QWEN3 = dict(embed=2048, heads=32, kv_heads=4, head_dim=128, experts=128, hidden=768, top_k=8)
TINY = dict(embed=64, heads=4, kv_heads=2, head_dim=16, experts=4, hidden=64, top_k=2)

PRESETS = {
    # Runs in seconds on a CPU.
    "tiny": Config(
        **TINY,
        layers=2,
        vocabulary=256,
        batch=8,
        length=64,
        learning_rate=1e-3,
        loss_chunks=2,
        dtype=jnp.float32,
        scan=True,
    ),
    # 6 of the 48 layers fit a GPU of 80 GB, with 16 bytes for each parameter, and activations.
    "qwen3-30b-a3b": Config(
        **QWEN3,
        layers=6,
        vocabulary=32768,
        batch=8,
        length=4096,
        learning_rate=3e-4,
        loss_chunks=4,
        dtype=jnp.bfloat16,
        scan=False,
    ),
}


NORMALIZED, ROTATED = "normalized", "rotated"  # names of arrays that `REMAT` may keep


def _is_attention_or_top_k(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == "top_k" or primitive.name.startswith("dot_product_attention_fwd")


def _any_of(*policies: Callable) -> Callable:
    return functools.reduce(jax.checkpoint_policies.save_from_both_policies, policies)


_matmuls = _any_of(
    jgg.checkpoint_policies.dots_and_grouped_matmuls_saveable, _is_attention_or_top_k
)
REMAT = {
    # Keep results of matmuls, attention and the router, and 16-bit results of norms.
    "norms": _any_of(_matmuls, jax.checkpoint_policies.save_only_these_names(NORMALIZED, ROTATED)),
    # Recompute norms, rotations and activations.
    "matmuls": _matmuls,
    # Keep results of the experts' matmuls, which take most of the time.
    "experts": jgg.checkpoint_policies.grouped_matmuls_saveable,
    # Keep only the input of each layer.
    "layers": jax.checkpoint_policies.nothing_saveable,
}
"""Policies of `jax.checkpoint` for a layer, from the fastest to the one with least memory."""


class Attention(nnx.Module):
    """Causal grouped-query attention with normalised queries and keys, for x [B, S, D]."""

    def __init__(self, config: Config, param_dtype: Any, rngs: nnx.Rngs):
        self.config = config
        of = dict(dtype=config.dtype, param_dtype=param_dtype, rngs=rngs)
        heads = config.heads + 2 * config.kv_heads
        self.qkv = nnx.Linear(config.embed, heads * config.head_dim, use_bias=False, **of)
        self.out = nnx.Linear(config.heads * config.head_dim, config.embed, use_bias=False, **of)
        self.query_norm = nnx.RMSNorm(config.head_dim, **of)
        self.key_norm = nnx.RMSNorm(config.head_dim, **of)

    def __call__(self, x: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        qkv = self.qkv(x).reshape(*x.shape[:2], -1, self.config.head_dim)
        query, key, value = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
        query = checkpoint_name(rotate(self.query_norm(query), turns), ROTATED)
        key = checkpoint_name(rotate(self.key_norm(key), turns), ROTATED)
        on_gpu = jax.default_backend() == "gpu" and jnp.dtype(self.config.dtype).itemsize == 2
        y = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation="cudnn" if on_gpu else "xla"
        )
        return self.out(y.reshape(*x.shape[:2], -1))


class Router(nnx.Linear):
    """A router that returns float32 logits, which `nnx.Linear` would round to the dtype of x.

    If `balanced`, the logits are random, but gradients are those of the real logits. All experts
    then have equally many tokens, so that a step takes as long as with a trained router.
    """

    def __init__(self, *sizes: int, balanced: bool, **options: Any):
        super().__init__(*sizes, use_bias=False, **options)
        self.balanced = balanced

    def __call__(self, x: jax.Array) -> jax.Array:
        logits = float32_product(x, self.kernel[...].astype(x.dtype))
        if not self.balanced:
            return logits
        noise = jax.random.uniform(jax.random.key(0), logits.shape)
        return logits + jax.lax.stop_gradient(noise - logits)


@jax.custom_vjp
def float32_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns x [B, S, D] @ kernel [D, E] in float32. Gradients multiply in the dtype of x.

    JAX's own gradient would multiply in float32, which takes ten times as long on a GPU.
    """
    return jnp.einsum("bsd,de->bse", x, kernel, preferred_element_type=jnp.float32)


def _float32_product_backward(kept, cotangent):
    x, kernel = kept
    cotangent = cotangent.astype(x.dtype)
    dx = jnp.einsum("bse,de->bsd", cotangent, kernel)
    return dx, jnp.einsum("bsd,bse->de", x, cotangent)


float32_product.defvjp(
    lambda *operands: (float32_product(*operands), operands), _float32_product_backward
)


class Block(nnx.Module):
    """Attention, then a mixture of experts. A call returns [B, S, D] and the router's loss."""

    def __init__(self, config: Config, param_dtype: Any, rngs: nnx.Rngs, **of_experts: Any):
        of = dict(dtype=config.dtype, param_dtype=param_dtype, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(config.embed, **of)
        self.attention = Attention(config, param_dtype, rngs)
        self.moe_norm = nnx.RMSNorm(config.embed, **of)
        self.moe = MoE(
            config.embed, config.hidden, config.experts, config.top_k, **of, **of_experts
        )
        self.moe.gate = Router(config.embed, config.experts, balanced=config.balanced, **of)

    def __call__(self, x: jax.Array, turns: tuple[jax.Array, jax.Array]):
        normalized = checkpoint_name(self.attention_norm(x), NORMALIZED)
        x = x + self.attention(normalized, turns)
        y, losses = self.moe(checkpoint_name(self.moe_norm(x), NORMALIZED))
        return x + y, LOAD_BALANCING * losses.load_balancing + ROUTER_Z * losses.router_z


class Transformer(nnx.Module):
    """The model. With `config.scan`, the parameters of all blocks are stacked [L, ...].

    Args:
      config: sizes.
      remat: a name in `REMAT`.
      param_dtype: dtype of all parameters except the embedding.
      rngs: random numbers for the parameters.
      **of_experts: options of `MoE`, such as `recipe` and `expert_axis`.
    """

    def __init__(
        self,
        config: Config,
        *,
        remat: str = "norms",
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **of_experts: Any,
    ):
        self.config = config
        self.remat = remat
        normal = jax.nn.initializers.normal(0.02)
        self.embedding = nnx.Param(normal(rngs.params(), (config.vocabulary, config.embed)))

        def block(key: jax.Array) -> Block:
            return Block(config, param_dtype, nnx.Rngs(key), **of_experts)

        keys = jax.random.split(rngs.params(), config.layers)
        self.blocks = stacked(block, keys) if config.scan else nnx.List(map(block, keys))
        self.norm = nnx.RMSNorm(
            config.embed, dtype=config.dtype, param_dtype=param_dtype, rngs=rngs
        )
        shape = config.embed, config.vocabulary
        self.head = nnx.Param(normal(rngs.params(), shape, param_dtype))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the input of the head [B, S, D] for tokens [B, S], and the router's loss."""
        config = self.config
        # Take rows before casting, so that the gradients of a token are summed in float32.
        x = self.embedding[...][tokens].astype(config.dtype)
        turns = rotations(config.length, config.head_dim, ROTARY_BASE)
        if config.scan:
            layer, states = self._layer(self.blocks)
            x, losses = jax.lax.scan(lambda x, state: layer(state, x, turns), x, states)
            return self.norm(x), losses.sum()
        router = jnp.zeros(())
        for block in self.blocks:
            layer, state = self._layer(block)
            x, loss = layer(state, x, turns)
            router += loss
        return self.norm(x), router

    def _layer(self, block: Block) -> tuple[Callable, nnx.State]:
        """Returns a rematerialised function of (parameters, x, rotations), and the parameters."""
        graph, state = nnx.split(block)
        return jax.checkpoint(
            lambda state, x, turns: nnx.merge(graph, state)(x, turns), policy=REMAT[self.remat]
        ), state

    def loss(self, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the cross-entropy of windows [B, S + 1], with the router's loss and without."""
        x, router = self(windows[:, :-1])
        kernel = self.head[...].astype(self.config.dtype)
        loss = cross_entropy(self.config.loss_chunks, x, kernel, windows[:, 1:])
        return loss + router, loss


def stacked(make: Callable[[jax.Array], nnx.Module], keys: jax.Array) -> Any:
    """Returns a module whose parameters are the stacked parameters of `make(key)` for each key."""
    return nnx.merge(*jax.vmap(lambda key: nnx.split(make(key)))(keys))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def cross_entropy(chunks: int, x: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the logits x @ kernel, in float32.

    Only the logits of one chunk of each sequence are in memory at a time. The gradient of a chunk
    is computed right after its loss, because both need the same logits.

    Args:
      chunks: number of chunks, a divisor of S.
      x: [B, S, D].
      kernel: [D, V], in the dtype of x.
      targets: [B, S].
    """

    def of_chunk(x, targets):
        return _loss_of_chunk(x, kernel, targets)[0]

    return _over_chunks(of_chunk, chunks, x, targets).sum() / targets.size


def _loss_of_chunk(x, kernel, targets):
    """Returns the sum of the losses, the logits, and the logsumexp of the logits."""
    logits = jnp.einsum("bsd,dv->bsv", x, kernel, preferred_element_type=jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return (normalizer - chosen).sum(), logits, normalizer


def _cross_entropy_forward(chunks, x, kernel, targets):
    def of_chunk(x, targets):
        loss, logits, normalizer = _loss_of_chunk(x, kernel, targets)
        is_target = jnp.arange(kernel.shape[1]) == targets[..., None]
        dlogits = (jnp.exp(logits - normalizer) - is_target).astype(x.dtype)
        dx = jnp.einsum("bsv,dv->bsd", dlogits, kernel)
        return loss, dx, jnp.einsum("bsd,bsv->dv", x, dlogits)

    losses, dx, dkernel = _over_chunks(of_chunk, chunks, x, targets)
    dx = jnp.swapaxes(dx, 0, 1).reshape(x.shape)
    return losses.sum() / targets.size, (dx, dkernel.sum(0), targets.size)


def _over_chunks(function, chunks, *arrays):
    def cut(a):
        return jnp.swapaxes(a.reshape(a.shape[0], chunks, -1, *a.shape[2:]), 0, 1)

    return jax.lax.map(lambda chunk: function(*chunk), tuple(map(cut, arrays)))


def _cross_entropy_backward(chunks, kept, cotangent):
    dx, dkernel, count = kept
    factor = cotangent / count
    return (dx * factor).astype(dx.dtype), (dkernel * factor).astype(dkernel.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
