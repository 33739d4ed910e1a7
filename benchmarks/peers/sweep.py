"""Finds the best of a few configurations of a peer whose callers choose the tile sizes.

A file keeps the results of a peer's sweeps, so that later runs do not sweep again.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness.cases import Problem
from benchmarks.harness.peer import Call, NotOffered, Peer, Role

RESULTS = Path(__file__).parents[1] / "results"

# Rounds of the timing. Configurations alternate, because a chip slows down as it warms up.
ROUNDS = 3

# A frozen dataclass of plain values.
Config = Any


class Sweep:
    """Finds the fastest configurations of a peer."""

    def __init__(self, peer: str, limit: int, retune: bool, directory: Path = RESULTS):
        """Tries `limit` configurations if the fastest is not known, or always with `retune`."""
        self._path = directory / f"{peer}_configs.json"
        self._limit = limit
        self._retune = retune
        # Configurations of this run, because distributions of group sizes have the same problem.
        self._chosen: dict[Any, Config] = {}

    def best(
        self,
        problem: Any,
        candidates: Sequence[Config],
        prepare: Callable[[Config], Call],
        workers: int = 1,
    ) -> Call:
        """Returns the call of the fastest configuration; its `detail` is the configuration.

        `problem` is a `Problem`, or the name of another suite's problem. `prepare` compiles, in up
        to `workers` threads. If it fails for all candidates, its first exception is raised.
        """
        if not candidates:
            raise NotOffered(f"no tile divides k={problem.k} and n={problem.n}")
        chosen = self._chosen.get(problem) or self._known(problem, candidates)
        tried = [chosen] if chosen else candidates[: self._limit]
        calls = _prepare_all(tried, prepare, workers)
        config = next(iter(calls))
        if len(calls) > 1:
            config = _fastest(calls)
            self._remember(problem, config)
        self._chosen[problem] = config
        calls[config].detail = str(config)
        return calls[config]

    def _known(self, problem: Any, candidates: Sequence[Config]) -> Config | None:
        known = None if self._retune else self._read().get(_key(problem))
        # Ignore a configuration that is no longer a candidate.
        return next((c for c in candidates if dataclasses.asdict(c) == known), None)

    def _read(self) -> dict[str, dict[str, Any]]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def _remember(self, problem: Any, config: Config) -> None:
        known = self._read() | {_key(problem): dataclasses.asdict(config)}
        lines = (f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in known.items())
        self._path.write_text("{\n" + ",\n".join(sorted(lines)) + "\n}\n")


def _prepare_all(
    configs: Sequence[Config], prepare: Callable[[Config], Call], workers: int
) -> dict[Config, Call]:
    def outcome(config: Config) -> Call | Exception:
        try:
            return prepare(config)
        except Exception as error:
            # Some configurations fail only when they are compiled.
            return error

    if workers == 1:
        # Use this thread, because only here a peer's CUDA context is current.
        outcomes = {config: outcome(config) for config in configs}
    else:
        with ThreadPoolExecutor(workers) as pool:
            outcomes = dict(zip(configs, pool.map(outcome, configs), strict=True))
    calls = {config: call for config, call in outcomes.items() if isinstance(call, Call)}
    if not calls:
        raise outcomes[configs[0]]
    return calls


def _fastest(calls: Mapping[Config, Call]) -> Config:
    """Returns the configuration with the least time in any of a few rounds."""
    rounds = [{config: _seconds(call) for config, call in calls.items()} for _ in range(ROUNDS)]
    return min(calls, key=lambda config: min(seconds[config] for seconds in rounds))


def _seconds(call: Call, calls: int = 3) -> float:
    """Returns the seconds for a queue of calls after a warm-up."""
    call.wait(call.run())
    start = time.perf_counter()
    for _ in range(calls):
        result = call.run()
    call.wait(result)
    return time.perf_counter() - start


def _key(problem: Any) -> str:
    if not isinstance(problem, Problem):
        return str(problem)
    op = "contracting" if problem.contracting else "nt" if problem.transpose_rhs else "nn"
    out = "" if problem.out_dtype == problem.dtype else f"->{problem.out_dtype}"
    return f"{op}/{problem.groups}x{problem.m}x{problem.k}x{problem.n}/{problem.dtype}{out}"


class SweptPeer(Peer):
    """A peer with a `Sweep` of its own."""

    role = Role.GROUPED

    def __init__(self, sweep: int = 3, retune: bool = False):
        self._sweep = Sweep(self.name, sweep, retune)


class CompiledPeer(SweptPeer):
    """A peer whose `configs` have `block_m`, and whose `compiled` functions take JAX arrays."""

    configs: Sequence[Config]

    def allowed(self, problem: Problem, config: Config) -> bool:
        raise NotImplementedError

    def compiled(self, problem: Problem, config: Config) -> Callable[..., Any]:
        raise NotImplementedError

    def candidates(self, problem: Problem) -> list[Config]:
        """Returns the configurations that fit the problem, likely ones first."""
        # A tile that is much taller than a group is mostly empty.
        small_groups = not problem.contracting and problem.m <= 64 * problem.groups
        ranked = sorted(self.configs, key=lambda config: small_groups and config.block_m > 64)
        return [config for config in ranked if self.allowed(problem, config)]

    def prepare(self, problem: Problem, *operands: Any) -> Call:
        def call(config: Config) -> Call:
            function = self.compiled(problem, config)
            return Call(lambda: function(*operands))

        # Most of a compilation happens outside Python's lock.
        return self._sweep.best(problem, self.candidates(problem), call, workers=4)
