"""The boundary to the compiled extension: loading it and registering what it has."""

from __future__ import annotations

import functools
import importlib
import pathlib
import re

import jax
import jaxlib

EXTENSION = "jax_grouped_gemm._extension"


def missing_extension_reason() -> str | None:
    """Why the kernels are not registered with JAX, None if they are."""
    return register_targets()


@functools.cache
def register_targets() -> str | None:
    """Registers the custom calls of the compiled extension with JAX, once.

    Returns:
      Why that is impossible, or None.

    Raises:
      ImportError: the extension was built for a newer XLA than the installed one. Registering it
        would make every CUDA computation of the process fail.
    """
    try:
        extension = importlib.import_module(EXTENSION)
    except ModuleNotFoundError as error:
        if error.name != EXTENSION:
            return f"the extension module {EXTENSION} cannot be imported: {error}"
        return f"the extension module {EXTENSION} is not installed"
    except ImportError as error:
        return f"the extension module {EXTENSION} cannot be loaded: {error}"
    _check_ffi_api_version(extension.ffi_api_version())
    for target, handler in extension.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")
    return None


def _check_ffi_api_version(built: tuple[int, int]) -> None:
    supported = installed_ffi_api_version()
    # XLA runs handlers of its own major version that are as old as itself or older.
    if built[0] != supported[0] or built[1] > supported[1]:
        raise ImportError(
            f"{EXTENSION} was built for version {built[0]}.{built[1]} of XLA's FFI API, but jaxlib "
            f"{jaxlib.__version__} supports {supported[0]}.{supported[1]}. Upgrade jaxlib, or "
            "reinstall jax-grouped-gemm from source against the installed jaxlib."
        )


def installed_ffi_api_version() -> tuple[int, int]:
    """Version of the XLA FFI API that the installed jaxlib implements: (major, minor)."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])
