"""Reads a text that every machine has: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}
HELD_OUT_EVERY = 20


class Corpus(NamedTuple):
    """Bytes of the training files and of the held-out files. No file belongs to both sets."""

    train: np.ndarray  # uint8
    held_out: np.ndarray  # uint8
    num_files: int


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads all ``.py`` files under ``root``, by default the standard library, in sorted order.

    Every twentieth file is held out, so every run has the same split.

    Raises:
      FileNotFoundError: there are too few files to hold one out.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = sorted(_sources(root))
    if len(files) < HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"the demo trains on Python's own sources but found {len(files)} .py files in {root}"
        )
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = sorted(set(files) - set(held_out))
    return Corpus(_concatenate(train), _concatenate(held_out), len(files))


def batches(text: np.ndarray, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yields random windows [batch, length + 1] endlessly. Targets are inputs shifted by one."""
    rng = np.random.default_rng(seed)
    window = np.arange(length + 1)
    while True:
        starts = rng.integers(0, len(text) - length, size=(batch, 1))
        yield text[starts + window]


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # Do not list installed packages, because they may be much larger than the library.
        folders[:] = set(folders) - NOT_LIBRARY
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _concatenate(files: list[Path]) -> np.ndarray:
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)
