"""Programs that other processes compile, and this one loads and measures.

Nearly all of a case's time is XLA's: a program is compiled once and runs for microseconds. So as
many processes as there are cores compile, each the next case that no other has begun, and leave the
executables in a folder. Autotuning is done by then, and its choices are part of an executable. What
is loaded here is not traced again.

XLA's autotuner times kernels while other processes time theirs. A kernel of microseconds shares
none of its time slice, but one that is interrupted may lose to a slower one; `again` in `__main__`
measures how often by compiling some cases anew, on a quiet machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import jax_grouped_gemm as jgg
from benchmarks.harness.measure import first_line
from benchmarks.harness.peer import Call, NotOffered, Role
from benchmarks.peers.ours import kernels_unavailable_reason
from jax_grouped_gemm._src import fallback

ONE_THREAD = "--xla_gpu_force_compilation_parallelism=1"


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function that is a peer in a case.

    Attributes:
      name, role: of the peer.
      function: of the case's operands.
      compiler_options: of XLA.
      left_to_xla: whether plans leave to XLA whatever it can compute. Not offered where the plan
        stays the same, or has no kernel anyway.
      config: the index among the configurations that the plan could take. Not offered where it is
        the one that it takes.
      unplanned: the same with no implementation asked for. Not offered where the plan takes a
        kernel then too: it is the same program.
    """

    name: str
    role: Role
    function: Callable[..., Any]
    compiler_options: Mapping[str, Any] | None = None
    left_to_xla: bool = False
    config: int | None = None
    unplanned: Callable[..., Any] | None = None

    def compile(self, *operands: Any) -> tuple[jax.stages.Compiled, str]:
        """The executable for operands of these shapes, and what there is to say of it.

        Raises:
          NotOffered: there is no such way to run the problem.
        """
        function, detail = self.function, ""
        if self.unplanned and jgg.explain(self.unplanned, *operands).plans[0].kernel_problem:
            raise NotOffered("the plan takes the kernel")
        if self.config is not None:
            function, detail = _configured(function, self.config, *operands)
        if self.left_to_xla:
            function, detail = _left_to_xla(function, *operands)
        options = dict(self.compiler_options or {}) or None
        return jax.jit(function).lower(*operands).compile(compiler_options=options), detail


def _configured(function: Callable, index: int, *operands: Any) -> tuple[Callable, str]:
    plan = jgg.explain(function, *operands).plans[0]
    if index >= len(plan.candidates):
        raise NotOffered(f"{len(plan.candidates)} configurations can run it")
    config = plan.candidates[index]
    if config == plan.tile:
        raise NotOffered("the plan takes this configuration")

    def with_config(*operands):
        with jgg.use_tiles(forward=config):
            return function(*operands)

    return with_config, str(config)


def _left_to_xla(function: Callable, *operands: Any) -> tuple[Callable, str]:
    if jgg.explain(function, *operands).plans[0].kernel_problem is None:
        raise NotOffered("the plan leaves it to XLA")

    def left(*operands):
        with fallback.policy("xla"):
            return function(*operands)

    plan = jgg.explain(left, *operands).plans[0]
    if plan.kernel_problem is not None:
        raise NotOffered("XLA has no product for it")
    return left, plan.reason


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of a program in another process: an executable, or why there is none."""

    executable: tuple[bytes, Any, Any] | None = None
    detail: str = ""
    not_offered: str = ""
    failure: str = ""
    seconds: float = 0.0


def compile_here(program: Program, operands: Sequence[Any]) -> Compiled:
    """An executable that another process can load."""
    start = time.monotonic()
    try:
        compiled, detail = program.compile(*operands)
        executable = serialize_executable.serialize(compiled)
    except (NotOffered, NotImplementedError) as reason:
        # What cannot be serialized is not implemented either, and compiled where it is measured.
        if isinstance(reason, NotOffered):
            return Compiled(not_offered=str(reason))
        return Compiled(failure=first_line(reason))
    except Exception as error:
        return Compiled(failure=first_line(error))
    return Compiled(executable, detail, seconds=time.monotonic() - start)


class ProgramPeer:
    """A program as a peer: loaded where another process compiled it, else compiled here."""

    slow = False

    def __init__(self, program: Program, compiled: Compiled | None = None):
        self.name = program.name
        self.role = program.role
        self._program = program
        self._compiled = compiled

    def unavailable_reason(self) -> str | None:
        """Why our kernels cannot run here, or None."""
        ours = self.role in (Role.OURS, Role.VARIANT)
        return kernels_unavailable_reason() if ours else None

    def prepare(self, problem: Any, *operands: Any) -> Call:
        """Loads or compiles it, and runs it once."""
        run, detail = self._load(operands)
        jax.block_until_ready(run(*operands))
        return Call(lambda: run(*operands), detail)

    def _load(self, operands: Sequence[Any]) -> tuple[Callable[..., Any], str]:
        compiled = self._compiled
        if compiled is None or compiled.failure:
            return self._program.compile(*operands)
        if compiled.not_offered:
            raise NotOffered(compiled.not_offered)
        assert compiled.executable is not None
        devices = jax.devices()[:1]
        loaded = serialize_executable.deserialize_and_load(
            *compiled.executable, execution_devices=devices
        )
        return loaded, compiled.detail


class Store:
    """Compiled programs in a folder, a file a case.

    Args:
      folder: where; programs of other sources are kept apart.
    """

    def __init__(self, folder: Path):
        self._folder = folder / sources_digest()
        self._folder.mkdir(parents=True, exist_ok=True)

    def has(self, label: str) -> bool:
        """Whether a case is there."""
        return self._path(label).exists()

    def load(self, label: str) -> dict[str, Compiled]:
        """The programs of a case by name; empty if nobody has compiled it."""
        path = self._path(label)
        # Written by processes of this run, or of an earlier one with the same sources.
        return pickle.loads(path.read_bytes()) if path.exists() else {}

    def save(self, label: str, programs: Mapping[str, Compiled]) -> None:
        """Adds a case in one step."""
        partial = self._path(f"{label}.{os.getpid()}")
        partial.write_bytes(pickle.dumps(dict(programs)))
        partial.replace(self._path(label))

    def claim(self, label: str, run: str) -> bool:
        """Whether this process is the first of a run to ask for a case that is not there."""
        if self.has(label):
            return False
        try:
            self._path(f"{label}.{run}.claim").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _path(self, label: str) -> Path:
        return self._folder / label.replace("/", ".")


def sources_digest() -> str:
    """Of all that programs are made from: our sources, the extensions, and JAX's version."""
    digest = hashlib.sha256(jax.__version__.encode())
    package = Path(jgg.__file__).parent
    for root in (package, Path(__file__).parents[1]):
        for path in sorted((*root.rglob("*.py"), *root.rglob("*.so"))):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run_workers(count: int, command: Sequence[str], seconds: float) -> float:
    """Runs a module in `count` processes that share one GPU; how long they took.

    One that is not done in time is ended, and what it has saved stays.

    Args:
      count: of processes.
      command: the module and its arguments.
      seconds: after which they are ended.
    """
    start = time.monotonic()
    flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
    environment = os.environ | {
        # The package that this process has, though `-m` would look in the working folder first.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": flags,
        "OMP_NUM_THREADS": "1",
    }
    with _ended(
        [
            subprocess.Popen([sys.executable, "-P", "-m", *command], env=environment)
            for _ in range(count)
        ]
    ) as workers:
        for worker in workers:
            left = start + seconds - time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(left, 0))
    return time.monotonic() - start


@contextlib.contextmanager
def _ended(workers: list[subprocess.Popen]) -> Iterator[list[subprocess.Popen]]:
    """No process outlives this one."""
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
        for worker in workers:
            worker.wait()
