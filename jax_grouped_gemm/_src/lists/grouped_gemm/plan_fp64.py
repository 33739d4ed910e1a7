"""Which kernel runs a list of products on the FP64 tensor cores, and how long it takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.lists.fp64 import KERNELS, Square, busy_steps, num_steps, tile_k
from jax_grouped_gemm._src.lists.grouped_gemm.schedule import Shape
from jax_grouped_gemm._src.plan import TiledKernel

MAX_MATRICES = 128
"""Products to a launch, which are parameters of the kernel: kMaxProblems of gemm_problem.h."""


@functools.lru_cache(maxsize=256)
def simulated(
    shapes: tuple[Shape, ...], dtype: np.dtype, target: Target
) -> tuple[Square, int, float, float]:
    """The kernel to take, its blocks, the steps of the longest block, and the balance.

    As `csrc/scheduler/product_runs.h` has it: the longest tiles first, whatever the order of the
    list. More matrices than one launch takes have a launch each `MAX_MATRICES`, one after another.
    """
    choices = []
    for kernel in KERNELS[dtype]:
        places = kernel.places(target)
        busy = [_busy_steps(kernel, part, dtype, places) for part in _launches(shapes)]
        longest = sum(int(x.max()) for x in busy)
        balance = sum(int(x.sum()) for x in busy) / places / longest
        blocks = max(min(places, _num_tiles(kernel, part)) for part in _launches(shapes))
        time = longest * multiply_adds_per_step(dtype, kernel, target) / kernel.rate
        choices.append((time, (kernel, blocks, float(longest), float(balance))))
    return min(choices, key=lambda choice: choice[0])[1]


def multiply_adds_per_step(dtype: np.dtype, kernel: TiledKernel, target: Target) -> int:
    """Multiply-adds of a step of all blocks that the device holds at a time."""
    return kernel.places(target) * kernel.tile.tile_m**2 * tile_k(dtype)


def _launches(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """`shapes` cut into what the launches take, in stacks that are all of one launch."""
    launches: list[list[Shape]] = []
    room = 0
    for shape in shapes:
        rest = shape.g
        while rest:
            if not room:
                launches.append([])
                room = MAX_MATRICES
            part = min(rest, room)
            launches[-1].append(shape._replace(g=part))
            rest, room = rest - part, room - part
    return launches


def _busy_steps(
    kernel: Square, shapes: Sequence[Shape], dtype: np.dtype, places: int
) -> np.ndarray:
    runs = [(num_steps(dtype, shape.k), _num_tiles(kernel, [shape])) for shape in shapes]
    runs.sort(key=lambda run: -run[0])
    steps, counts = zip(*runs, strict=True)
    return busy_steps(places, steps, counts)


def _num_tiles(kernel: Square, shapes: Sequence[Shape]) -> int:
    return sum(
        shape.g * cdiv(shape.m, kernel.side) * cdiv(shape.n, kernel.side) for shape in shapes
    )
