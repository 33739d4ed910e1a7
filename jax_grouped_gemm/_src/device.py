"""The GPU: which one a plan is made for, how fast it is, and whether kernels run on one here.

A kernel takes the larger of what multiplying and what moving bytes would take. Rates are those that
an H200 sustains, whose clock falls while all tensor cores are busy. Other chips differ in the
number of their multiprocessors, and in clock and memory, which is not known here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import pathlib
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a chip sustains, by default an H200.

    The tensor cores' rates and the memory's are those of large products and large copies in
    benchmarks/results, those of XLA's float32 products are in h200_rank_k.json.

    Attributes:
      multiprocessors: of the chip that has these rates; others multiply in proportion to theirs.
      sixteen_bits, eight_bits, fp64: multiply-adds a second of operands of these sizes.
      tf32, float32: those of XLA's float32 products, at the default precision and exact.
      bandwidth: bytes a second of its memory.
    """

    multiprocessors: int = 132
    sixteen_bits: float = 390e12
    eight_bits: float = 680e12
    fp64: float = 30e12
    tf32: float = 170e12
    float32: float = 24e12
    bandwidth: float = 4.2e12


ARCHITECTURES = {"9.0": "sm90"}
"""The architectures that kernels are compiled for, by compute capability."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a plan is made for, by default an H200.

    An H100 SXM and a GH200 have as many multiprocessors.

    Attributes:
      multiprocessors: how many it has.
      arch: which instructions it has.
      rates: how fast it is.
    """

    multiprocessors: int = 132
    arch: str = "sm90"
    rates: Rates = dataclasses.field(default=Rates(), repr=False)

    def __post_init__(self) -> None:
        if self.multiprocessors < 1:
            raise ValueError(f"multiprocessors must be positive, got {self.multiprocessors}")

    @classmethod
    def of(cls, device: Any) -> Target:
        """Describes a `jax.Device`, which may be one that is described only, to compile for it."""
        count = getattr(device, "core_count", None)
        return cls(count) if count else H200

    def multiply_adds(self, dtype: np.dtype) -> float:
        """Multiply-adds a second of operands of `dtype`; float32 ones are multiplied in parts."""
        rates, dtype = self.rates, np.dtype(dtype)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            rate = rates.fp64 / 4  # of complex numbers, each product is four
        elif dtype.itemsize == 8:
            rate = rates.fp64
        else:
            rate = rates.eight_bits if dtype.itemsize == 1 else rates.sixteen_bits
        return rate * (self.multiprocessors / rates.multiprocessors)


H200 = Target()


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The bounds of a kernel's time.

    Attributes:
      tensor_seconds: what the tensor cores take, those idle included that have no tile.
      memory_seconds: what reading every operand and writing every result once takes.
      split_seconds: what splitting float32 operands into parts takes before.
    """

    tensor_seconds: float
    memory_seconds: float
    split_seconds: float = 0.0

    @property
    def bound(self) -> Literal["tensor cores", "memory"]:
        """Which takes longer."""
        return "tensor cores" if self.tensor_seconds >= self.memory_seconds else "memory"

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.split_seconds + max(self.tensor_seconds, self.memory_seconds)

    def __str__(self) -> str:
        us = self.seconds * 1e6
        time = f"{us:.3g} us" if us < 999.5 else f"{us / 1e3:.3g} ms"
        return f"predicted time {time}, bound by {_WITH_ARTICLE[self.bound]}"


_WITH_ARTICLE = {"tensor cores": "the tensor cores", "memory": "memory"}


def predict(
    dtype: np.dtype,
    *,
    multiply_adds: float,
    utilization: float,
    num_bytes: float,
    target: Target,
    products: int = 1,
    split_bytes: float = 0,
) -> Prediction:
    """The bounds of a kernel on `target`.

    Args:
      dtype: of the operands.
      multiply_adds: pairs of elements to be multiplied.
      utilization: share of the tensor cores' work that is useful.
      num_bytes: what is read and written.
      target: the device.
      products: products of 16-bit parts for one of float32.
      split_bytes: what is read and written before, to split float32 operands.
    """
    rate = target.multiply_adds(dtype) * utilization
    return Prediction(
        tensor_seconds=multiply_adds * products / rate if multiply_adds else 0.0,
        memory_seconds=num_bytes / target.rates.bandwidth,
        split_seconds=split_bytes / target.rates.bandwidth,
    )


def is_available() -> bool:
    """Whether a device of this process can run the kernels. Initialises JAX's backends."""
    return unavailable_reason() is None


def unavailable_reason() -> str | None:
    """What is missing to run the kernels, None if nothing is. Initialises JAX's backends."""
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
    """Why `device` cannot run the kernels, None if it can."""
    capability = getattr(device, "compute_capability", None)
    if capability in ARCHITECTURES:
        return None
    return (
        f"the kernels need a GPU of compute capability {', '.join(ARCHITECTURES)}, got "
        f"{device.device_kind} ({device.platform}, compute capability {capability})"
    )


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
        return f"the extension module {EXTENSION} is not installed{_without_kernels()}"
    except ImportError as error:
        return f"the extension module {EXTENSION} cannot be loaded: {error}"
    _check_ffi_api_version(extension.ffi_api_version())
    for target, handler in extension.registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")
    return None


def _without_kernels() -> str:
    """That the installed package was built without the kernels, and how to get them, if it was."""
    try:
        wheel = importlib.metadata.distribution("jax-grouped-gemm").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""
    # The wheel has a platform if the build compiled anything.
    if "Root-Is-Purelib: true" not in wheel:
        return ""
    return (
        ": this installation was built without kernels (JGG_KERNELS=OFF). To build them, on Linux, "
        "install the package again without that setting"
    )


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
