"""Whether this process can run the CUDA kernels, and if not, why."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src import ffi as _ffi

COMPUTE_CAPABILITY = "9.0"
"""The kernels use instructions that only Hopper (sm_90a) has."""


def is_available() -> bool:
    """Whether a device of this process can run the kernels. Initialises JAX's backends."""
    return unavailable_reason() is None


def unavailable_reason() -> str | None:
    """What is missing to run the kernels, None if nothing is. Initialises JAX's backends."""
    reason = _ffi.missing_extension_reason()
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
    """Why `device` cannot run the kernels, None if it can."""
    capability = getattr(device, "compute_capability", None)
    if capability == COMPUTE_CAPABILITY:
        return None
    return (
        f"the kernels need a GPU of compute capability {COMPUTE_CAPABILITY}, got "
        f"{device.device_kind} ({device.platform}, compute capability {capability})"
    )
