"""`explain_expert_parallel`: predicts how a layer over several devices runs, without devices."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_grouped_gemm._src.arguments import canonical_dtype, checked_boolean, checked_int
from jax_grouped_gemm._src.expert_parallel.options import (
    STRATEGIES,
    Auto,
    Combine,
    Save,
    Strategy,
    Wanted,
)
from jax_grouped_gemm._src.expert_parallel.prediction import Prediction, Shape, choose
from jax_grouped_gemm._src.transfers import megabytes

_ASK_FOR_COPY_ENGINES = ", copy engines with moe.expert_parallel_compiler_options()"


@dataclasses.dataclass(frozen=True)
class ExpertParallelExplanation:
    """The compared ways to compute a layer. `str()` describes them.

    Attributes:
      shape: the sizes of the layer on one device.
      chosen: the way that `expert_parallel_mlp` takes.
      others: the best way of every other strategy.
      batch_invariant: whether batch invariance allows only one strategy.
    """

    shape: Shape
    chosen: Prediction
    others: tuple[Prediction, ...]
    batch_invariant: bool = False

    def __str__(self) -> str:
        shape, chosen = self.shape, self.chosen
        lines = [
            f"expert_parallel_mlp, {shape.tokens} tokens a device, embed {shape.embed}, hidden "
            f"{shape.hidden}, {shape.num_experts} experts on {shape.devices} devices, top_k "
            f"{shape.top_k}",
            f"strategy {chosen.strategy}, chunks {chosen.chunks}, combine {chosen.combine}, "
            f"overlap {chosen.overlap}, save {chosen.save}",
            f"{'copy engines' if chosen.copy_engines else 'kernels'} send"
            + _ASK_FOR_COPY_ENGINES * (chosen.combine == "ppermute" and not chosen.copy_engines),
            f"{megabytes(chosen.sent_bytes)} leave a device in {_us(chosen.sent_seconds)}, to the "
            "experts and again on the way back",
            f"rows buffer {megabytes(chosen.buffer_bytes)}",
            _times(chosen),
        ]
        if self.batch_invariant:
            lines.append(
                "batch invariant: each row travels alone, and a token's rows are added up in the "
                "order of its choices"
            )
        lines += [f"instead of {p.strategy}, chunks {p.chunks}: {_times(p)}" for p in self.others]
        return "\n   ".join(lines)


def explain_expert_parallel(
    tokens: int,
    embed: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    devices: int,
    *,
    tensor_devices: int = 1,
    dtype: DTypeLike = jnp.bfloat16,
    strategy: Strategy | Auto = "auto",
    chunks: int | Auto = "auto",
    combine: Combine | Auto = "auto",
    overlap: bool | Auto = "auto",
    save: Save | Auto = "auto",
    buffer_factor: float | None = None,
    copy_engines: bool = False,
    batch_invariant: bool = False,
) -> ExpertParallelExplanation:
    """Predicts how `expert_parallel_mlp` would compute a layer, and how long this would take.

    Times are predicted for balanced experts on H200 GPUs of one host, without the time of launching
    kernels. Products are assumed to have the speed of large products. The speed of collectives was
    measured on two H200.

    Args:
      tokens: T, the tokens of one device.
      embed, hidden: D and F.
      num_experts: E, the experts of all devices together.
      top_k: experts for each token.
      devices: N, the devices along `expert_axis`.
      tensor_devices: devices along `tensor_axis`, with the same tokens.
      dtype: dtype of tokens and matrices.
      strategy, chunks, combine, overlap, save, buffer_factor, batch_invariant: see
        `expert_parallel_mlp`.
      copy_engines: whether the program is compiled with `expert_parallel_compiler_options`, so that
        copy engines send the data of a ppermute.

    Returns:
      An `ExpertParallelExplanation`.

    Raises:
      TypeError, ValueError: an argument has an unsuitable type, or the experts cannot be divided.
    """
    numbers = dict(
        tokens=tokens, embed=embed, hidden=hidden, num_experts=num_experts, top_k=top_k,
        devices=devices, tensor_devices=tensor_devices,
    )  # fmt: skip
    for name, number in numbers.items():
        if checked_int(name, number) < 1:
            raise ValueError(f"{name} must be positive, got {number}")
    if num_experts % devices or hidden % tensor_devices:
        raise ValueError(
            f"devices must divide num_experts = {num_experts}, and tensor_devices must divide "
            f"hidden = {hidden}, got {devices} and {tensor_devices}"
        )
    if top_k > num_experts:
        raise ValueError(f"top_k must be at most num_experts = {num_experts}, got {top_k}")
    checked_boolean("copy_engines", copy_engines)
    dtype = canonical_dtype("dtype", dtype)
    options = dict(chunks=chunks, combine=combine, overlap=overlap, save=save)
    options["batch_invariant"] = batch_invariant
    wanted = Wanted.checked(tokens, strategy=strategy, **options, buffer_factor=buffer_factor)
    shape = Shape(
        tokens, embed, hidden // tensor_devices, num_experts, top_k, devices, dtype.itemsize
    )
    if wanted.batch_invariant and tensor_devices > 1:
        raise ValueError(
            f"tensor_devices must be 1 with batch_invariant, got {tensor_devices}: devices that "
            "have slices of hidden features add up parts of a sum"
        )
    chosen = choose(shape, wanted, copy_engines=copy_engines)
    others = tuple(
        choose(shape, dataclasses.replace(wanted, strategy=name), copy_engines=copy_engines)
        for name in STRATEGIES
        if name != chosen.strategy and not wanted.batch_invariant
    )
    return ExpertParallelExplanation(shape, chosen, others, wanted.batch_invariant)


def _times(p: Prediction) -> str:
    return (
        f"predicted forward {_us(p.forward_seconds)} ({p.forward_fraction:.2f} of no "
        f"communication), forward and backward {_us(p.step_seconds)} ({p.step_fraction:.2f})"
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
