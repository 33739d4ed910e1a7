"""Options of XLA that let devices send while they compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh

COPY_ENGINES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
SUMS_IN_FLIGHT = {"xla_gpu_experimental_parallel_collective_overlap_limit": "16"}


def expert_parallel_compiler_options(devices: Mesh | Iterable[Any] | None = None) -> dict[str, str]:
    """Returns options of `jax.jit` with which copy engines of GPUs send the data of a ppermute.

    A layer over two devices sends its tokens and results by ppermutes. NCCL sends them with
    kernels, which take multiprocessors from products and wait while products occupy them. Copy
    engines are faster and need no multiprocessors. The option applies to a whole program, so pass
    it where you compile the step:

        step = jax.jit(train_step, compiler_options=moe.expert_parallel_compiler_options(mesh))

    XLA_FLAGS=--xla_gpu_collective_permute_mode=peer in the environment does the same. GPUs that
    cannot access each other's memory, and GPUs of other processes, still use NCCL.

    Args:
      devices: the devices for which a program is compiled, or their mesh. By default they are the
        devices of JAX's default backend.

    Returns:
      The options, an empty dictionary unless all devices are NVIDIA GPUs.
    """
    return COPY_ENGINES.copy() if _are_gpus(devices) else {}


def data_parallel_compiler_options(devices: Mesh | Iterable[Any] | None = None) -> dict[str, str]:
    """Returns options of `jax.jit` with which GPUs sum some gradients while they compute others.

    By default XLA runs one collective at a time, so the sums of all gradients come at the end of a
    step, where no computation overlaps with them. With these options each sum starts as soon as its
    gradient is ready:

        step = jax.jit(train_step, compiler_options=moe.data_parallel_compiler_options(mesh))

    XLA_FLAGS=--xla_gpu_experimental_parallel_collective_overlap_limit=16 does the same.

    Args:
      devices: the devices for which a program is compiled, or their mesh. By default they are the
        devices of JAX's default backend.

    Returns:
      The options, an empty dictionary unless all devices are NVIDIA GPUs.
    """
    return SUMS_IN_FLIGHT.copy() if _are_gpus(devices) else {}


def _are_gpus(devices: Mesh | Iterable[Any] | None) -> bool:
    if isinstance(devices, Mesh):
        devices = devices.devices.flat
    found = jax.devices() if devices is None else list(devices)
    # A GPU that is described for compiling ahead of time has another platform name than a real one.
    return bool(found) and all(device.platform in ("gpu", "cuda") for device in found)
