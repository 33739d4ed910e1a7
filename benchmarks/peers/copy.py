"""A large copy on the device: the memory bandwidth that this machine reaches in this run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.cases import Problem
from benchmarks.peers.base import Call, Role, jax_call, on_gpu


def copy_bytes() -> int:
    """Size of the copied array.

    On a GPU it is far past the L2 cache and takes long enough that a launch's fixed cost is lost in
    it; a CPU's bandwidth is of no interest here.
    """
    return 2**30 if on_gpu() else 2**22


_copy = jax.jit(jnp.copy)


def copy_call() -> Call:
    """A call that reads `copy_bytes()` and writes as many."""
    return jax_call(_copy, jnp.arange(copy_bytes() // 4, dtype=jnp.uint32))


class Copy:
    """The same work for every problem."""

    name = "copy"
    role = Role.BANDWIDTH
    slow = False

    def unavailable_reason(self) -> str | None:
        """Always available."""
        return None

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Allocates the source."""
        return copy_call()
