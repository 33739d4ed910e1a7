"""Trains the demo's language model with one compiled step, and measures its time and memory."""

from __future__ import annotations

import contextlib
import gc
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from tqdm import tqdm

from jax_grouped_gemm import optim
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm.demo.data import Corpus, batches
from jax_grouped_gemm.demo.model import EXPERT_AXIS, LanguageModel
from jax_grouped_gemm.demo.presets import Preset
from jax_grouped_gemm.flax.nnx import Optimizer
from jax_grouped_gemm.moe import Implementation, expert_parallel_compiler_options

LOAD_BALANCING_WEIGHT = 1e-2
ROUTER_Z_WEIGHT = 1e-3
PROGRESS_EVERY = 10

Quantizes = Literal["optimizer", "layers"]
"""The part of the program that quantises the weights of an FP8 recipe."""


@dataclass(frozen=True)
class Losses:
    """Cross-entropy in nats per byte, on the training text and on files that are held out."""

    train: float
    held_out: float


@dataclass(frozen=True)
class TrainingRun:
    """The measurements of one training run."""

    implementation: str
    kernel_calls: int  # calls of this project's CUDA kernels in one compiled training step
    num_parameters: int
    temporary_bytes: int  # device memory of one step, without its arguments and results
    compile_seconds: float
    step_seconds: float  # mean over all steps except the first
    tokens_per_second: float
    before: Losses
    after: Losses
    curve: list[float]  # training cross-entropy of every step
    interrupted: bool = False  # whether Ctrl-C ended the run before its last step
    devices: int = 1  # devices that divide experts and tokens
    # Rows of the busiest device over the mean of devices, averaged over layers, at the end.
    largest_share: float = 1.0


class OutOfMemory(Exception):
    """A training run needs more device memory than there is. The exception keeps no arrays alive.

    Attributes:
      implementation: the name of the run.
    """

    def __init__(self, implementation: str, reason: str):
        super().__init__(reason)
        self.implementation = implementation


def train(
    preset: Preset,
    corpus: Corpus,
    *,
    name: str,
    implementation: Implementation,
    recipe: Recipe | None = None,
    quantizes: Quantizes = "optimizer",
    steps: int,
    seed: int,
    devices: int = 1,
) -> TrainingRun:
    """Trains a new model for ``steps`` steps. Equal seeds give equal parameters and batches.

    Several devices divide experts and tokens. Each device has everything else in full.

    ``quantizes`` says whether the optimiser quantises weights of an FP8 recipe as it updates them,
    or layers quantise them in each step.

    Ctrl-C ends training after the present step, with the measurements so far.

    Raises:
      OutOfMemory: the model or its step does not fit. The memory is then free for another run.
    """
    try:
        return _train(preset, corpus, name, implementation, recipe, quantizes, steps, seed, devices)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        failure = OutOfMemory(name, shortage(str(error), devices))
    finally:
        # Collect garbage now, because Flax models and the frames of an error are reference cycles.
        gc.collect()
    # Do not chain the error, because its traceback would keep the state of the run alive.
    raise failure


def shortage(message: str, devices: int) -> str:
    """Returns a message with the requested memory, from XLA's message, and the free memory."""
    asked = re.search(r"allocat\w* ([\d.]+) ?(bytes|[KMGT]iB)", message)
    text = "out of memory"
    if asked:
        number, unit = asked.groups()
        size = f"{float(number) / 2**30:.2f} GiB" if unit == "bytes" else f"{number} {unit}"
        text += f": asked for {size}"
    known = [stats for d in jax.devices()[:devices] if (stats := d.memory_stats())]
    if known:
        fullest = min(known, key=lambda stats: stats["bytes_limit"] - stats["bytes_in_use"])
        limit, used = fullest["bytes_limit"], fullest["bytes_in_use"]
        text += f" while {(limit - used) / 2**30:.2f} of {limit / 2**30:.2f} GiB were free"
    return text


def _train(
    preset: Preset,
    corpus: Corpus,
    name: str,
    implementation: Implementation,
    recipe: Recipe | None,
    quantizes: Quantizes,
    steps: int,
    seed: int,
    devices: int,
) -> TrainingRun:
    mesh = None
    if devices > 1:
        mesh = Mesh(jax.devices()[:devices], (EXPERT_AXIS,), axis_types=(AxisType.Auto,))
    model = LanguageModel(preset.model, implementation, recipe, mesh, rngs=nnx.Rngs(seed))
    optimizer: Any
    if quantizes == "optimizer" and recipe:
        optimizer = Optimizer(model, quantizing_adamw(preset, steps, recipe, implementation))
    else:
        optimizer = nnx.Optimizer(model, adamw(preset, steps), wrt=nnx.Param)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))

    # Compile a function of the model's arrays ahead of time, to see what the compiled step
    # contains, and to keep compilation out of the timing.
    graph, state = nnx.split((model, optimizer))
    del model, optimizer
    stream = batches(corpus.train, preset.batch, preset.sequence_length, seed)
    if mesh is not None:
        state = jax.device_put(state, shardings(state, mesh))
        stream = (jax.device_put(x, NamedSharding(mesh, P(EXPERT_AXIS))) for x in stream)
    first = next(stream)
    started = time.perf_counter()
    options = None if mesh is None else expert_parallel_compiler_options(mesh)
    jitted = jax.jit(make_train_step(graph), donate_argnums=0, compiler_options=options)
    step = jitted.lower(state, first).compile()
    compile_seconds = time.perf_counter() - started
    memory = step.memory_analysis()
    assert memory is not None  # CPUs and GPUs report it
    evaluate = make_evaluation(graph, preset, corpus)
    before = evaluate(state)

    with first_interrupt_noted() as interrupted:
        state, loss = step(state, first)
        curve = [loss]
        jax.block_until_ready(loss)
        started = time.perf_counter()
        with tqdm(desc=name, total=steps, initial=1, unit="step") as bar:
            for batch in islice(stream, steps - 1):
                if interrupted.is_set() and len(curve) > 1:
                    break
                state, loss = step(state, batch)
                curve.append(loss)
                if len(curve) % PROGRESS_EVERY == 0:
                    # Reading the loss waits for the step, so the bar counts steps that have ended.
                    bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
                    bar.update(len(curve) - bar.n)
            jax.block_until_ready(state)
            bar.update(len(curve) - bar.n)
        step_seconds = (time.perf_counter() - started) / max(len(curve) - 1, 1)

    return TrainingRun(
        implementation=name,
        kernel_calls=(step.as_text() or "").count('custom_call_target="jax_grouped_gemm.'),
        num_parameters=num_parameters,
        temporary_bytes=memory.temp_size_in_bytes,
        compile_seconds=compile_seconds,
        step_seconds=step_seconds,
        tokens_per_second=preset.tokens_per_step / step_seconds,
        before=before,
        after=evaluate(state),
        curve=[float(loss) for loss in curve],
        interrupted=len(curve) < steps,
        devices=devices,
        largest_share=largest_share(graph, state, first, devices) if devices > 1 else 1.0,
    )


def shardings(state: Any, mesh: Mesh) -> Any:
    """Returns the shardings of parameters and optimiser state, which divide experts."""

    def of(spec: P) -> NamedSharding:
        axes = (EXPERT_AXIS if axis == "exp" else None for axis in spec or ())
        return NamedSharding(mesh, P(*axes))

    specs = nnx.get_partition_spec(state)
    return jax.tree.map(of, specs, is_leaf=lambda x: isinstance(x, P))


def largest_share(graph: nnx.GraphDef, state: Any, windows: ArrayLike, devices: int) -> float:
    """Returns the busiest device's rows over the mean of devices, averaged over the layers."""

    @jax.jit
    def choices(state, windows):
        model, _ = nnx.merge(graph, state)
        return model.choices(windows.astype(jnp.int32)[:, :-1])

    counts = np.asarray(choices(state, windows))
    rows = counts.reshape(len(counts), devices, -1).sum(axis=2)
    return float((rows.max(axis=1) / rows.mean(axis=1)).mean())


@contextlib.contextmanager
def first_interrupt_noted() -> Iterator[threading.Event]:
    """Returns a context in which the first Ctrl-C sets an event, and a second Ctrl-C interrupts."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted  # Signals reach the main thread only.
        return
    previous = signal.getsignal(signal.SIGINT)

    def note(*_) -> None:
        noted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, previous)


def learning_rate(preset: Preset, steps: int) -> optax.Schedule:
    """Returns a schedule of warm-up and cosine decay."""
    return optax.warmup_cosine_decay_schedule(
        init_value=preset.learning_rate / 10,
        peak_value=preset.learning_rate,
        warmup_steps=max(int(steps * preset.warmup), 1),
        decay_steps=max(steps, 2),
        end_value=preset.learning_rate / 10,
    )


ADAMW: dict[str, Any] = dict(b2=0.95, weight_decay=0.1)
MAX_NORM = 1.0


def adamw(preset: Preset, steps: int) -> optax.GradientTransformation:
    """Returns AdamW with gradient clipping."""
    return optax.chain(
        optax.clip_by_global_norm(MAX_NORM), optax.adamw(learning_rate(preset, steps), **ADAMW)
    )


def quantizing_adamw(
    preset: Preset, steps: int, recipe: Recipe, implementation: Implementation
) -> optim.Optimizer:
    """Returns AdamW with gradient clipping that writes FP8 weights."""
    return optim.adamw(
        learning_rate(preset, steps),
        **ADAMW,
        max_norm=MAX_NORM,
        recipe=recipe,
        implementation=None if callable(implementation) else implementation,
    )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy over all bytes, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_train_step(graph: nnx.GraphDef) -> Callable:
    """Returns a function of (state, windows [batch, length + 1]) to (new state, cross-entropy)."""

    def loss_function(model: LanguageModel, text: jax.Array):
        logits, router = model(text[:, :-1])
        loss = cross_entropy(logits, text[:, 1:])
        regularizer = LOAD_BALANCING_WEIGHT * router.load_balancing
        regularizer += ROUTER_Z_WEIGHT * router.router_z
        return loss + regularizer, loss

    def train_step(state, windows: jax.Array):
        model, optimizer = nnx.merge(graph, state)
        gradient = nnx.grad(loss_function, has_aux=True)
        read = optimizer.compute_model(model) if isinstance(optimizer, Optimizer) else model
        gradients, loss = gradient(read, windows.astype(jnp.int32))
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return train_step


def make_evaluation(graph: nnx.GraphDef, preset: Preset, corpus: Corpus) -> Callable:
    """Returns a function from the state to `Losses`, over the same random windows in each call."""

    @jax.jit
    def loss_of(state, windows: jax.Array) -> jax.Array:
        model, _ = nnx.merge(graph, state)
        text = windows.astype(jnp.int32)
        logits, _ = model(text[:, :-1])
        return cross_entropy(logits, text[:, 1:])

    def windows(text: np.ndarray) -> list[np.ndarray]:
        stream = batches(text, preset.batch, preset.sequence_length, seed=0)
        return list(islice(stream, preset.evaluation_batches))

    train_windows, held_out_windows = windows(corpus.train), windows(corpus.held_out)

    def mean_loss(state, batches: list[np.ndarray]) -> float:
        return float(np.mean([loss_of(state, batch) for batch in batches]))

    def evaluate(state) -> Losses:
        return Losses(mean_loss(state, train_windows), mean_loss(state, held_out_windows))

    return evaluate
