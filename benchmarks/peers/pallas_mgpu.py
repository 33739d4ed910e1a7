"""JAX's Pallas Mosaic-GPU ragged dot for Hopper, with the best of a small sweep of configurations.

The kernel is an example in JAX's tree and takes its tile sizes from the caller. What a sweep finds
is kept in a file, so that later runs do not spend their time on sweeping again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks.cases import Problem
from benchmarks.inputs import abstract_operands
from benchmarks.peers.base import Call, NotOffered, Role, missing_module, without_gpu

TUNED_CONFIGS = Path(__file__).parents[1] / "results" / "pallas_mgpu_configs.json"


@dataclass(frozen=True)
class Config:
    """Tile sizes in the kernel's own terms; `grid_block_n` is the width of its L2 rasterisation."""

    block_m: int
    block_n: int
    block_k: int
    max_concurrent_steps: int
    grid_block_n: int

    def __str__(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}, "
            f"{self.max_concurrent_steps} steps, raster {self.grid_block_n}"
        )


# In the order in which they are tried. One warpgroup computes a tile, so a tile has at most
# 128 x 192 accumulators; more steps than these would not fit into shared memory.
CONFIGS = (
    Config(128, 128, 64, 5, 8),
    Config(64, 256, 64, 4, 4),
    Config(128, 192, 64, 4, 4),
    Config(128, 128, 64, 5, 2),
    Config(64, 128, 64, 6, 8),
    Config(128, 128, 128, 2, 4),
    Config(64, 192, 64, 5, 4),
    Config(64, 64, 64, 8, 8),
)


def candidates(problem: Problem, limit: int) -> list[Config]:
    """At most `limit` configurations whose tiles divide the problem, likely ones first."""

    def allowed(config: Config) -> bool:
        if problem.contracting:
            return problem.k % config.block_m == 0 and problem.n % config.block_n == 0
        return problem.k % config.block_k == 0 and problem.n % config.block_n == 0

    # A tile much taller than a group is mostly wasted.
    small_groups = not problem.contracting and problem.m <= 64 * problem.groups
    ranked = sorted(CONFIGS, key=lambda config: small_groups and config.block_m > 64)
    return [config for config in ranked if allowed(config)][:limit]


def ragged_product(problem: Problem, config: Config) -> Callable[..., jax.Array]:
    """The jitted function of (lhs, rhs, group_sizes) with a configuration."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    options = dataclasses.asdict(config)
    if problem.contracting:
        function = transposed_ragged_dot_mgpu.transposed_ragged_dot
    else:
        function = ragged_dot_mgpu.ragged_dot
        options["transpose_rhs"] = problem.transpose_rhs
    return jax.jit(lambda lhs, rhs, sizes: function(lhs, rhs, group_sizes=sizes, **options))


class PallasMgpu:
    """`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and its transposed counterpart."""

    name = "pallas_mgpu"
    role = Role.GROUPED
    slow = False

    def __init__(self, sweep: int, retune: bool):
        """Tries `sweep` configurations where none is known yet, or everywhere with `retune`."""
        self._sweep = sweep
        self._retune = retune
        self._compiled: dict[Problem, dict[Config, Callable[..., jax.Array]]] = {}

    def unavailable_reason(self) -> str | None:
        """Whether the kernel, its needs or a GPU is missing."""
        return missing_module("absl") or without_gpu()

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Compiles the candidates and keeps the fastest for this problem."""
        if problem.out_dtype != problem.dtype:
            raise NotOffered(f"its result has the operands' dtype, {problem.dtype}")
        operands = lhs, rhs, group_sizes
        compiled = self._compiled.get(problem) or self._compile_candidates(problem)
        if len(compiled) > 1:
            best = min(compiled, key=lambda config: _seconds(compiled[config], operands))
            compiled = {best: compiled[best]}
            _remember(problem, best)
        self._compiled[problem] = compiled
        ((config, function),) = compiled.items()
        jax.block_until_ready(function(*operands))
        return Call(lambda: function(*operands), str(config))

    def _compile_candidates(self, problem: Problem) -> dict[Config, Callable[..., jax.Array]]:
        known = None if self._retune else _tuned().get(_key(problem))
        configs = [Config(**known)] if known else candidates(problem, self._sweep)
        if not configs:
            raise NotOffered(f"no tile divides k={problem.k} and n={problem.n}")
        # Most of a compilation happens outside Python's lock.
        with ThreadPoolExecutor(max_workers=4) as pool:
            outcomes = list(pool.map(functools.partial(_compile, problem), configs))
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if len(errors) == len(configs):
            raise errors[0]
        return {
            config: outcome
            for config, outcome in zip(configs, outcomes, strict=True)
            if outcome not in errors
        }


def _compile(problem: Problem, config: Config) -> Callable[..., jax.Array] | Exception:
    """The compiled kernel, or the error that says why this configuration has none."""
    try:
        return ragged_product(problem, config).lower(*abstract_operands(problem)).compile()
    except Exception as error:
        return error


def _seconds(function: Callable[..., jax.Array], operands, calls: int = 3) -> float:
    """Seconds for a queue of calls after a warm-up."""
    jax.block_until_ready(function(*operands))
    start = time.perf_counter()
    jax.block_until_ready([function(*operands) for _ in range(calls)])
    return time.perf_counter() - start


def _key(problem: Problem) -> str:
    op = "contracting" if problem.contracting else "nt" if problem.transpose_rhs else "nn"
    return f"{op}/{problem.groups}x{problem.m}x{problem.k}x{problem.n}/{problem.dtype}"


def _tuned() -> dict[str, dict[str, int]]:
    return json.loads(TUNED_CONFIGS.read_text()) if TUNED_CONFIGS.exists() else {}


def _remember(problem: Problem, config: Config) -> None:
    tuned = _tuned() | {_key(problem): dataclasses.asdict(config)}
    TUNED_CONFIGS.write_text(json.dumps(tuned, indent=1, sort_keys=True) + "\n")
