"""The build backend: scikit-build-core, with two additions.

pip downloads what `get_requires_for_build_wheel` returns before anything is configured. The CUDA
compiler and JAX's headers are hundreds of megabytes, so the backend names what the machine lacks
before pip downloads them. CMake checks again, in more detail.

With the CMake variable JGG_KERNELS off nothing is compiled: scikit-build-core then packs the Python
files, without CMake, into a wheel that any machine can install.
"""

from __future__ import annotations

import os
import re
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
# The values that CMake takes for false.
OFF = {"", "0", "off", "no", "n", "false", "ignore", "notfound"}


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Returns what building a wheel needs, or raises `SystemExit` with what the machine lacks."""
    return _requires(build.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Like `get_requires_for_build_wheel`, for an editable install."""
    return _requires(build.get_requires_for_build_editable, config_settings)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Writes the metadata of the wheel that `build_wheel` builds with the same settings."""
    return build.prepare_metadata_for_build_wheel(metadata_directory, _passed_on(config_settings))


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Like `prepare_metadata_for_build_wheel`, for an editable install."""
    return build.prepare_metadata_for_build_editable(
        metadata_directory, _passed_on(config_settings)
    )


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds a wheel. Without the kernels it has only Python files."""
    return build.build_wheel(wheel_directory, _passed_on(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Like `build_wheel`, for an editable install."""
    return build.build_editable(wheel_directory, _passed_on(config_settings), metadata_directory)


def _requires(of_scikit_build: Callable[[Settings], list[str]], settings: Settings) -> list[str]:
    if not kernels(settings):
        return of_scikit_build(_passed_on(settings))
    faults = missing(settings)
    if faults:
        sys.exit(
            "\n".join(
                [
                    "jax_grouped_gemm cannot be built here:",
                    *faults,
                    "An install without kernels compiles nothing: -C cmake.define.JGG_KERNELS=OFF",
                ]
            )
        )
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    return [*of_scikit_build(settings), *pyproject["dependency-groups"]["build"]]


def kernels(settings: Settings = None) -> bool:
    """Returns whether the kernels are built. pip's settings override the environment."""
    given = [f"{name}={value}" for name, value in (settings or {}).items()]
    given += [os.environ.get(name, "") for name in ("SKBUILD_CMAKE_DEFINE", "CMAKE_ARGS")]
    found = re.search(r"JGG_KERNELS(?::\w+)?=(\w*)", " ".join(given))
    return found is None or found[1].lower() not in OFF


def _passed_on(settings: Settings) -> Settings:
    """Returns scikit-build-core's settings. Without kernels: no CMake, a wheel for any machine."""
    if kernels(settings):
        return settings
    return {**(settings or {}), "wheel.cmake": "false", "wheel.py-api": "py3"}


def missing(settings: Settings = None) -> list[str]:
    """Returns what the machine lacks, except what `settings` names, and what to do about it."""
    given = " ".join([*(settings or ()), os.environ.get("CMAKE_ARGS", "")])
    faults = []
    if sys.platform != "linux":
        faults.append(f"- The kernels are built on Linux only, and this is {sys.platform}.")
    compilers = (os.environ["CXX"].split()[0],) if os.environ.get("CXX", "").strip() else COMPILERS
    if not any(map(shutil.which, compilers)) and "CMAKE_CXX_COMPILER" not in given:
        faults.append(
            f"- No C++ compiler was found ({', '.join(compilers)}). The build needs a C++20 "
            "compiler: g++ 11 or clang++ 14, or newer. Install one (apt install g++), or name one "
            "in the environment variable CXX."
        )
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists() and "Python" not in given:
        faults.append(
            f"- Python's headers were not found: there is no Python.h in {include}. Install them "
            "(apt install python3-dev), or use a Python that has them."
        )
    return faults
