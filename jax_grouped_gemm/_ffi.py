"""The boundary to the compiled extension: loading it and registering what it has."""

from __future__ import annotations

import functools
import importlib
import pathlib
import re

import jax
import jaxlib
from jax import export

EXTENSION = "jax_grouped_gemm._extension"

TARGETS = {
    "ragged_noncontracting": "jax_grouped_gemm.ragged_noncontracting.v3",
    "ragged_contracting": "jax_grouped_gemm.ragged_contracting.v3",
    "ragged_accumulate": "jax_grouped_gemm.ragged_accumulate.v1",
    "grouped_gemm": "jax_grouped_gemm.grouped_gemm.v1",
    "grouped_gemm_f32": "jax_grouped_gemm.grouped_gemm_f32.v1",
    "grouped_gemm_fp64": "jax_grouped_gemm.grouped_gemm_fp64.v1",
    "rank_k": "jax_grouped_gemm.rank_k.v2",
    "rank_k_f32": "jax_grouped_gemm.rank_k_f32.v2",
    "rank_k_fp64": "jax_grouped_gemm.rank_k_fp64.v2",
    "scaled_ragged_noncontracting": "jax_grouped_gemm.scaled_ragged_noncontracting.v4",
    "scaled_ragged_contracting": "jax_grouped_gemm.scaled_ragged_contracting.v3",
    "quantize_rows": "jax_grouped_gemm.quantize_rows.v1",
    "quantize_blocks": "jax_grouped_gemm.quantize_blocks.v1",
    "quantize_ragged": "jax_grouped_gemm.quantize_ragged.v1",
}

EXPORT_DISABLED_CHECKS = tuple(
    export.DisabledSafetyCheck.custom_call(target) for target in TARGETS.values()
)
"""Pass to `jax.export.export(..., disabled_checks=)` to export programs that call the kernels.

A target's name ends in the version of its operands and attributes, so an exported program runs
wherever that version of the target is registered.
"""


@functools.cache
def missing_extension_reason() -> str | None:
    """Registers the kernels with JAX on the first call. Returns why it could not, or None.

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
