"""A process that multiplies on the device until its input is closed, then prints how often."""

from __future__ import annotations

import select
import sys

import jax
import jax.numpy as jnp


@jax.jit
def multiply(x: jax.Array) -> jax.Array:
    """Some milliseconds of work for the whole device."""
    return jax.lax.fori_loop(0, 8, lambda _, y: y @ x / len(x), x)


def main(side: int) -> None:
    """Prints "ready" and, at the end, the number of rounds."""
    x = jnp.ones((side, side), jnp.bfloat16)
    multiply(x).block_until_ready()
    print("ready", flush=True)
    rounds = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        multiply(x).block_until_ready()
        rounds += 1
    print(rounds)


if __name__ == "__main__":
    main(8192 if jax.default_backend() == "gpu" else 256)
