"""The compiled extension, and whether its kernels run on a device."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pathlib
import re

import jax
import jax.numpy as jnp
import jaxlib

CAPABILITIES = ("9.0",)
"""The compute capabilities that kernels are compiled for."""


def is_available() -> bool:
    """Returns whether a device of this process can run the kernels. Initialises JAX's backends."""
    return unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Returns why the kernels cannot run, None if they can. Initialises JAX's backends."""
    reason = missing_extension_reason()
    if reason:
        return reason
    try:
        devices = jax.devices("cuda")
    except RuntimeError as error:
        return f"JAX has no CUDA device: {error}"
    reasons = [unsuitable_device_reason(device) for device in devices]
    return None if None in reasons else reasons[0]


def default_device() -> jax.Device:
    """Returns the device on which JAX puts new arrays. Initialises JAX's backends."""
    with jax.ensure_compile_time_eval():
        return jnp.zeros(()).addressable_shards[0].device


def unsuitable_device_reason(device: jax.Device) -> str | None:
    """Returns why `device` cannot run the kernels, None if it can."""
    capability = getattr(device, "compute_capability", None)
    if capability in CAPABILITIES:
        return None
    return (
        f"the kernels need a GPU of compute capability {', '.join(CAPABILITIES)}, got "
        f"{device.device_kind} ({device.platform}, compute capability {capability})"
    )


EXTENSION = "jax_grouped_gemm._extension"


def missing_extension_reason() -> str | None:
    """Returns why the kernels are not registered with JAX, None if they are."""
    return register_targets()


@functools.cache
def register_targets() -> str | None:
    """Registers the custom calls of the compiled extension with JAX, once.

    Returns:
      Why the extension cannot be imported, or None if it is registered.

    Raises:
      ImportError: the extension was built for a newer XLA than the installed one. Registering it
        would make every CUDA computation of the process fail.
    """
    try:
        extension = importlib.import_module(EXTENSION)
    except ModuleNotFoundError as error:
        if error.name != EXTENSION:
            return f"the extension module {EXTENSION} cannot be imported: {error}"
        return f"the extension module {EXTENSION} is not installed{_without_kernels()}"
    except ImportError as error:
        return f"the extension module {EXTENSION} cannot be loaded: {error}"
    _check_ffi_api_version(extension.ffi_api_version())
    for target, handler in extension.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")
    return None


def _without_kernels() -> str:
    """Says whether the installed package was built without kernels, and how to get them."""
    try:
        wheel = importlib.metadata.distribution("jax-grouped-gemm").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""
    # A wheel with compiled kernels is not pure Python.
    if "Root-Is-Purelib: true" not in wheel:
        return ""
    return (
        ": this installation was built without kernels (JGG_KERNELS=OFF). To build them, on Linux, "
        "install the package again without that setting"
    )


def _check_ffi_api_version(built: tuple[int, int]) -> None:
    supported = installed_ffi_api_version()
    # XLA runs handlers of its own major version whose minor version is not newer.
    if built[0] != supported[0] or built[1] > supported[1]:
        raise ImportError(
            f"{EXTENSION} was built for version {built[0]}.{built[1]} of XLA's FFI API, but jaxlib "
            f"{jaxlib.__version__} supports {supported[0]}.{supported[1]}. Upgrade jaxlib, or "
            "reinstall jax-grouped-gemm from source against the installed jaxlib."
        )


def installed_ffi_api_version() -> tuple[int, int]:
    """Returns (major, minor) of the XLA FFI API that the installed jaxlib implements."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])
