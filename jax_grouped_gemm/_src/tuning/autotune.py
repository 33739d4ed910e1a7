"""Measures the compiled kernel configurations on a function's ragged products."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.typing import ArrayLike

from jax_grouped_gemm._src import ffi as _ffi
from jax_grouped_gemm._src.availability import default_device, unsuitable_device_reason
from jax_grouped_gemm._src.explain import planned_products
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.tile_config import TileConfig
from jax_grouped_gemm._src.tuning.choices import TileChoices, using
from jax_grouped_gemm._src.tuning.table import (
    Build,
    Tuned,
    TuningFile,
    TuningTable,
    problem_key,
)

logger = logging.getLogger(__name__)

PRODUCTS_A_RUN = 8
"""So many that a run is longer than its launch from the host."""

ROUNDS = 7
"""Of which the first, in which programs are compiled and the chip wakes up, does not count."""

MARGIN = 0.01
"""By how much another configuration must be faster than the default one to be preferred."""

LEAST_SECONDS = 5e-3
"""For one reading of the clock."""

COLD_BYTES = 128 * 2**20
"""More than twice the L2 cache: products take turns with as many operands, so that each finds its
own in memory, as the products of a model do."""

OperandSets = Sequence[Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration to be measured.

    Attributes:
      problem: what the kernel computes.
      tile: its configuration.
      program: see `product_chain`.
      operands: makes the program's sets of operands, which all candidates of a problem share.
    """

    problem: RaggedProblem
    tile: TileConfig
    program: Callable[[OperandSets], jax.Array]
    operands: Callable[[], OperandSets]

    def run(self) -> jax.Array:
        """Starts `PRODUCTS_A_RUN` products. Returns an array that is ready when they are done."""
        return self.program(self.operands())


Timer = Callable[[Candidate], float]
"""Seconds that one `run` of a candidate takes."""


def autotune(
    fn: Callable[..., Any],
    *args: Any,
    cache: str | os.PathLike | None = None,
    group_sizes: ArrayLike | None = None,
    timer: Timer | None = None,
    **kwargs: Any,
) -> TuningTable:
    """Measures every compiled kernel configuration for each ragged product of `fn`.

    Traces `fn(*args, **kwargs)` without running it, finds its ragged products as `explain` does,
    and runs every distinct problem on random operands on the default device, configurations taking
    turns. Nothing is tuned unless this is called, and nothing uses the result but `use_tiles`:

        table = jgg.autotune(jax.grad(loss), params, batch, cache="tuning.json")
        with jgg.use_tiles(table):  # in later processes: jgg.load_tuning("tuning.json")
            ...

    Products that no kernel runs and symmetric updates are left out. The default
    configuration stays unless another is more than 1 % faster. Of several processes that run one
    program together, one should tune and all load its file: they have to compile the same.

    Args:
      fn: the function, such as a training step.
      *args: its arguments; `jax.ShapeDtypeStruct` does for an array.
      cache: a JSON file. Problems that it has for this kind of device, this version of the package
        and this build of its extension are not measured again; others are added to it one by one,
        so that an interrupted run loses little. Several processes may use one file.
      group_sizes: [G] integers, the rows of each group in every measured problem; by default all
        groups are of equal size. Sizes as uneven as the real ones make the choice better.
      timer: measures a `Candidate` in place of the clock, in seconds.
      **kwargs: keyword arguments of `fn`.

    Returns:
      The table of all problems in `cache`, or of the problems of `fn` without one.

    Raises:
      RuntimeError: the default device cannot run the kernels, with the reason, and there is no
        `timer`.
      ValueError: `group_sizes` are not those of a problem's number of groups, or `cache` is damaged
        or of another format.
    """
    device = default_device()
    reason = unsuitable_device_reason(device) or _ffi.missing_extension_reason()
    if reason and timer is None:
        raise RuntimeError(f"autotune cannot measure here: {reason}")
    build = Build.of(device.device_kind)
    file = None if cache is None else TuningFile(cache)
    entries = file.read_if_exists(build) if file else {}

    with using(TileChoices()):  # so that plans have their defaults
        jaxpr = jax.make_jaxpr(fn)(*args, **kwargs).jaxpr
    products = {key: product for key, *product in _tunable(jaxpr) if key not in entries}
    problem_sizes = {key: _group_sizes(plan, group_sizes) for key, (_, plan) in products.items()}
    for i, (key, (eqn, plan)) in enumerate(products.items(), start=1):
        tuned = _tune(eqn, plan, problem_sizes[key], timer or queued_seconds)
        logger.info("tuned problem %d of %d: %s: %s", i, len(products), plan.problem, tuned.tile)
        entries[key] = tuned
        if file:
            file.add(build, {key: tuned})
    return TuningTable(entries)


def _tunable(jaxpr) -> Iterator[tuple[str, JaxprEqn, Plan]]:
    for eqn, plan in planned_products(jaxpr):
        if plan.candidates:
            yield problem_key(plan.kernel_problem, plan.terms), eqn, plan


def _tune(eqn: JaxprEqn, plan: Plan, group_sizes: np.ndarray, timer: Timer) -> Tuned:
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    operands = functools.cache(functools.partial(_operand_sets, avals, group_sizes))
    candidates = [
        Candidate(
            plan.kernel_problem,
            tile,
            jax.jit(product_chain(eqn.primitive, eqn.params | {"tile": tile})),
            operands,
        )
        for tile in plan.candidates
    ]
    rounds = [[timer(candidate) for candidate in candidates] for _ in range(ROUNDS)]
    medians = [statistics.median(times) for times in zip(*rounds[1:], strict=True)]
    seconds = dict(zip(plan.candidates, medians, strict=True))
    return Tuned(
        tile=_winner(seconds, plan.tile),
        microseconds={str(tile): s / PRODUCTS_A_RUN * 1e6 for tile, s in seconds.items()},
    )


def _winner(seconds: Mapping[TileConfig, float], default: TileConfig) -> TileConfig:
    fastest = min(seconds, key=seconds.__getitem__)
    is_close = seconds[default] <= (1 + MARGIN) * seconds[fastest]
    return default if is_close else fastest


def queued_seconds(candidate: Candidate) -> float:
    """The host's clock over a queue of runs that is long enough for its start not to matter."""
    runs = 1
    while True:
        start = time.perf_counter()
        for _ in range(runs):
            done = candidate.run()
        done.block_until_ready()
        seconds = time.perf_counter() - start
        if seconds >= LEAST_SECONDS:
            return seconds / runs
        runs *= 2


def product_chain(
    primitive: Primitive, params: Mapping[str, Any]
) -> Callable[[OperandSets], jax.Array]:
    """A function that computes `PRODUCTS_A_RUN` products, of sets of operands in turn.

    Each needs a number from the last one's result, so that XLA neither drops nor reorders any and
    keeps one result at a time.
    """

    def chain(operand_sets):
        nothing = jnp.zeros((), jnp.int32)
        for i in range(PRODUCTS_A_RUN):
            *arrays, group_sizes, group_offset = operand_sets[i % len(operand_sets)]
            out = primitive.bind(*arrays, group_sizes + nothing, group_offset, **params)
            nothing = jnp.isnan(out[(0,) * out.ndim]).astype(jnp.int32)
        return nothing

    return chain


def _group_sizes(plan: Plan, given: ArrayLike | None) -> np.ndarray:
    groups, m = plan.problem.num_groups, plan.problem.m
    if given is None:
        return np.diff(np.arange(groups + 1) * m // groups).astype(np.int32)
    given = np.asarray(given)
    if given.shape != (groups,) or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(
            f"group_sizes must be {groups} integers for {plan.problem}, got {given!r}. Tune "
            "functions with different numbers of groups one by one."
        )
    return given.astype(np.int32)


def _operand_sets(
    avals: Sequence[jax.ShapeDtypeStruct], group_sizes: np.ndarray
) -> list[list[jax.Array]]:
    """Normal values: with zeros a chip needs less power, and runs faster."""
    *arrays, sizes, offset = avals
    set_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    count = min(max(math.ceil(COLD_BYTES / set_bytes), 1), PRODUCTS_A_RUN)
    keys = iter(jax.random.split(jax.random.key(0), count * len(arrays)))
    groups = [jnp.broadcast_to(group_sizes, sizes.shape), jnp.zeros(offset.shape, offset.dtype)]
    return [
        [*(_normal(next(keys), x.shape, x.dtype) for x in arrays), *groups] for _ in range(count)
    ]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)
