"""An installation without kernels: its downloads, its files and its messages."""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from jax_grouped_gemm._src import extension

pytest.importorskip("scikit_build_core", reason="the build requirements are not installed")

import build_backend  # noqa: E402 - found through `pythonpath` of pyproject.toml

ROOT = Path(__file__).parents[2]
SETTING = "cmake.define.JGG_KERNELS"


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """Imitates a machine without a compiler, CMake and headers."""
    monkeypatch.chdir(ROOT)
    for name in ("CXX", "CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))


@pytest.mark.parametrize(
    "hook",
    [
        build_backend.get_requires_for_build_wheel,
        build_backend.get_requires_for_build_editable,
    ],
    ids=lambda hook: hook.__name__,
)
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_nothing_is_downloaded_for_the_build(hook, system, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    assert hook({SETTING: "OFF"}) == []


@pytest.mark.parametrize("value", ["OFF", "off", "0", "FALSE", "No"])
@pytest.mark.parametrize(
    "given", ["setting", "arguments", "SKBUILD_CMAKE_DEFINE", "CMAKE_ARGS", "typed"]
)
def test_ways_to_say_it(monkeypatch, given, value):
    assert build_backend.kernels()
    settings = {}
    if given == "setting":
        settings[SETTING] = value
    elif given == "arguments":
        settings["cmake.args"] = f"-DJGG_KERNELS={value}"
    elif given == "SKBUILD_CMAKE_DEFINE":
        monkeypatch.setenv(given, f"JGG_NVCC_JOBS=2;JGG_KERNELS={value}")
    else:
        type_ = ":BOOL" if given == "typed" else ""
        monkeypatch.setenv("CMAKE_ARGS", f"-DJGG_NVCC_JOBS=2 -DJGG_KERNELS{type_}={value}")
    assert not build_backend.kernels(settings)


def test_settings_count_before_the_environment(monkeypatch):
    monkeypatch.setenv("CMAKE_ARGS", "-DJGG_KERNELS=OFF")
    assert build_backend.kernels({SETTING: "ON"})


@pytest.fixture
def build(tmp_path):
    """Returns a function that builds a wheel with a hook, and returns the path of the wheel."""

    def build_of_kind(hook):
        folder = tmp_path / "dist"
        folder.mkdir()
        return folder / hook(str(folder), {SETTING: "OFF"})

    return build_of_kind


def test_the_wheel_is_for_every_machine_and_has_all_modules(build):
    wheel = build(build_backend.build_wheel)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("jax_grouped_gemm/**/*.py")}
    assert sources <= names
    assert not any(name.endswith((".so", ".cu.log")) for name in names)


def test_an_editable_wheel_is_for_every_machine(build):
    assert build(build_backend.build_editable).name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_the_installed_package_says_so(build, hook, tmp_path, monkeypatch):
    zipfile.ZipFile(build(getattr(build_backend, hook))).extractall(tmp_path / "site")
    (metadata,) = (tmp_path / "site").glob("*.dist-info")
    installed = importlib.metadata.Distribution.at(metadata)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    monkeypatch.setitem(sys.modules, extension.EXTENSION, None)
    reason = extension.register_targets.__wrapped__()
    assert "built without kernels (JGG_KERNELS=OFF)" in reason
    # A package with kernels whose extension is not found does not mention the setting.
    wheel = metadata / "WHEEL"
    wheel.write_text(wheel.read_text().replace("Purelib: true", "Purelib: false"))
    assert "JGG_KERNELS" not in extension.register_targets.__wrapped__()
