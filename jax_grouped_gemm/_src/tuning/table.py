"""Tuned kernel configurations by problem, and the file that keeps them.

The file is JSON and holds one section a build: a kind of device, a version of this package and the
contents of its compiled extension. What was measured with one build says nothing of another, so a
table is read from and written to one section only. Within it, a problem's key lists all that a plan
depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_grouped_gemm._src import ffi as _ffi
from jax_grouped_gemm._src.availability import default_device
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.tile_config import TileConfig
from jax_grouped_gemm._src.version import __version__

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file's structure."""

Section = Mapping[str, Any]
"""Of one build: by the key of a problem, the fields of its `Tuned` as JSON has them."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The outcome for one problem.

    Attributes:
      tile: the configuration that won.
      microseconds: the time of every configuration that was measured, by its `str`.
    """

    tile: TileConfig
    microseconds: Mapping[str, float]


class TuningTable:
    """Tuned configurations by problem: what `autotune` and `load_tuning` return.

    Immutable. Tables that choose the same tiles are equal, whatever times they hold.

    Attributes:
      entries: `Tuned` by the `problem_key` of a kernel's problem.
    """

    def __init__(self, entries: Mapping[str, Tuned]):
        self.entries = MappingProxyType(dict(entries))
        self._tiles = {key: tuned.tile for key, tuned in self.entries.items()}
        self._hash = hash(frozenset(self._tiles.items()))

    def tile(self, problem: RaggedProblem, terms: int) -> TileConfig | None:
        """The tuned configuration of a kernel's problem, None if it was not tuned."""
        return self._tiles.get(problem_key(problem, terms))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TuningTable) and self._tiles == other._tiles

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<TuningTable of {len(self.entries)} problems>"

    def __str__(self) -> str:
        lines = []
        for key, tuned in self.entries.items():
            times = "; ".join(f"{t:.1f} us {tile}" for tile, t in tuned.microseconds.items())
            lines.append(f"{key}\n   tile {tuned.tile} ({times})")
        return "\n".join(lines) or "no tuned problems"


def problem_key(problem: RaggedProblem, terms: int) -> str:
    """All that distinguishes the problems that a kernel can get, in one line.

    Args:
      problem: as the kernel gets it.
      terms: see `Plan`.
    """
    values = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    values["terms"] = terms
    return " ".join(f"{name}={_word(value)}" for name, value in values.items())


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(map(_word, value)) + "]"
    if isinstance(value, bool):
        return str(int(value))
    return str(value).replace(" ", "_")


@dataclasses.dataclass(frozen=True)
class Build:
    """What measured times belong to.

    Attributes:
      device: kind of device, such as "NVIDIA H200".
      version: of this package.
      extension: digest of the compiled extension.
    """

    device: str
    version: str
    extension: str

    @classmethod
    def of(cls, device_kind: str) -> Build:
        """This installation on a device of the given kind."""
        return cls(device_kind, __version__, _extension_digest())

    def __str__(self) -> str:
        return f"{self.device}, version {self.version}, extension {self.extension}"


@functools.cache
def _extension_digest() -> str:
    spec = importlib.util.find_spec(_ffi.EXTENSION)
    if spec is None or spec.origin is None:
        return "none"
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


def load_tuning(path: str | os.PathLike, device_kind: str | None = None) -> TuningTable:
    """Reads what `autotune(..., cache=path)` measured, for `use_tiles`.

    Only what was measured on the same kind of device, with the same version of this package and the
    same compiled extension, is used. If the file has nothing of that kind, a warning is logged and
    the table is empty, so that plans have their defaults.

    Args:
      path: the file.
      device_kind: of the device to plan for, as in `jax.Device.device_kind`; by default that of
        the default device. To be given where a program is compiled for a device that is not there.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, or has a structure that this version does not know.
    """
    file, build = TuningFile(path), Build.of(device_kind or default_device().device_kind)
    sections = file.read()
    if build not in sections:
        others = "; ".join(map(str, sections)) or "nothing"
        logger.warning("%s has no tuned tiles for %s. It has: %s", path, build, others)
    return TuningTable(file.entries(sections, build))


class TuningFile:
    """A file of tuned configurations. Sections of other builds are carried along unread."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def read(self) -> dict[Build, Section]:
        """All sections.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is damaged, or has a structure that this version does not know.
        """
        with self._explained():
            content = json.loads(self.path.read_text())
            found = content["format"]
            if found == FORMAT:
                return {_build(section): section["problems"] for section in content["builds"]}
        raise ValueError(
            f"{self.path} is a tuning file of format {found!r}, and this version of "
            f"jax_grouped_gemm knows format {FORMAT} only. Name another file."
        )

    def entries(self, sections: Mapping[Build, Section], build: Build) -> dict[str, Tuned]:
        """What `sections` have for `build`. Raises a `ValueError` if that is damaged."""
        with self._explained():
            return {
                key: Tuned(TileConfig(**value["tile"]), value["microseconds"])
                for key, value in sections.get(build, {}).items()
            }

    def read_if_exists(self, build: Build) -> dict[str, Tuned]:
        """What the file has for `build`, with the errors of `read`; nothing without a file."""
        return self.entries(self.read(), build) if self.path.exists() else {}

    def add(self, build: Build, entries: Mapping[str, Tuned]) -> None:
        """Adds `entries` for `build` and keeps what else is in the file.

        Readers see the old file or the new one, and of processes that add at the same time none
        loses what another added.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock():
            sections = self.read() if self.path.exists() else {}
            new = {key: dataclasses.asdict(tuned) for key, tuned in entries.items()}
            sections[build] = dict(sorted((sections.get(build, {}) | new).items()))
            builds = [
                dataclasses.asdict(build) | {"problems": section}
                for build, section in sections.items()
            ]
            # In the same directory: only within a file system is a file replaced in one step.
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"format": FORMAT, "builds": builds}, indent=2) + "\n")
            temporary.replace(self.path)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        import fcntl  # POSIX, as the kernels are; the rest of the package imports anywhere

        with open(self.path.with_name(self.path.name + ".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{self.path} is not a tuning file, or it is damaged ({type(error).__name__}: "
                f"{error}). Delete it and tune again, or name another file."
            ) from error


def _build(section: Mapping[str, Any]) -> Build:
    return Build(**{field.name: section[field.name] for field in dataclasses.fields(Build)})
