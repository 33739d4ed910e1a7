"""The modules that importing the package loads in addition to JAX."""

import json
import subprocess
import sys

# The number of our modules that an import may load. Each takes about a millisecond.
MOST_MODULES = 161

PROGRAM = """
import json, sys
import jax
before = set(sys.modules)
import jax_grouped_gemm as jgg
jgg.checkpoint_policies
print(json.dumps(sorted(set(sys.modules) - before)))
jgg.moe.dropless_mlp, jgg.optim.muon, jgg.adapters.replace_lax
from jax_grouped_gemm import *
assert moe is jgg.moe and optim is jgg.optim and adapters is jgg.adapters
assert not hasattr(jgg, "nothing")
"""


def test_importing_loads_this_package_alone():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    others = [name for name in loaded if name.split(".")[0] != "jax_grouped_gemm"]
    # This is an alias of a module that JAX loads. Pallas, checkify, Flax and Optax stay unloaded.
    assert set(others) <= {"jax.ad_checkpoint"}
    assert not [
        name
        for name in loaded
        if name.startswith(("jax_grouped_gemm.flax", "jax_grouped_gemm.demo"))
    ]
    assert len(loaded) <= MOST_MODULES
