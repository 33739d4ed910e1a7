"""Measures the speed of memory alone: of a large copy on the device, and of writing alone.

If the result is nearly all of a problem's traffic, the speed of writing is the bound.
"""

import ctypes
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.harness.peer import (
    Call,
    NotOffered,
    Peer,
    Role,
    TorchCall,
    jax_call,
    missing_module,
    on_gpu,
    once,
    without_gpu,
)


def buffer_bytes() -> int:
    """Returns the size of the array that is copied or filled.

    On a GPU it is much larger than the L2 cache, and takes much longer than a launch.
    """
    return 2**30 if on_gpu() else 2**22


_copy = jax.jit(jnp.copy)


def copy_call() -> Call:
    return jax_call(_copy, jnp.arange(buffer_bytes() // 4, dtype=jnp.uint32))


def memset_call() -> Call:
    """Returns a call that writes `buffer_bytes()` with the driver's memory set."""
    # XLA's own kernels for this are much slower than memory allows.
    if reason := missing_module("torch") or without_gpu():
        raise NotOffered(reason)
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    arguments = ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
    driver.cuMemsetD8Async.argtypes = arguments
    buffer = torch.empty(buffer_bytes(), dtype=torch.uint8, device="cuda")

    def run():
        # Use the legacy default stream, which is PyTorch's stream.
        if error := driver.cuMemsetD8Async(buffer.data_ptr(), 0x5A, buffer_bytes(), None):
            raise RuntimeError(f"cuMemsetD8Async: CUDA driver error {error}")
        return buffer

    return once(TorchCall(run))


def moved_bytes(name: str) -> int:
    """Returns the bytes that a call of `copy` or `memset` reads and writes together."""
    return buffer_bytes() * (2 if name == "copy" else 1)


class Bandwidth(Peer):
    """A peer whose work is the same for every problem."""

    role = Role.BANDWIDTH

    def __init__(self, name: str, call: Callable[[], Call]):
        self.name = name
        self._call = call

    def prepare(self, problem, *operands):
        return self._call()


def bandwidth_peers() -> tuple[Bandwidth, ...]:
    """Returns a copy, and the driver's memory set."""
    return Bandwidth("copy", copy_call), Bandwidth("memset", memset_call)
