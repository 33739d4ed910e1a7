"""Times the first product of a fresh process: import, trace, compilation, first run.

python -m benchmarks.first_call

JAX is started and has run something before, so that what is left is what our library adds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.harness.command import Command
from benchmarks.harness.peer import pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.host import PROBLEM, one_tile_record

PROBE = "import json; from benchmarks import first_call; print(json.dumps(first_call.probe()))"
TIMEOUT_SECONDS = 120


def seconds(function):
    """The function's result and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def probe() -> dict[str, float]:
    """Seconds of each step from the import to the first result, and of a second call.

    `import_s`: our library, with JAX imported. `trace_s`: tracing and lowering of the jitted
    product. `compile_s`: XLA. `run_s`: the first execution, which loads our kernels onto the
    device. `first_call_s`: these three, what a first jitted call takes. `second_call_s`: the same
    call again.

    Raises:
      RuntimeError: in a process that has imported the library before.
    """
    if "jax_grouped_gemm" in sys.modules:
        raise RuntimeError("jax_grouped_gemm is imported already, so its import cannot be timed")
    sizes = jnp.full(PROBLEM.groups, PROBLEM.m // PROBLEM.groups, jnp.int32)
    operands = jax.block_until_ready(
        (
            jnp.ones((PROBLEM.m, PROBLEM.k), PROBLEM.dtype),
            jnp.ones((PROBLEM.groups, PROBLEM.k, PROBLEM.n), PROBLEM.dtype),
            sizes,
        )
    )
    # JAX's own compiler and cuBLAS start up with the first product of any kind.
    jax.block_until_ready(jax.jit(jnp.matmul)(operands[0], operands[1][0]))

    jgg, import_s = seconds(lambda: __import__("jax_grouped_gemm"))
    implementation = pinned_implementation()
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


def measure() -> dict:
    """A record of what `probe` finds in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        # This process has reserved most of the GPU's memory.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"the fresh process failed: {done.stderr.splitlines()[-1:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return one_tile_record("first_call", "one_tile/first_call", found)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """One process."""
    return [Job("one_tile/first_call", measure, typical=False)]


COMMAND = Command("benchmarks.first_call", __doc__, jobs, timed=False)
main = COMMAND.main

if __name__ == "__main__":
    main()
