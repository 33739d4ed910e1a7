"""Predicts the bytes and the time of a layer over several GPUs, for `strategy="auto"`.

The functions depend on nothing but shapes and the number of devices. Rates were measured on two
H200. They hold for GPUs of one host that NVLink connects all to all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.expert_parallel.options import Combine, Save, Strategy, Wanted
from jax_grouped_gemm._src.expert_parallel.pairs import buffer_rows

ALL_TO_ALL = 220e9
PPERMUTE = 215e9
RAGGED_ALL_TO_ALL = 80e9
"""Bytes a second that leave a GPU, for messages of tens of megabytes."""

COPY_ENGINES = 390e9
"""Bytes a second of ppermutes that copy engines send."""

LATENCY = 20e-6
"""Seconds that the smallest collective takes."""

COPY_ENGINES_LATENCY = 35e-6
"""Seconds that the smallest collective takes with copy engines, also while products run."""

ROWS_LOST_TO_TILES = 64
"""Rows that each expert wastes on average: half a tile."""

SECOND_COPY = 0.01
"""Rows are kept if copying tokens to rows again would take a larger share of a step than this.
Keeping rows is never slower (h100_x2_choices.json), but costs memory."""

IN_PLACE_COLUMNS = 256
"""Columns of hidden up to which no rows are kept, because products read tokens in place. Gradients
also read tokens of wider layers in place (`mlp/in_place.py`), but whether this is better than
keeping their rows has not been measured."""

SPARE_ROWS = 2
"""Rows are kept only if the buffer has room for at most this multiple of the balanced rows."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer as one of its devices sees it.

    Attributes:
      tokens: tokens of this device.
      embed: D.
      hidden: F, or this device's slice of F along a tensor axis.
      num_experts: E, the experts of all devices.
      top_k: choices of a token.
      devices: N, the number of slices of the experts.
      itemsize: bytes of an element of tokens and matrices.
      sources: number of devices with tokens of their own, N if None.
    """

    tokens: int
    embed: int
    hidden: int
    num_experts: int
    top_k: int
    devices: int
    itemsize: int = 2
    sources: int | None = None

    @property
    def num_sources(self) -> int:
        """Number of devices with tokens of their own."""
        return self.devices if self.sources is None else self.sources

    @property
    def balanced_rows(self) -> int:
        """Rows of a device if all experts are chosen equally often."""
        return self.tokens * self.num_sources * self.top_k // self.devices

    @property
    def experts_here(self) -> int:
        """Experts of a device."""
        return self.num_experts // self.devices

    @property
    def keeps_no_rows(self) -> bool:
        """Whether it is better to read tokens in place than to keep copied rows."""
        return self.hidden <= IN_PLACE_COLUMNS

    def buffer_rows(self, chunks: int, factor: float | None) -> int:
        """Rows that a device has room for at a time."""
        tokens = self.tokens // chunks * self.num_sources
        return buffer_rows(tokens, self.top_k, self.experts_here, self.devices, factor)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices of a device."""
        return 3 * self.experts_here * self.embed * self.hidden * self.itemsize


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One way to compute a layer.

    Attributes:
      strategy, chunks, combine, overlap, save: see `expert_parallel_mlp`.
      copy_engines: whether copy engines send what a ppermute sends.
      sent_bytes: bytes that a device sends in one direction: to the experts, or back.
      buffer_bytes: bytes of the rows of D features that a device has room for at a time.
      sent_seconds: time of either direction if nothing else runs.
      forward_seconds, step_seconds: time without and with the backward pass, of balanced experts.
      local_forward_seconds, local_step_seconds: the same times without communication.
    """

    strategy: Strategy
    chunks: int
    combine: Combine
    overlap: bool
    save: Save
    copy_engines: bool
    sent_bytes: int
    buffer_bytes: int
    sent_seconds: float
    forward_seconds: float
    step_seconds: float
    local_forward_seconds: float
    local_step_seconds: float

    @property
    def forward_fraction(self) -> float:
        """Speed of the forward pass, as a share of its speed without communication."""
        return self.local_forward_seconds / self.forward_seconds

    @property
    def step_fraction(self) -> float:
        """Speed of both passes together, as a share of their speed without communication."""
        return self.local_step_seconds / self.step_seconds


def predict(
    shape: Shape,
    strategy: Strategy,
    chunks: int = 1,
    combine: Combine = "all_to_all",
    buffer_factor: float | None = None,
    *,
    overlap: bool = False,
    save: Save = "x",
    copy_engines: bool = False,
) -> Prediction:
    """Predicts the bytes and seconds of one way to compute a layer."""
    sources, devices = shape.num_sources, shape.devices
    row_bytes = shape.embed * shape.itemsize
    shifts = strategy == "all_gather" and combine == "ppermute"
    if strategy == "all_gather":
        sent = (sources - 1) * shape.tokens * row_bytes
        rate = PPERMUTE if shifts else ALL_TO_ALL
    else:
        sent = shape.tokens * shape.top_k * row_bytes * (devices - 1) // devices
        rate = RAGGED_ALL_TO_ALL
    collectives, latency = chunks * (sources - 1 if shifts else 1), LATENCY
    copy_engines = copy_engines and shifts
    if copy_engines:
        rate, latency = COPY_ENGINES, COPY_ENGINES_LATENCY
    fixed = collectives * latency
    leg = sent / rate + fixed if sent else 0.0
    rows = shape.buffer_rows(chunks, buffer_factor)
    local_forward, local_backward = _local_seconds(shape, 1)
    forward, backward = _local_seconds(shape, chunks)
    if save == "rows":
        backward -= _copy_seconds(shape)
    elif save == "nothing":
        products = forward - 2 * _copy_seconds(shape)  # only the copy to rows is repeated
        backward += leg + 2 / 3 * products + _copy_seconds(shape)
    of_choices = LATENCY if sources > 1 else 0
    forward += 2 * leg + of_choices
    backward += 2 * leg + of_choices
    # Communication adds its whole time, because NCCL's kernels take multiprocessors from products.
    # The exception is gradients that copy engines send during weight gradients.
    if overlap and copy_engines and sent:
        backward -= leg - fixed
    return Prediction(
        strategy,
        chunks,
        combine,
        overlap,
        save,
        copy_engines,
        sent,
        rows * row_bytes,
        leg,
        forward_seconds=forward,
        step_seconds=forward + backward,
        local_forward_seconds=local_forward,
        local_step_seconds=local_forward + local_backward,
    )


def choose(
    shape: Shape,
    wanted: Wanted = Wanted(),  # noqa: B008
    *,
    can_exchange: bool = True,
    can_keep_rows: bool = True,
    copy_engines: bool = False,
) -> Prediction:
    """Chooses how to compute a layer: as `wanted` says, and for "auto" by prediction.

    The choice is the same whether copy engines or kernels send the data.

    Args:
      shape: shape of the layer.
      wanted: the options.
      can_exchange: whether "ragged_all_to_all" may be chosen.
      can_keep_rows: whether `save="rows"` may be chosen.
      copy_engines: for the predicted times, whether copy engines send what a ppermute sends.
    """
    strategies: list[Strategy] = ["all_gather"]
    if can_exchange and shape.devices > 1:
        strategies.append("ragged_all_to_all")
    if wanted.batch_invariant:
        # Take the strategy that sends rows back, because the other sends sums over rows.
        strategies = strategies[-1:]
    if wanted.strategy != "auto":
        strategies = [wanted.strategy]
    every = [_with_defaults(shape, one, wanted, can_keep_rows) for one in strategies]
    predicted = functools.partial(predict, shape, buffer_factor=wanted.buffer_factor)
    best = min(every, key=lambda options: predicted(**options).step_seconds)
    return predicted(**best, copy_engines=copy_engines)


def _with_defaults(
    shape: Shape, strategy: Strategy, wanted: Wanted, can_keep_rows: bool
) -> dict[str, Any]:
    """Returns the options of `predict` for one strategy, except `buffer_factor`."""
    # Several chunks have never been faster than one.
    chunks = 1 if wanted.chunks == "auto" else wanted.chunks
    overlap, combine, save = wanted.overlap, wanted.combine, wanted.save
    if overlap == "auto":
        by_shifts = strategy == "all_gather" and combine in ("auto", "ppermute")
        overlap = by_shifts and shape.num_sources == 2 and chunks == 1
    if combine == "auto":
        combine = "ppermute" if overlap or shape.num_sources == 2 else "all_to_all"
    if save == "auto":
        # Users ask for chunks to save memory, so chunks keep no rows. With one source nothing is
        # gathered, so keeping the caller's tokens, from which rows are copied, takes no memory.
        rows = can_keep_rows and chunks == 1 and shape.num_sources > 1
        rows = rows and not shape.keeps_no_rows
        spare = shape.buffer_rows(chunks, wanted.buffer_factor) / max(shape.balanced_rows, 1)
        copy = _copy_seconds(shape) / sum(_local_seconds(shape, 1))
        save = "rows" if rows and spare <= SPARE_ROWS and copy > SECOND_COPY else "x"
    return dict(strategy=strategy, chunks=chunks, combine=combine, overlap=overlap, save=save)


def _copy_seconds(shape: Shape) -> float:
    """Returns the time of copying tokens to rows."""
    return 2 * shape.balanced_rows * shape.embed * shape.itemsize / H200.rates.bandwidth


def _local_seconds(shape: Shape, chunks: int) -> tuple[float, float]:
    """Returns the time of products and of moving rows, forward and backward."""
    rows, embed = shape.balanced_rows, shape.embed
    padded = rows + ROWS_LOST_TO_TILES * shape.experts_here * chunks
    rate = H200.rates.sixteen_bits * 2 / shape.itemsize
    products = 3 * padded * embed * shape.hidden / rate
    read = chunks * shape.weight_bytes / H200.rates.bandwidth
    moved = 2 * _copy_seconds(shape)
    # Each chunk has weight gradients of its own, which are written, read again and added.
    written = (3 * chunks - 2) * shape.weight_bytes / H200.rates.bandwidth
    weight_gradients = 3 * rows * embed * shape.hidden / rate + written / 2
    forward = max(products, read) + moved
    backward = max(products, read) + weight_gradients + 1.5 * moved
    return forward, backward
