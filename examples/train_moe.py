"""A MoE transformer that trains on text, with gradient accumulation, FP8 and checkpoints.

python -m examples.train_moe --steps 20 --microbatches 2 --checkpoints /tmp/run
python -m examples.train_moe --steps 40 --microbatches 2 --checkpoints /tmp/run    # resumes at 20
python -m examples.train_moe --preset h200 --recipe fp8                            # on a GPU
python -m examples.train_moe --preset h200 --devices 4                             # on four
python -m examples.train_moe --preset h200 --devices 4 --split experts

With `--devices`, each of that many devices has a part of the batch. `--split` says what else it has
a part of: of nothing ("data"), so that parameters are whole on each; of every parameter ("fsdp"),
which is gathered where it is used; or of the experts ("experts"), to which tokens are sent. The
first two are `jax.jit` of the same program: only the arrays that it gets are split. Checkpoints are
the same, so that a run may resume on another number and with another split.

With `--recipe fp8` the optimiser writes the experts' FP8 weights in the pass that updates them.
They serve all microbatches of the next step, and are left out of checkpoints. With `--split
experts` layers quantise weights themselves.

The text is the Python sources of the standard library, byte by byte. On a GPU of compute
capability 9.0 the experts' matmuls run the kernels; elsewhere, the reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe, optim
from jax_grouped_gemm.demo.data import batches, load_corpus
from jax_grouped_gemm.flax.nnx import MoE, Quantized, quantize, quantized_state

DEVICES = "device"  # the axis of the mesh
LOAD_BALANCING, ROUTER_Z = 1e-2, 1e-3  # weights of the router's losses


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a batch."""

    layers: int
    embed: int
    heads: int
    hidden: int  # of an expert
    experts: int
    top_k: int
    batch: int
    length: int
    dtype: Any


PRESETS = {
    "cpu": Config(1, 64, 2, 64, 4, 2, 8, 64, jnp.float32),
    "h200": Config(4, 2048, 16, 1408, 32, 4, 16, 1024, jnp.bfloat16),
}


class Block(nnx.Module):
    """Causal attention, then a mixture of experts: [batch, length, embed] -> same."""

    def __init__(
        self, config: Config, recipe: jgg.Recipe | None, expert_axis: str | None, rngs: nnx.Rngs
    ):
        self.heads = config.heads
        dense = dict(use_bias=False, dtype=config.dtype, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(config.embed, dtype=config.dtype, rngs=rngs)
        self.qkv = nnx.Linear(config.embed, 3 * config.embed, **dense)
        self.out = nnx.Linear(config.embed, config.embed, **dense)
        self.moe_norm = nnx.RMSNorm(config.embed, dtype=config.dtype, rngs=rngs)
        self.moe = MoE(
            config.embed,
            config.hidden,
            config.experts,
            config.top_k,
            dtype=config.dtype,
            recipe=recipe,
            expert_axis=expert_axis,
            rngs=rngs,
        )

    def __call__(self, x):
        qkv = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3 * self.heads, -1)
        y = jax.nn.dot_product_attention(*jnp.split(qkv, 3, axis=2), is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        y, losses = self.moe(self.moe_norm(x))
        return x + y, losses


class Transformer(nnx.Module):
    """Logits of the next byte: [batch, length] -> [batch, length, 256], and router losses."""

    def __init__(
        self,
        config: Config,
        recipe: jgg.Recipe | None = None,
        expert_axis: str | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        options = dict(dtype=config.dtype, rngs=rngs)
        self.embed = nnx.Embed(256, config.embed, **options)
        self.positions = nnx.Embed(config.length, config.embed, **options)
        blocks = [Block(config, recipe, expert_axis, rngs) for _ in range(config.layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(config.embed, **options)
        self.head = nnx.Linear(config.embed, 256, **options)

    def __call__(self, text):
        x = self.embed(text) + self.positions(jnp.arange(text.shape[1]))
        router = 0.0
        for block in self.blocks:
            x, losses = block(x)
            router += LOAD_BALANCING * losses.load_balancing + ROUTER_Z * losses.router_z
        return self.head(self.norm(x)).astype(jnp.float32), router


def make_step(graph: nnx.GraphDef, optimizer: optim.Optimizer, **options: Any) -> Callable:
    """(params, optimizer state, windows [microbatches, batch, length + 1]) -> the same and a loss.

    Gradients of the microbatches are added up in float32, in the parameters' own layout, by a
    scan: only one microbatch's activations are alive at a time. `options` are those of `jax.jit`.
    """

    def loss_fn(params, quantized, window):
        model = nnx.merge(graph, params, quantized_state(quantized))
        logits, router = model(window[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
        return losses.mean() + router, losses.mean()

    def step(params, state, windows):
        def add(so_far, window):
            gradients, loss = jax.grad(loss_fn, has_aux=True)(
                optimizer.compute_params(params), state.quantized, window
            )
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), so_far, gradients), loss

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        gradients, losses = jax.lax.scan(add, zeros, windows)
        params, state = optimizer.step(params, gradients, state, factor=1 / windows.shape[0])
        return params, state, losses.mean()

    return jax.jit(step, donate_argnums=(0, 1), **options)


def train(options: argparse.Namespace, mesh: Mesh) -> list[float]:
    """Returns the loss of every step that this run made."""
    config = PRESETS[options.preset]
    recipe = jgg.Recipe() if options.recipe == "fp8" else None
    expert_axis = DEVICES if options.devices > 1 and options.split == "experts" else None
    model = Transformer(config, recipe, expert_axis, rngs=nnx.Rngs(options.seed))
    quantize(model)  # so that the graph has a place for FP8 weights
    graph, params, quantized = nnx.split(model, nnx.Param, Quantized)
    optimizer = optim.adamw(
        options.learning_rate,
        max_norm=1.0,
        select=optim.experts if quantized else lambda path, leaf: False,
    )
    params = jax.device_put(params, shardings(params, mesh, options.split))
    state = jax.jit(optimizer.init)(params)
    print(jgg.unavailable_reason() or "the kernels run on this machine")

    done = 0
    if options.checkpoints is not None:
        checkpoints = ocp.CheckpointManager(options.checkpoints.absolute())
        done = checkpoints.latest_step() or 0
    if done:
        saved = params, state._replace(quantized=None)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, saved)
        params, state = checkpoints.restore(done, args=ocp.args.StandardRestore(like))
        state = state._replace(quantized=jax.jit(optimizer.quantize)(params))
        print(f"resumed after {done} steps")

    of_split = (
        moe.expert_parallel_compiler_options if expert_axis else moe.data_parallel_compiler_options
    )
    step = make_step(graph, optimizer, compiler_options=of_split(mesh))
    losses = []
    for number, windows in enumerate(text(config, options, done), start=done + 1):
        windows = jax.device_put(windows, NamedSharding(mesh, P(None, DEVICES)))
        params, state, loss = step(params, state, windows)
        losses.append(float(loss))
        if number % options.report_every == 0 or number == options.steps:
            print(f"step {number}: {loss:.3f} nats a byte")
    if options.checkpoints is not None and losses:
        saved = params, state._replace(quantized=None)
        checkpoints.save(options.steps, args=ocp.args.StandardSave(saved))
        checkpoints.close()
    return losses


def shardings(params: nnx.State, mesh: Mesh, split: str) -> nnx.State:
    """Of the parameters: along the first axis that devices divide, that of experts, or whole."""

    def of(param: jax.Array, names: P) -> NamedSharding:
        divides = [size % mesh.size == 0 for size in param.shape]
        chosen = {
            "data": None,
            "fsdp": divides.index(True) if any(divides) else None,
            "experts": names.index("exp") if "exp" in names else None,
        }[split]
        return NamedSharding(mesh, P() if chosen is None else P(*[None] * chosen, DEVICES))

    return jax.tree.map(of, params, nnx.get_partition_spec(params))


def text(config: Config, options: argparse.Namespace, done: int) -> Iterator[np.ndarray]:
    """Windows [microbatches, batch, length + 1] of the steps that are left, the same in any run."""
    stream = batches(load_corpus().train, config.batch, config.length, options.seed)
    for number in range(options.steps):
        windows = np.stack(list(islice(stream, options.microbatches)))
        if number >= done:
            yield windows.astype(np.int32)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--recipe", choices=["none", "fp8"], default="none")
    parser.add_argument("--steps", type=int, default=40, help="in all, those resumed from included")
    parser.add_argument("--microbatches", type=int, default=2, help="a step")
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from and to save in")
    parser.add_argument("--devices", type=int, default=1, help="that divide the batch")
    parser.add_argument("--split", choices=["data", "fsdp", "experts"], default="data")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--report-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    mesh = jax.make_mesh((options.devices,), (DEVICES,), (AxisType.Auto,))
    with jax.set_mesh(mesh):
        return train(options, mesh)


if __name__ == "__main__":
    main()
