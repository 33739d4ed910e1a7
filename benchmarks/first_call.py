"""Times the first product of a fresh process: `python -m benchmarks.first_call`.

JAX is started and has run something before, so that what is left is what our library adds.
"""

from __future__ import annotations

import functools
import json
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks.cases import Problem
from benchmarks.peers.base import on_gpu


def seconds(function):
    """The function's result and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def first_call(problem: Problem) -> dict[str, float]:
    """Seconds of each step from the import to the first result, and of a second call.

    `import_s`: our library, with JAX imported. `trace_s`: tracing and lowering of the jitted
    product. `compile_s`: XLA. `run_s`: the first execution, which loads our kernels onto the
    device. `first_call_s`: these three, what a first jitted call takes. `second_call_s`: the same
    call again.
    """
    operands = jax.block_until_ready(
        (
            jnp.ones((problem.m, problem.k), problem.dtype),
            jnp.ones((problem.groups, problem.k, problem.n), problem.dtype),
            jnp.full(problem.groups, problem.m // problem.groups, jnp.int32),
        )
    )
    # JAX's own compiler and cuBLAS start up with the first product of any kind.
    jax.block_until_ready(jax.jit(jnp.matmul)(operands[0], operands[1][0]))

    jgg, import_s = seconds(lambda: __import__("jax_grouped_gemm"))
    implementation = "cuda" if on_gpu() else "reference"
    product = jax.jit(functools.partial(jgg.ragged_dot, implementation=implementation))
    lowered, trace_s = seconds(lambda: product.lower(*operands))
    compiled, compile_s = seconds(lowered.compile)
    _, run_s = seconds(lambda: jax.block_until_ready(compiled(*operands)))
    _, second_call_s = seconds(lambda: jax.block_until_ready(compiled(*operands)))
    return {
        "import_s": import_s,
        "trace_s": trace_s,
        "compile_s": compile_s,
        "run_s": run_s,
        "first_call_s": trace_s + compile_s + run_s,
        "second_call_s": second_call_s,
    }


if __name__ == "__main__":
    print(json.dumps(first_call(Problem(**json.loads(sys.argv[1])))))
