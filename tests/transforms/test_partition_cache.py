"""Programs over auto axes in JAX's persistent compilation cache, which a second process reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_grouped_gemm as jgg

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(int(sys.argv[2]))
lhs, rhs = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((64, 16), (4, 16, 16)))
sizes = np.array([10, 0, 7, 20], np.int32)


def put(x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def both(function):
    return lambda *a: (function(*a), jax.grad(lambda *a: jnp.sum(function(*a) ** 2), (0, 1))(*a))


split = put(lhs, P("d")), put(rhs, P()), put(sizes, P())
hits, right, travelling = [], [], []
# These programs have equal shapes, and differ only in options that callbacks hold too.
for options in (dict(), dict(transpose_rhs=True), dict(group_offset=0)):
    function = both(lambda *a: jgg.ragged_dot(*a, **options))
    want = jax.tree.leaves(jax.jit(function)(lhs, rhs, sizes))
    events.clear()
    got = jax.tree.leaves(jax.jit(function)(*split))
    hits.append("/jax/compilation_cache/cache_hits" in events)
    right.append(all(np.array_equal(a, b) for a, b in zip(got, want)))
    travelling.append([t.bytes for t in jgg.explain(function, *split).transfers])
print(json.dumps([hits, right, travelling]))
"""


def test_second_process_finds_programs_again(tmp_path):
    root = str(Path(__file__).parents[2])
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        XLA_FLAGS=flags,
        JAX_PLATFORMS="cpu",
        JAX_ENABLE_COMPILATION_CACHE="true",
    )

    def run(seed):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), seed]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run("1"), run("2")
    sums = [[4 * 16 * 16 * 4]] * 3
    assert first == [[False] * 3, [True] * 3, sums]
    assert second == [[True] * 3, [True] * 3, sums]
