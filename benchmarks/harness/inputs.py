"""Makes random operands and group sizes on the device, which the ops of a shape share."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import check
from benchmarks.harness.cases import Case, Problem, Shape, tensor_shape


class Inputs:
    """The tensors of one shape, drawn on the device when an op first needs them.

    They are normally distributed, because with constant data the tensor cores draw less power and
    clock higher, which would flatter every number.
    """

    def __init__(self, shape: Shape, dtype: str, seed: int):
        self._shape = shape
        self._dtype = dtype
        # XLA's own generator compiles faster than threefry and fills gigabytes in milliseconds.
        self._key = jax.random.key(seed, impl="rbg")
        self._tensors: dict[str, jax.Array] = {}

    def operands(self, case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
        sizes = jnp.asarray(case.group_sizes)
        operands = self._tensor(case.op.lhs), self._tensor(case.op.rhs), sizes
        return jax.block_until_ready(operands)

    def reference(self, case: Case, operands: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the float32 result of a case for the operands that `operands` returned."""
        return check.reference(case.problem, *operands)

    def _tensor(self, name: str) -> jax.Array:
        if name not in self._tensors:
            key = jax.random.fold_in(self._key, zlib.crc32(name.encode()))
            dims = tensor_shape(self._shape, name)
            self._tensors[name] = _normal(key, dims, self._dtype)
        return self._tensors[name]


class LatestInputs:
    """The inputs of one shape at a time. It frees old tensors before it makes new tensors."""

    def __init__(self, make: Callable[[Any], Any]):
        self._make = make
        self._shape: Any = None
        self._inputs: Any = None

    def of(self, shape: Any) -> Any:
        if self._shape != shape:
            self._inputs = None
            self._inputs, self._shape = self._make(shape), shape
        return self._inputs


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, dims: tuple[int, ...], dtype: str) -> jax.Array:
    # Draw in float32, because a draw in bfloat16 has only a few hundred distinct values.
    return jax.random.normal(key, dims, jnp.float32).astype(dtype)


def abstract_operands(
    problem: Problem,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of lhs, rhs and group sizes, to compile without allocating them."""
    if problem.contracting:
        rhs = (problem.m, problem.n)
    elif problem.transpose_rhs:
        rhs = (problem.groups, problem.n, problem.k)
    else:
        rhs = (problem.groups, problem.k, problem.n)
    return (
        jax.ShapeDtypeStruct((problem.m, problem.k), problem.dtype),
        jax.ShapeDtypeStruct(rhs, problem.dtype),
        jax.ShapeDtypeStruct((problem.groups,), jnp.int32),
    )
