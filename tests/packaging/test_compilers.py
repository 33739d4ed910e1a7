"""The choice of a CUDA compiler by the build, and its messages about those that it refuses."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CMAKE = Path(__file__).parents[2] / "cmake"
PACKAGED = "/nvidia/cu13/bin/nvcc"

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or importlib.util.find_spec("cutlass_library") is None,
    reason="the build requirements are not installed",
)


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """Returns a function that chooses a compiler with some folders on PATH.

    It returns the path of the compiler, or "" if there is none, and the messages.
    """
    # This folder has all tools that CMake needs, and no nvcc.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "gcc", "g++", "cc1plus", "as", "ld", "rm", "cat", "sh"):
        if found := shutil.which(name):
            (tools / name).symlink_to(os.path.realpath(found) if name == "cmake" else found)

    def run(*folders, **variables) -> tuple[str, str]:
        script = tmp_path / "choose.cmake"
        script.write_text(
            f'set(Python_EXECUTABLE "{sys.executable}")\n'
            f'list(APPEND CMAKE_MODULE_PATH "{CMAKE}")\n'
            "include(BuildRequirements)\ninclude(CudaCompiler)\n"
            'message(STATUS "chosen ${CMAKE_CUDA_COMPILER}.")\n'
        )
        environment = os.environ | variables
        environment["PATH"] = os.pathsep.join(map(str, [*folders, tools]))
        result = subprocess.run(
            [tools / "cmake", "-P", script],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        said = " ".join((result.stdout + result.stderr).split())
        _, found, after = result.stdout.partition("-- chosen ")
        return after.partition(".\n")[0] if found else "", said

    monkeypatch.delenv("CUDACXX", raising=False)
    return run


def fake_nvcc(folder: Path, script: str) -> Path:
    folder.mkdir()
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return nvcc


OLD = 'echo "Cuda compilation tools, release 12.8, V12.8.93"'
NEW = '[ "$1" = --version ] && echo "Cuda compilation tools, release 13.1, V13.1.80"'
PTXAS = f'{NEW} && exit 0; echo "ptxas: no such file" >&2; exit 127'


@pytest.mark.parametrize(
    "script, fault",
    [
        (OLD, "is of CUDA 12.8, but 13.0 is needed"),
        (PTXAS, "is of CUDA 13.1, but does not compile a kernel: ptxas: no such file"),
        ("exit 3", "cannot be run (3)"),
        ("echo something else", "does not say which release it is"),
    ],
)
@pytest.mark.parametrize("named", ["PATH", "CUDACXX"])
def test_an_unsuitable_compiler_is_named_and_passed_over(chosen, tmp_path, script, fault, named):
    nvcc = fake_nvcc(tmp_path / "cuda", script)
    found, said = chosen(nvcc.parent) if named == "PATH" else chosen(CUDACXX=str(nvcc))
    assert f"{nvcc} is passed over: it {fault}" in said
    assert found.endswith(PACKAGED), said


def test_a_suitable_one_is_taken(chosen, tmp_path):
    old = fake_nvcc(tmp_path / "old", OLD)
    new = fake_nvcc(tmp_path / "new", f"{NEW}; exit 0")
    assert chosen(new.parent)[0] == str(new)
    assert chosen(old.parent, CUDACXX=str(new))[0] == str(new)
    assert chosen(new.parent, CUDACXX=str(old))[0] == str(new)


def test_without_any_the_one_of_the_python_package_is_taken(chosen):
    found, said = chosen()
    assert found.endswith(PACKAGED) and "passed over" not in said
