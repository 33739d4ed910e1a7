"""Pretrains a MoE transformer with the geometry of Qwen3-30B-A3B, and reports its speed.

python -m examples.pretrain_moe --steps 20 --checkpoints /tmp/run
python -m examples.pretrain_moe --steps 40 --checkpoints /tmp/run        # resumes at 20
python -m examples.pretrain_moe --preset qwen3-30b-a3b                   # on a GPU
python -m examples.pretrain_moe --preset qwen3-30b-a3b --recipe blockwise    # in FP8
python -m examples.pretrain_moe --preset qwen3-30b-a3b --devices 8 --expert-parallel 8 --layers 48

Devices form a mesh ("data", "expert") of `--devices / --expert-parallel` by `--expert-parallel`.
Each device has a part of the batch. Experts are divided along "expert", and tokens are sent to
their experts. With `--fsdp`, parameters are also divided along "data", and gathered for each use.

AdamW and Muon keep float32 weights. In bfloat16, each step writes the 16-bit weights of the next
step. With `--recipe blockwise` it writes the experts' FP8 weights instead.

A checkpoint has the weights, the optimiser's state, the step, and the number of sequences that were
read. So a run can resume on any number of devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jax_grouped_gemm as jgg
from examples.moe_model import PRESETS, REMAT, Config, Transformer
from examples.report import Report, write_curve
from jax_grouped_gemm import moe, optim
from jax_grouped_gemm.demo.data import batches, load_corpus
from jax_grouped_gemm.demo.train import ADAMW, MAX_NORM, first_interrupt_noted, shortage
from jax_grouped_gemm.flax.nnx import Quantized, quantize, quantized_state

DATA, EXPERT = "data", "expert"  # axes of the mesh
BATCH = P(None, (DATA, EXPERT))  # of windows [microbatches, sequences, length + 1]
WARMUP = 20  # steps; the learning rate is constant afterwards


def make_model(config: Config, options: argparse.Namespace) -> Transformer:
    """Returns the model that the options describe, with variables for FP8 weights."""
    of_experts = {}
    if options.recipe != "none":
        of_experts["recipe"] = jgg.Recipe(scaling=options.recipe)
    if options.stock:
        of_experts["implementation"] = jax.lax.ragged_dot
    if options.expert_parallel > 1:
        of_experts |= dict(expert_axis=EXPERT, token_axes=(DATA, EXPERT))
        of_experts |= dict(fsdp_axis=DATA) if options.fsdp else {}
    param_dtype = jnp.float32 if options.recipe != "none" else config.dtype
    model = Transformer(
        config,
        remat=options.remat,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(options.seed),
        **of_experts,
    )
    quantize(model)
    return model


def make_optimizer(
    config: Config, options: argparse.Namespace, params: nnx.State, quantizes: bool
) -> optim.Optimizer:
    """Returns AdamW or Muon, which with `quantizes` also writes the experts' FP8 weights."""

    def learning_rate(done: jax.Array) -> jax.Array:
        return config.learning_rate * jnp.minimum(1, (done + 1) / WARMUP)

    of = dict(max_norm=MAX_NORM, select=optim.experts if quantizes else lambda path, leaf: False)
    if options.optimizer == "adamw":
        return optim.adamw(learning_rate, **ADAMW, **of)
    muon = optim.muon(
        learning_rate,
        weight_decay=ADAMW["weight_decay"],
        consistent_rms=0.2,  # gives updates AdamW's scale, so that one learning rate fits both
        muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(_dimensions, params),
        shardings=jax.tree.map(lambda x: x.sharding, params) if options.devices > 1 else None,
    )
    return optim.quantized(muon, **of)


def _dimensions(keys: Any, leaf: jax.Array) -> optim.MuonDimensionNumbers | None:
    """Selects the layers' matrices except the router's for Muon, all other parameters for AdamW."""
    path = jax.tree_util.keystr(keys)
    is_matrix = "wi_" in path or "wo" in path or ("attention" in path and "kernel" in path)
    return optim.MuonDimensionNumbers() if is_matrix else None


def make_step(graph: nnx.GraphDef, optimizer: optim.Optimizer, **options: Any) -> Callable:
    """Returns a function of (params, state, windows [microbatches, B, S + 1]).

    It returns the new params and state, and the loss. A scan adds up gradients of several
    microbatches in float32, so that only one microbatch's activations are alive at a time.
    `options` are options of `jax.jit`.
    """

    def loss_fn(params, quantized, windows):
        return nnx.merge(graph, params, quantized_state(quantized)).loss(windows)

    def step(params, state, windows):
        def gradients_of(windows):
            of_compute = optimizer.compute_params(params)
            return jax.grad(loss_fn, has_aux=True)(of_compute, state.quantized, windows)

        def add(so_far, windows):
            gradients, loss = gradients_of(windows)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), so_far, gradients), loss

        gradients, loss = gradients_of(windows[0])
        if len(windows) > 1:
            gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
            gradients, losses = jax.lax.scan(add, gradients, windows[1:])
            loss = (loss + losses.sum()) / len(windows)
        params, state = optimizer.step(params, gradients, state, factor=1 / len(windows))
        return params, state, loss

    return jax.jit(step, donate_argnums=(0, 1), **options)


def shardings(params: nnx.State, mesh: Mesh, config: Config, fsdp: bool) -> nnx.State:
    """Returns shardings that divide experts along "expert". With `fsdp`, they also divide along
    "data" the embed dimension of experts, and the first divisible dimension of other parameters."""

    def of(keys: Any, param: jax.Array, names: P) -> NamedSharding:
        stacks = config.scan and "blocks" in jax.tree_util.keystr(keys)
        shape = param.shape[stacks:]
        names = (*(names or ()), *[None] * len(shape))[: len(shape)]
        axes = [EXPERT if name == "exp" else None for name in names]
        divides = [
            n % mesh.shape[DATA] == 0 and not axis for n, axis in zip(shape, axes, strict=True)
        ]
        if fsdp and any(divides):
            axes[names.index("embed") if "embed" in names else divides.index(True)] = DATA
        return NamedSharding(mesh, P(*[None] * stacks, *axes))

    specs = nnx.get_partition_spec(params)
    return jax.tree_util.tree_map_with_path(of, params, specs)


def windows_of(config: Config, options: argparse.Namespace, read: int) -> Iterator[np.ndarray]:
    """Yields windows [microbatches, B, S + 1] after `read` sequences, the same in every run."""
    if options.data is None:
        text = load_corpus().train
    elif options.data.suffix == ".npy":
        text = np.load(options.data, mmap_mode="r")
    else:
        text = np.fromfile(options.data, np.uint8)
    if len(text) <= config.length or (largest := int(text.max())) >= config.vocabulary:
        raise ValueError(
            f"--data must have more than {config.length} tokens below {config.vocabulary}, got "
            f"{len(text)} tokens" + (f" up to {largest}" if len(text) > config.length else "")
        )
    sequences = islice(batches(text, 1, config.length, options.seed), read, None)
    while True:
        batch = np.concatenate(list(islice(sequences, options.microbatches * options.batch)))
        yield batch.astype(np.int32).reshape(options.microbatches, options.batch, -1)


class Checkpoints:
    """Saves runs in a folder, and restores the last one; does nothing without a folder."""

    def __init__(self, folder: Path | None):
        self.manager = None if folder is None else ocp.CheckpointManager(folder.absolute())

    def save(self, step: int, params: nnx.State, state: optim.OptimizerState, read: int) -> None:
        """Saves a step without quantised weights, because float32 weights determine them."""
        if self.manager is not None and step not in self.manager.all_steps():
            saved = params, state._replace(quantized=None), np.asarray(read)
            self.manager.save(step, args=ocp.args.StandardSave(saved))

    def restore(self, optimizer: optim.Optimizer, params: nnx.State, state: optim.OptimizerState):
        """Returns (step, params, state, sequences read) of the last checkpoint, or of the start.

        If there is a checkpoint, it deletes the arrays of `params` and `state` to free memory.
        """
        done = self.manager and self.manager.latest_step()
        if not done:
            return 0, params, state, 0
        like = params, state._replace(quantized=None), np.asarray(0)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        for array in jax.tree.leaves((params, state)):
            array.delete()
        args = ocp.args.StandardRestore(shapes)
        params, state, read = self.manager.restore(done, args=args)
        state = state._replace(quantized=optimizer.quantize(params, state))
        print(f"resumed after {done} steps")
        return done, params, state, int(read)

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


def start(config: Config, options: argparse.Namespace, mesh: Mesh):
    """Returns the graph, the optimiser, the parameters, their shardings, and the first state."""

    def split() -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        return nnx.split(make_model(config, options), nnx.Param, Quantized)

    graph, shapes, quantized = jax.eval_shape(split)
    of_params = shardings(shapes, mesh, config, options.fsdp)
    params = jax.jit(lambda: split()[1], out_shardings=of_params)()
    optimizer = make_optimizer(config, options, params, quantizes=bool(quantized))
    # Initialise outside jit, so that moments have the shardings of their parameters.
    return graph, optimizer, params, of_params, optimizer.init(params)


def compiler_options(options: argparse.Namespace, mesh: Mesh) -> dict[str, str]:
    """Returns compiler options that let several GPUs communicate while they compute."""
    if options.devices == 1:
        return {}
    of_experts = moe.expert_parallel_compiler_options(mesh) if options.expert_parallel > 1 else {}
    return moe.data_parallel_compiler_options(mesh) | of_experts


def train(config: Config, options: argparse.Namespace, mesh: Mesh) -> list[float]:
    """Trains, and returns the loss of every step of this run."""
    print(jgg.unavailable_reason() or "the kernels run on this machine")
    graph, optimizer, params, of_params, state = start(config, options, mesh)
    checkpoints = Checkpoints(options.checkpoints)
    done, params, state, read = checkpoints.restore(optimizer, params, state)
    of_state = jax.tree.map(lambda x: x.sharding, state)
    step = make_step(
        graph,
        optimizer,
        compiler_options=compiler_options(options, mesh),
        out_shardings=(of_params, of_state, None),
    )
    tokens = options.microbatches * options.batch * config.length
    report = Report(config, tokens, options.devices, sum(x.size for x in jax.tree.leaves(params)))
    stream = windows_of(config, options, read)
    trace_from = max(done, options.steps - 3) if options.profile else None
    with (
        first_interrupt_noted() as interrupted,
        tqdm(total=options.steps, initial=done, unit="step") as bar,
    ):
        while done < options.steps and not interrupted.is_set():
            if done == trace_from:
                jax.profiler.start_trace(options.profile)
            windows = jax.device_put(next(stream), NamedSharding(mesh, BATCH))
            params, state, loss = step(params, state, windows)
            done, read = done + 1, read + windows.shape[0] * windows.shape[1]
            # The device computes this step while the host reads the loss of the step before.
            if (last := report.add(done, loss)) is not None:
                bar.set_postfix(loss=f"{last:.3f}", refresh=False)
            bar.update()
            if options.save_every and done % options.save_every == 0:
                checkpoints.save(done, params, state, read)
        report.finish()
    if trace_from is not None and done > trace_from:
        jax.profiler.stop_trace()
    if report.losses:
        checkpoints.save(done, params, state, read)
    checkpoints.close()
    report.print()
    if options.curve is not None and report.losses:
        write_curve(options.curve, report.losses)
    if options.output is not None and len(report.ends) > 3:
        report.save(options.output, options.given)
    return list(report.losses.values())


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    own = argparse.ArgumentParser(
        prog="python -m examples.pretrain_moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own.add_argument("--preset", choices=PRESETS, default="tiny")
    own.add_argument("--layers", type=int, help="number of layers, instead of the preset's")
    own.add_argument(
        "--scan", action=argparse.BooleanOptionalAction, help="compile layers as one loop"
    )
    own.add_argument(
        "--balanced", action="store_true", help="send tokens to experts at random, to measure speed"
    )
    own.add_argument(
        "--remat", choices=REMAT, default="norms", help="what layers keep for the backward pass"
    )
    own.add_argument(
        "--recipe", choices=["none", "blockwise"], default="none", help="recipe of FP8"
    )
    own.add_argument(
        "--stock", action="store_true", help="multiply experts by jax.lax.ragged_dot, to compare"
    )
    own.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    own.add_argument("--learning-rate", type=float, help="instead of the preset's")
    own.add_argument("--steps", type=int, default=40, help="steps in all, earlier runs included")
    own.add_argument("--batch", type=int, help="sequences of a microbatch, on all devices")
    own.add_argument("--microbatches", type=int, default=1, help="microbatches a step")
    own.add_argument("--data", type=Path, help="a file of bytes, or .npy of token ids")
    own.add_argument("--checkpoints", type=Path, help="folder to resume from and to save in")
    own.add_argument(
        "--save-every", type=int, help="steps between checkpoints; by default one at the end"
    )
    own.add_argument("--curve", type=Path, help="loss curve: .csv, and .png with Matplotlib")
    own.add_argument("--output", type=Path, help="a record of at least four steps, as JSON")
    own.add_argument("--commit", help="commit of the record, in a copy without git")
    own.add_argument("--profile", help="folder for a trace of the last three steps")
    own.add_argument("--devices", type=int, default=1, help="devices that divide the batch")
    own.add_argument(
        "--expert-parallel", type=int, default=1, help="devices that divide the experts"
    )
    own.add_argument("--fsdp", action="store_true", help="divide all parameters along data")
    own.add_argument("--seed", type=int, default=0)
    return own


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains as the arguments say, and returns the losses of the steps."""
    own = parser()
    options = own.parse_args(arguments)
    options.given = {n: x for n, x in vars(options).items() if x != own.get_default(n)}
    config = PRESETS[options.preset]
    names = "layers", "scan", "learning_rate"
    given = dict(balanced=options.balanced) | {name: getattr(options, name) for name in names}
    config = dataclasses.replace(config, **{k: v for k, v in given.items() if v is not None})
    if options.batch is None:
        options.batch = config.batch * options.devices
    if options.devices % options.expert_parallel or options.batch % options.devices:
        raise SystemExit(
            "--expert-parallel must divide --devices, and --devices --batch, got "
            f"{options.expert_parallel}, {options.devices} and {options.batch}"
        )
    shape = options.devices // options.expert_parallel, options.expert_parallel
    mesh = jax.make_mesh(shape, (DATA, EXPERT), (AxisType.Auto,) * 2)
    try:
        with jax.set_mesh(mesh):
            return train(config, options, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        smaller = "a smaller --batch, fewer --layers, --remat layers, --fsdp on more --devices"
        smaller += ", and no --stock" if options.stock else ""
        missing = shortage(str(error), options.devices)
        raise SystemExit(f"{missing}. These options take less memory: {smaller}.") from None


if __name__ == "__main__":
    # JAX reads this when it first uses the GPU; its default leaves a quarter of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    main()
