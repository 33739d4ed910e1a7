"""Options of XLA with which devices send while they compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh

COPY_ENGINES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
SUMS_IN_FLIGHT = {"xla_gpu_experimental_parallel_collective_overlap_limit": "16"}


def expert_parallel_compiler_options(devices: Mesh | Iterable[Any] | None = None) -> dict[str, str]:
    """Options of `jax.jit` with which the copy engines of GPUs send what a ppermute sends.

    A layer over two devices sends its tokens and results by ppermutes. NCCL does that by kernels,
    which take multiprocessors from products and wait for places that products have taken; copy
    engines are faster, and leave products alone. XLA asks only once a program, so that it is for
    whoever compiles the whole step to say:

        step = jax.jit(train_step, compiler_options=moe.expert_parallel_compiler_options(mesh))

    The same as XLA_FLAGS=--xla_gpu_collective_permute_mode=peer in the environment. GPUs that
    cannot reach each other's memory, and those of other processes, still use NCCL.

    Args:
      devices: a mesh or devices for which a program is compiled; by default those of JAX's default
        backend.

    Returns:
      The options; none unless all devices are NVIDIA GPUs.
    """
    return COPY_ENGINES.copy() if _are_gpus(devices) else {}


def data_parallel_compiler_options(devices: Mesh | Iterable[Any] | None = None) -> dict[str, str]:
    """Options of `jax.jit` with which gradients are summed over GPUs while others are computed.

    By default XLA has one collective in flight at a time, and so leaves the sums of all gradients
    to the end of a step, where nothing hides them. With these options each sum starts when its
    gradient is there:

        step = jax.jit(train_step, compiler_options=moe.data_parallel_compiler_options(mesh))

    The same as XLA_FLAGS=--xla_gpu_experimental_parallel_collective_overlap_limit=16.

    Args:
      devices: a mesh or devices for which a program is compiled; by default those of JAX's default
        backend.

    Returns:
      The options; none unless all devices are NVIDIA GPUs.
    """
    return SUMS_IN_FLIGHT.copy() if _are_gpus(devices) else {}


def _are_gpus(devices: Mesh | Iterable[Any] | None) -> bool:
    if isinstance(devices, Mesh):
        devices = devices.devices.flat
    found = jax.devices() if devices is None else list(devices)
    # A GPU that is only described, to compile for it, has the platform's other name.
    return bool(found) and all(device.platform in ("gpu", "cuda") for device in found)
