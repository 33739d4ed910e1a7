"""cuBLAS's symmetric updates, with a call of its library for each matrix.

Neither JAX nor PyTorch calls these functions.
"""

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.peer import Call, EnqueuedCall, NotOffered, Peer, Role, once
from benchmarks.harness.recorders import load_library

UPPER, TRANSPOSED, CONJUGATED = 1, 1, 2
# Letters in the functions' names, by dtype.
LETTERS = {"float32": "S", "float64": "D", "complex64": "C", "complex128": "Z"}


@functools.cache
def _cublas() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Returns the library and a handle."""
    try:
        library = load_library("libcublas.so.13", "libcublas.so.12")
    except OSError as error:
        raise NotOffered(str(error)) from error
    handle = ctypes.c_void_p()
    _succeed(library.cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
    return library, handle


def _succeed(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: cuBLAS error {status}")


class CublasSymmetric(Peer):
    """A peer of `benchmarks.rank_k` that calls cuBLAS once for each matrix."""

    name = "cublas_loop"
    role = Role.LOOP
    needs = ("GPU",)

    def prepare(self, update, a, b):
        return loop(a, b if update.two_operands else None, update.hermitian)


def loop(a: jax.Array, b: jax.Array | None, hermitian: bool) -> Call:
    """Returns a call of syrk or herk, or with `b` of syr2k or her2k, for each matrix of a stack.

    Operands are [g, n, k]. Every run writes the lower triangles of the same result [g, n, n].
    """
    dtype = str(a.dtype)
    if dtype not in LETTERS:
        raise NotOffered(f"cuBLAS has no symmetric update of {dtype}")
    library, handle = _cublas()
    g, n, k = a.shape
    name = f"cublas{LETTERS[dtype]}{'he' if hermitian else 'sy'}r{'k' if b is None else '2k'}_v2"
    function = getattr(library, name)
    real = np.zeros((), dtype).real.dtype
    # A Hermitian rank-k update has a real alpha, and both Hermitian updates a real beta.
    alpha = np.ones((), real if hermitian and b is None else dtype)
    beta = np.zeros((), real if hermitian else dtype)
    out = jnp.zeros((g, n, n), dtype)
    operands = [x for x in (a, b) if x is not None]
    jax.block_until_ready((out, *operands))

    def matrix(x: jax.Array, index: int) -> ctypes.c_void_p:
        size = x.shape[1] * x.shape[2] * x.dtype.itemsize
        return ctypes.c_void_p(x.unsafe_buffer_pointer() + index * size)

    def arguments(index: int) -> list:
        # cuBLAS matrices are column-major, so operands are k x n, and the triangle is the upper.
        given = [handle, UPPER, CONJUGATED if hermitian else TRANSPOSED, n, k]
        given.append(ctypes.c_void_p(alpha.ctypes.data))
        for x in operands:
            given += [matrix(x, index), k]
        return [*given, ctypes.c_void_p(beta.ctypes.data), matrix(out, index), n]

    prepared = [arguments(index) for index in range(g)]

    def run() -> jax.Array:
        for each in prepared:
            _succeed(function(*each), name)
        return out

    # The arrays have to live as long as the call, which has pointers to them.
    run.kept = (alpha, beta, *operands)
    return once(EnqueuedCall(run, f"{g} calls of {name}"))
