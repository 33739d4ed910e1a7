"""CUTLASS's own grouped kernels, in a library that `build.sh` compiles from CUTLASS's headers.

They are peers only. The package does not use them, and the library has no kernel of the package.
"""

import ctypes
import functools
import weakref
from collections.abc import Sequence
from pathlib import Path

LIBRARY = Path(__file__).with_name("libcutlass_peers.so")
BUILD = "benchmarks/cutlass/build.sh"


class Problem(ctypes.Structure):
    """A product or a symmetric update of matrices in device memory (`plan.h`)."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("m", "n", "k")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "out")),
    )


def unavailable_reason() -> str | None:
    return None if LIBRARY.exists() else f"CUTLASS's kernels are not built: run {BUILD}"


@functools.cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(LIBRARY))
    found.jgg_cutlass_error.restype = ctypes.c_char_p
    found.jgg_cutlass_make.argtypes = (
        ctypes.c_char_p,
        ctypes.POINTER(Problem),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_void_p),
    )
    found.jgg_cutlass_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    found.jgg_cutlass_free.argtypes = (ctypes.c_void_p,)
    found.jgg_cutlass_free.restype = None
    return found


class Plan:
    """A kernel and its problems, after all work that CUTLASS does once for a list.

    Args:
      kernel: a name in `kernels.h`.
      problems: the problems. Their memory has to live as long as the plan.
      sort: whether to sort problems by descending k, as CUTLASS's `sort_problems` does.

    Raises:
      RuntimeError: CUTLASS refuses the problems. The message has the reason.
    """

    def __init__(self, kernel: str, problems: Sequence[Problem], sort: bool = False):
        self._library = library()
        plan = ctypes.c_void_p()
        listed = (Problem * len(problems))(*problems)
        self._succeed(
            self._library.jgg_cutlass_make(
                kernel.encode(), listed, len(problems), sort, ctypes.byref(plan)
            ),
            kernel,
        )
        self._plan = plan
        weakref.finalize(self, self._library.jgg_cutlass_free, plan)

    def run(self) -> None:
        self._succeed(self._library.jgg_cutlass_run(self._plan, None), "launch")

    def _succeed(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what}: {self._library.jgg_cutlass_error().decode()}")
