"""What memory alone allows: a large copy on the device, and writing as much without reading.

A result that is nearly all of a problem's traffic has its floor at the speed of writing.
"""

import ctypes
from collections.abc import Callable
from typing import Any

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
    """Size of the array that is copied or filled.

    On a GPU it is far past the L2 cache and takes long enough that a launch's fixed cost is lost in
    it; a CPU's bandwidth is of no interest here.
    """
    return 2**30 if on_gpu() else 2**22


_copy = jax.jit(jnp.copy)


def copy_call() -> Call:
    return jax_call(_copy, jnp.arange(buffer_bytes() // 4, dtype=jnp.uint32))


def _writing(start: Callable[[Any], object]) -> Call:
    """A call of `start` with a PyTorch tensor, of which it writes all `buffer_bytes()`."""
    # XLA's own kernels for this are far from what memory allows.
    if reason := missing_module("torch"):
        raise NotOffered(reason)
    import torch

    # Of four-byte elements, because PyTorch writes sixteen bytes at once only for those.
    buffer = torch.empty(buffer_bytes() // 4, device="cuda" if on_gpu() else "cpu")

    def run():
        start(buffer)
        return buffer

    return once(TorchCall(run))


def memset_call() -> Call:
    """A call that writes `buffer_bytes()` with the driver's memory set."""
    if reason := without_gpu():
        raise NotOffered(reason)
    driver = ctypes.CDLL("libcuda.so.1")
    arguments = ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
    driver.cuMemsetD8Async.argtypes = arguments

    def start(buffer):
        # On the legacy default stream, which is PyTorch's.
        if error := driver.cuMemsetD8Async(buffer.data_ptr(), 0x5A, buffer_bytes(), None):
            raise RuntimeError(f"cuMemsetD8Async: CUDA driver error {error}")

    return _writing(start)


def moved_bytes(name: str) -> int:
    """Bytes that one call of `copy`, `fill` or `memset` reads and writes, together."""
    return buffer_bytes() * (2 if name == "copy" else 1)


class Bandwidth(Peer):
    """The same work for every problem."""

    role = Role.BANDWIDTH

    def __init__(self, name: str, call: Callable[[], Call]):
        self.name = name
        self._call = call

    def prepare(self, problem, *operands):
        return self._call()


def bandwidth_peers() -> tuple[Bandwidth, ...]:
    """A copy, a kernel that only writes, and the driver's own memory set."""
    return (
        Bandwidth("copy", copy_call),
        Bandwidth("fill", lambda: _writing(lambda buffer: buffer.fill_(1.5))),
        Bandwidth("memset", memset_call),
    )
