"""The build names what a machine lacks before pip downloads compilers and headers."""

from __future__ import annotations

import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core", reason="the build requirements are not installed")

import build_backend  # noqa: E402 - found through `pythonpath` of pyproject.toml

ROOT = Path(__file__).parents[2]
HOOKS = (
    build_backend.get_requires_for_build_wheel,
    build_backend.get_requires_for_build_editable,
)


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Imitates a machine with a compiler and Python's headers, which tests can take away."""
    monkeypatch.chdir(ROOT)
    for name in ("CXX", "CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.delenv(name, raising=False)
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_complete_machine_is_asked_for_all_requirements(hook):
    assert build_backend.missing() == []
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["build"]
    assert set(group) <= set(hook())


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_all_that_is_missing_is_said_at_once(hook, machine):
    for name in ("g++", "Python.h"):
        (machine / name).unlink()
    with pytest.raises(SystemExit) as error:
        hook()
    compiler, headers, instead = str(error.value).splitlines()[1:]
    assert "JGG_KERNELS=OFF" in instead
    assert "No C++ compiler was found (c++, g++, clang++)" in compiler
    assert f"no Python.h in {machine}" in headers


def test_a_compiler_that_is_named_is_the_one_that_is_looked_for(machine, monkeypatch):
    monkeypatch.setenv("CXX", "clang++-18 -stdlib=libc++")
    (fault,) = build_backend.missing()
    assert "No C++ compiler was found (clang++-18)" in fault
    (machine / "g++").rename(machine / "clang++-18")
    assert build_backend.missing() == []


def test_another_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    (fault,) = build_backend.missing()
    assert "Linux only, and this is darwin" in fault


def test_what_is_given_to_cmake_is_not_looked_for(machine, monkeypatch):
    for name in ("g++", "Python.h"):
        (machine / name).unlink()
    settings = {"cmake.define.CMAKE_CXX_COMPILER": "/opt/g++", "cmake.define.Python_ROOT_DIR": "/p"}
    assert build_backend.missing(settings) == []
    monkeypatch.setenv("CMAKE_ARGS", "-DCMAKE_CXX_COMPILER=/opt/g++ -DPython_ROOT_DIR=/p")
    assert build_backend.missing() == []


def test_nothing_is_asked_of_who_makes_an_sdist(machine):
    (machine / "g++").unlink()
    assert build_backend.get_requires_for_build_sdist() == []


def test_only_the_backend_is_installed_before_it_looks():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = pyproject["build-system"]["requires"]
    assert requirement.startswith("scikit-build-core")
    assert requirement in pyproject["dependency-groups"]["build"]
