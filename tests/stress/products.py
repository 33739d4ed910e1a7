"""Runs few programs many times: judges first runs in float64, and later runs by their bits."""

from __future__ import annotations

import collections
import hashlib
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tests.stress.drawing import Trial
from tests.stress.trials import trial

THREADS = 8  # threads that trace, compile and judge
# The share of the time for products after which no further program is compiled.
COMPILING = 0.7


def digest(results: Any) -> bytes:
    """A digest of the bits of all results together."""
    found = hashlib.blake2b()
    for leaf in jax.tree.leaves(results):
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.view(np.uint8).data if array.size else b"")
    return found.digest()


@dataclass
class Program:
    """A compiled trial, the arguments drawn for its runs, and digests of the results.

    `failures` describes wrong results in words.
    """

    family: str
    trial: Trial
    compiled: Any = None
    operands: tuple = ()
    drawn: list[tuple] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def first_runs(cls, seed: int, number: int, draws: int, implementation: str, most: int):
        """Compiles a trial, runs it with `draws` drawn arguments, and judges each result."""
        family, of_family = trial(seed, number, implementation, most)
        program = cls(family, of_family)
        rng = np.random.default_rng([seed, number, 1])
        with jax.enable_x64(of_family.x64):
            program.operands = jax.tree.map(jax.numpy.asarray, of_family.operands)
            drawn = [of_family.draw(rng) for _ in range(draws)]
            program.drawn = [jax.tree.map(jax.numpy.asarray, each) for each in drawn]
            lowered = jax.jit(of_family.function).lower(*program.operands, *program.drawn[0])
            program.compiled = lowered.compile()
            for each, on_device in zip(drawn, program.drawn, strict=True):
                results = jax.device_get(program.compiled(*program.operands, *on_device))
                program.digests.append(digest(results))
                try:
                    of_family.judge(each, results)
                except AssertionError as error:
                    check = traceback.extract_tb(error.__traceback__)[-1].line
                    program.fail(f"{check} {str(error).strip()[:300]}, with {each}")
        return program

    def run(self, index: int) -> Any:
        """Starts run `index`, and returns the results, which are on the device."""
        with jax.enable_x64(self.trial.x64):
            return self.compiled(*self.operands, *self.drawn[index])

    def again(self, index: int) -> bool:
        """Repeats run `index`, and returns whether the results have the same bits."""
        return self.same_bits(index, jax.device_get(self.run(index)))

    def same_bits(self, index: int, results: Any) -> bool:
        """Returns whether results have the bits of the first run of `index`, or notes a failure."""
        if digest(results) == self.digests[index]:
            return True
        self.fail(f"run {index} has other bits than the first")
        return False

    def is_right(self, index: int, results: Any, where: str) -> bool:
        """Returns whether results of another program have the bits of run `index`.

        XLA may fuse the code around a kernel differently in another program, so results with other
        bits are judged in float64. They are a failure only if they are wrong.
        """
        if digest(results) == self.digests[index]:
            return True
        try:
            self.trial.judge(jax.device_get(self.drawn[index]), results)
        except AssertionError as error:
            self.fail(f"run {index} is wrong {where}: {str(error).strip()[:300]}")
        return False

    def fail(self, what: str) -> None:
        """Notes a failure, with the name of the trial."""
        self.failures.append(f"{self.trial.name}: {what}")


@dataclass
class Products:
    """All programs, and the numbers of their judged and repeated runs."""

    programs: list[Program]
    judged: int = 0
    repeated: int = 0

    def record(self) -> dict[str, Any]:
        """Returns counts of runs and programs, programs by family, and the failures."""
        by_family = collections.Counter(program.family for program in self.programs)
        return {
            "products": self.judged + self.repeated,
            "judged_in_float64": self.judged,
            "compared_with_the_first_run": self.repeated,
            "programs": len(self.programs),
            "programs_by_family": dict(sorted(by_family.items())),
            "failures": self.failures(),
        }

    def failures(self) -> list[str]:
        """Returns the failures of all programs."""
        return [failure for program in self.programs for failure in program.failures]


def soak(
    *,
    seed: int,
    count: int,
    draws: int,
    repeats: int,
    seconds: float,
    implementation: str,
    most: int,
) -> Products:
    """Runs up to `count` products within `seconds`, and each program `draws` x `repeats` times."""
    end = time.monotonic() + seconds
    stop_compiling = time.monotonic() + COMPILING * seconds
    errors: list[Program] = []

    def prepare(number: int) -> Program | None:
        if time.monotonic() > stop_compiling and number >= THREADS:
            return None
        try:
            return Program.first_runs(seed, number, draws, implementation, most)
        except Exception as error:
            family, of_family = trial(seed, number, implementation, most)
            failed = Program(family, of_family)
            failed.fail(f"{type(error).__name__}: {str(error).strip()[:500]}")
            errors.append(failed)
            return None

    with ThreadPoolExecutor(THREADS) as pool:
        needed = range(-(-count // (draws * repeats)))
        programs = [program for program in pool.map(prepare, needed) if program is not None]
    products = Products(programs, judged=sum(len(program.digests) for program in programs))
    order = [(p, index) for p in programs for index in range(len(p.digests))]
    rng = np.random.default_rng(seed)
    while products.judged + products.repeated < count and order:
        rng.shuffle(order)
        left = count - products.judged - products.repeated
        products.repeated += run_again(order[:left], end)
        if time.monotonic() > end:
            break
    products.programs += errors
    return products


def run_again(
    runs: Sequence[tuple[Program, int]] | Iterable[tuple[Program, int]],
    end: float = float("inf"),
    ahead: int = 16,
) -> int:
    """Repeats runs until the time `end`, compares their bits, and returns the number of runs.

    `ahead` runs are started before the results of the first of them are compared.
    """
    waiting: collections.deque = collections.deque()
    done = 0

    def compare() -> int:
        program, index, results = waiting.popleft()
        program.same_bits(index, jax.device_get(results))
        return 1

    for program, index in runs:
        if time.monotonic() > end:
            break
        waiting.append((program, index, program.run(index)))
        if len(waiting) > ahead:
            done += compare()
    while waiting:
        done += compare()
    return done
