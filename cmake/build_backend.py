"""The build backend: scikit-build-core, after a look at what the machine lacks.

pip downloads what `get_requires_for_build_wheel` returns before anything is configured. The CUDA
compiler and JAX's headers are hundreds of megabytes, so what is missing is said before that. CMake
looks again, and closer.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403 - the hooks that are passed on

Settings = Mapping[str, str | list[str]] | None
COMPILERS = ("c++", "g++", "clang++")  # those that CMake would find on Linux


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What building a wheel needs, or `SystemExit` with what the machine lacks."""
    return _requires(build.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """The same for an editable install."""
    return _requires(build.get_requires_for_build_editable, config_settings)


def _requires(of_scikit_build: Callable[[Settings], list[str]], settings: Settings) -> list[str]:
    faults = missing(settings)
    if faults:
        sys.exit("\n".join(["jax_grouped_gemm cannot be built here:", *faults]))
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    return [*of_scikit_build(settings), *pyproject["dependency-groups"]["build"]]


def missing(settings: Settings = None) -> list[str]:
    """What the machine lacks, with what to do about it; nothing of what `settings` says."""
    given = " ".join([*(settings or ()), os.environ.get("CMAKE_ARGS", "")])
    faults = []
    if sys.platform != "linux":
        faults.append(f"- The kernels are built on Linux only, and this is {sys.platform}.")
    compilers = (os.environ["CXX"].split()[0],) if os.environ.get("CXX", "").strip() else COMPILERS
    if not any(map(shutil.which, compilers)) and "CMAKE_CXX_COMPILER" not in given:
        faults.append(
            f"- No C++ compiler was found ({', '.join(compilers)}). The build needs one of C++20, "
            "such as g++ 11 or clang++ 14: install it (apt install g++), or name it in the "
            "environment variable CXX."
        )
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists() and "Python" not in given:
        faults.append(
            f"- Python's headers were not found: there is no Python.h in {include}. Install them "
            "(apt install python3-dev), or take a Python that has them."
        )
    return faults
