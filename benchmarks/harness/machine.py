"""Describes the machine of a result: GPU, clocks, versions, commit."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

# Benchmarks read these properties of the card and never set them.
_GPU_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "clocks_event_reasons.active",
)
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("jax-grouped-gemm", "numpy", "torch"),
)
_OPTIONAL_PEERS = ("tokamax", "quack-kernels", "nvidia-cublas", "nvidia-cudnn-cu13")


def gpu_state() -> dict[str, str] | None:
    """Returns name, clocks (MHz), temperature (C) and power (W) of the first GPU, None without."""
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    line = _output("nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0")
    if line is None:
        return None
    return dict(zip(_GPU_FIELDS, map(str.strip, line.split(",")), strict=True))


def versions() -> dict[str, object]:
    found = {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL_PEERS)}
    return {
        "python": platform.python_version(),
        "packages": {name: version for name, version in found.items() if version},
    }


def commit(given: str | None = None) -> str | None:
    return given or _output("git", "describe", "--always", "--dirty", "--abbrev=12")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
