"""The best of a few configurations of a peer that leaves its tile sizes to the caller.

The file of a sweep keeps its result, so that later runs do not sweep again.
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

# The rounds of the timing. Configurations take turns, because a chip slows down as it warms up.
ROUNDS = 3

# A frozen dataclass of plain values.
Config = Any


class Sweep:
    """Which configuration of one peer is fastest for a problem."""

    def __init__(self, peer: str, limit: int, retune: bool, directory: Path = RESULTS):
        """Tries `limit` configurations where none is known yet, or everywhere with `retune`."""
        self._path = directory / f"{peer}_configs.json"
        self._limit = limit
        self._retune = retune
        # Configurations of this run. Sizes change between distributions, problems do not.
        self._chosen: dict[Any, Config] = {}

    def best(
        self,
        problem: Any,
        candidates: Sequence[Config],
        prepare: Callable[[Config], Call],
        workers: int = 1,
    ) -> Call:
        """The call of the fastest configuration that works; `detail` is the configuration.

        `problem` is a `Problem`, or the name of one of another suite.
        `prepare` compiles, in up to `workers` threads at once. If it raises for all candidates,
        what it raised first is raised.
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
        # A configuration that is no longer on the list is no longer known.
        return next((c for c in candidates if dataclasses.asdict(c) == known), None)

    def _read(self) -> dict[str, dict[str, Any]]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def _remember(self, problem: Any, config: Config) -> None:
        known = self._read() | {_key(problem): dataclasses.asdict(config)}
        self._path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _prepare_all(
    configs: Sequence[Config], prepare: Callable[[Config], Call], workers: int
) -> dict[Config, Call]:
    def outcome(config: Config) -> Call | Exception:
        try:
            return prepare(config)
        except Exception as error:
            # A configuration may not fit the problem in ways that only compiling it tells.
            return error

    if workers == 1:
        # In this thread: the CUDA context that a peer relies on is current here, not in others.
        outcomes = {config: outcome(config) for config in configs}
    else:
        with ThreadPoolExecutor(workers) as pool:
            outcomes = dict(zip(configs, pool.map(outcome, configs), strict=True))
    calls = {config: call for config, call in outcomes.items() if isinstance(call, Call)}
    if not calls:
        raise outcomes[configs[0]]
    return calls


def _fastest(calls: Mapping[Config, Call]) -> Config:
    """By the shortest of a few rounds."""
    rounds = [{config: _seconds(call) for config, call in calls.items()} for _ in range(ROUNDS)]
    return min(calls, key=lambda config: min(seconds[config] for seconds in rounds))


def _seconds(call: Call, calls: int = 3) -> float:
    """Seconds for a queue of calls after a warm-up."""
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
    """One whose `configs` have `block_m`, and whose `compiled` functions take JAX's arrays."""

    configs: Sequence[Config]

    def allowed(self, problem: Problem, config: Config) -> bool:
        raise NotImplementedError

    def compiled(self, problem: Problem, config: Config) -> Callable[..., Any]:
        raise NotImplementedError

    def candidates(self, problem: Problem) -> list[Config]:
        """The configurations that fit the problem, likely ones first."""
        # A tile much taller than a group is mostly wasted.
        small_groups = not problem.contracting and problem.m <= 64 * problem.groups
        ranked = sorted(self.configs, key=lambda config: small_groups and config.block_m > 64)
        return [config for config in ranked if self.allowed(problem, config)]

    def prepare(self, problem: Problem, *operands: Any) -> Call:
        def call(config: Config) -> Call:
            function = self.compiled(problem, config)
            return Call(lambda: function(*operands))

        # Most of a compilation happens outside Python's lock.
        return self._sweep.best(problem, self.candidates(problem), call, workers=4)
