"""Importing the package with an extension that is missing, broken, or built for another XLA."""

import subprocess
import sys
import types

import pytest

from jax_grouped_gemm._src.extension import installed_ffi_api_version, register_targets

EXTENSION = "jax_grouped_gemm._extension"


@pytest.fixture
def load(monkeypatch):
    """Returns a function that loads a module in place of the extension."""

    def load_in_place(module):
        monkeypatch.setitem(sys.modules, EXTENSION, module)
        return register_targets.__wrapped__()

    return load_in_place


def extension(major: int, minor: int) -> types.ModuleType:
    module = types.ModuleType(EXTENSION)
    module.ffi_api_version = lambda: (major, minor)
    module.registrations = dict
    return module


def test_missing(load):
    assert "not installed" in load(None)


def test_of_this_version_or_older(load):
    major, minor = installed_ffi_api_version()
    assert load(extension(major, minor)) is None
    assert load(extension(major, minor - 1)) is None


@pytest.mark.parametrize("major, minor", [(0, 1), (1, 0)])
def test_of_a_newer_version(load, major, minor):
    installed_major, installed_minor = installed_ffi_api_version()
    with pytest.raises(ImportError, match=f"{installed_major}.{installed_minor}"):
        load(extension(installed_major + major, installed_minor + minor))


def test_import_of_the_package_fails_before_the_backend_breaks():
    program = f"""
import sys, types
module = types.ModuleType({EXTENSION!r})
module.ffi_api_version = lambda: (0, 999)
sys.modules[{EXTENSION!r}] = module
try:
    import jax_grouped_gemm
except ImportError as error:
    assert "0.999" in str(error) and "jaxlib" in str(error), error
else:
    raise AssertionError("imported")
import jax
print(jax.numpy.ones(3).sum())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "3.0"
