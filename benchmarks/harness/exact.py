"""Draws operands and computes float64 references without compiling a program for each shape.

PyTorch does this on a GPU, because its kernels take any shape. On other devices, or without
PyTorch, NumPy does it. The type `Any` stands for arrays of JAX, PyTorch or NumPy.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.cases import Problem, row_ranges
from benchmarks.harness.check import Error
from benchmarks.harness.peer import Call, as_torch, on_gpu
from benchmarks.harness.recorders import in_primary_context

NAN_BYTE = 0xFF  # a number with only such bytes is NaN, in all formats


def by_torch() -> bool:
    return on_gpu() and importlib.util.find_spec("torch") is not None


def normal(shape: Sequence[int], dtype: str, seed: Sequence[int]) -> jax.Array:
    """Returns normally distributed numbers, drawn in float32 at least."""
    seeds = np.random.SeedSequence(seed)
    if not by_torch():
        rng = np.random.default_rng(seeds)
        drawn = rng.standard_normal(shape)
        if dtype.startswith("complex"):
            drawn = drawn + 1j * rng.standard_normal(shape)
        return jnp.asarray(drawn, dtype)
    import torch

    generator = torch.Generator("cuda").manual_seed(int(seeds.generate_state(1)[0]))
    drawn = "float32" if dtype in ("bfloat16", "float16") else dtype
    array = torch.randn(
        tuple(shape), generator=generator, device="cuda", dtype=getattr(torch, drawn)
    ).to(getattr(torch, dtype))
    torch.cuda.synchronize()
    return jax.dlpack.from_dlpack(array)


def wide(x: Any) -> Any:
    """Returns x in float64 or complex128, as a tensor on the GPU or a NumPy array."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    if not by_torch():
        return np.asarray(x).astype(np.complex128 if is_complex else np.float64)
    import torch

    array = jnp.asarray(x) if isinstance(x, np.ndarray) else x
    return as_torch(array).to(torch.complex128 if is_complex else torch.float64)


def poison(result: Any) -> None:
    """Fills the memory of a result on the GPU with NaN.

    The next run most likely gets the same memory. An element that it does not write is then NaN,
    and not the right value of the previous run.
    """
    if not on_gpu():
        return
    driver = ctypes.CDLL("libcuda.so.1")
    calls: list[Callable[[], int]] = []
    for array in jax.tree.leaves(result):
        if not array.nbytes:
            continue
        of_jax = isinstance(array, jax.Array)
        address = array.unsafe_buffer_pointer() if of_jax else array.data_ptr()
        whole = ctypes.c_uint64(address), NAN_BYTE, ctypes.c_size_t(array.nbytes)
        calls.append(functools.partial(driver.cuMemsetD8_v2, *whole))
    in_primary_context(driver, "filling results with NaN", *calls, driver.cuCtxSynchronize)


def judged(measure: Callable[[Any], Error], is_good: Callable[[Error, Call], bool]):
    """Returns a judge, which runs a call twice, the second time into memory filled with NaN."""

    def judge(call: Call) -> tuple[Error, bool]:
        first = call.run()
        call.wait(first)
        poison(first)
        del first
        result = call.run()
        call.wait(result)
        error = measure(call.to_jax(result))
        return error, is_good(error, call)

    return judge


def ragged_product(problem: Problem, lhs: Any, rhs: Any, sizes: np.ndarray) -> Any:
    """Returns the ragged product of a `Problem` in float64."""
    lhs, rhs = wide(lhs), wide(rhs)
    ranges = row_ranges(sizes)
    if problem.contracting:
        return _module(lhs).stack([lhs[a:b].T @ rhs[a:b] for a, b in ranges])
    products = [
        lhs[a:b] @ (rhs[group].T if problem.transpose_rhs else rhs[group])
        for group, (a, b) in enumerate(ranges)
    ]
    return _module(lhs).concatenate(products)


def row_errors(out: Any, exact: Any) -> Error:
    """Returns the errors of the whole and of the worst row, like `harness.check.compare`."""
    return Error(_relative(out := wide(out), exact, whole=True), _relative(out, exact, whole=False))


def _relative(out: Any, exact: Any, *, whole: bool) -> float:
    squares, scales = (abs(out - exact) ** 2, abs(exact) ** 2)
    error, scale = (x.sum() if whole else x.sum(-1) for x in (squares, scales))
    # A result that must be exactly zero has no scale.
    ratios = error / (scale + (scale == 0)) + (scale == 0) * error * 1e300
    return float(ratios.max() ** 0.5)


def triangles(a: Any, b: Any | None) -> Any:
    """Returns the lower triangles of A A^H, or of A B^H + B A^H."""
    a = wide(a)
    if b is None:
        product = a @ _flipped(a)
    else:
        product = a @ _flipped(b := wide(b))
        product = product + _flipped(product)
    return _module(a).tril(product)


def triangle_error(out: Any, exact: Any) -> Error:
    """Returns the errors of lower triangles. Sums of short rows may cancel, so the error of a row
    is relative to the norm of a typical row of its length, if that is larger."""
    n = exact.shape[-1]
    difference = abs(_module(exact).tril(wide(out)) - exact)
    squares = (abs(exact) ** 2).sum(-1)
    whole = float(squares.sum()) ** 0.5
    typical = whole / (exact.shape[0] * n * (n + 1) / 2) ** 0.5
    least = wide(typical * np.sqrt(1 + np.arange(n, dtype=np.float64)))
    scale = _module(exact).maximum(squares**0.5, least)
    errors = (difference**2).sum(-1)
    return Error(float(errors.sum()) ** 0.5 / whole, float((errors**0.5 / scale).max()))


def list_products(lhs: Sequence[Any], rhs: Sequence[Any]) -> list[Any]:
    return [wide(a) @ wide(b) for a, b in zip(lhs, rhs, strict=True)]


def list_error(outs: Sequence[Any], exact: Sequence[Any]) -> Error:
    """Returns the worst problem's largest error over its largest element; NaN is the worst."""
    errors = [
        float(abs(wide(out) - each).max() / abs(each).max())
        for out, each in zip(outs, exact, strict=True)
    ]
    return Error(float(np.max(errors)))


def _flipped(x: Any) -> Any:
    return x.swapaxes(-1, -2).conj()


def _module(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np
    import torch

    return torch
