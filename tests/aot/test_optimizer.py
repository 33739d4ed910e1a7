"""XLA's program for optimiser steps on an H200: everything in place, and no extra pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe, optim
from tests.support.aot import FREE

E, D, F, T, K = 8, 1024, 512, 1024, 2
RECIPE = jgg.Recipe()
SMALL = 2**15  # bytes that scalars, flags and constants may take


def array(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def experts(dtype=jnp.float32):
    wi, wo = array((E, D, F), dtype), array((E, F, D), dtype)
    return dict(layer=dict(wi_0=wi, wi_1=wi, wo=wo))


def compiled(h200, function, *arguments, donated=(0, 1)):
    """Returns the text of the program, and its memory statistics."""
    sharding = jax.sharding.NamedSharding(h200.mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    program = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    return program.as_text(), program.memory_analysis()


def large_instructions(hlo: str, least: int) -> list[str]:
    """Returns instructions, except our kernels, whose results have `least` elements or more."""
    found = []
    entry = hlo.split("\nENTRY ", 1)[1]
    for line in entry.splitlines():
        match = re.match(r"\s+(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([a-z-]+)\(", line)
        if not match or match[2] in FREE:
            continue
        shapes = re.findall(r"\w+\[([\d,]+)\]", match[1])
        if any(np.prod([int(x) for x in shape.split(",")]) >= least for shape in shapes):
            found.append(line.strip()[:160])
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "adamw clipped", "any"])
def test_updates_everything_in_place(kind, dtype, h200):
    options = dict(max_norm=1.0, skip_nonfinite=True) if "clipped" in kind else {}
    optimizer = optim.quantized(optax.identity()) if kind == "any" else optim.adamw(1e-3, **options)
    params = experts(dtype)
    state = jax.eval_shape(optimizer.init, params)
    gradients = experts(jnp.bfloat16)
    hlo, memory = compiled(h200, lambda p, s, g: optimizer.step(p, g, s), params, state, gradients)
    name = "apply_and_quantize" if kind == "any" else "adamw_quantized"
    assert hlo.count(f'custom_call_target="jax_grouped_gemm.{name}') == 3
    large = large_instructions(hlo, E * D * F)
    assert all("convert" in line for line in large) if kind == "any" else not large, large
    if kind != "any":
        assert memory.temp_size_in_bytes < SMALL
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    assert memory.alias_size_in_bytes > 0.999 * kept


def test_a_step_of_training_copies_no_weights(h200):
    """The layer reads the FP8 weights, and the optimiser writes the next ones in their place."""
    optimizer = optim.adamw(1e-3, recipe=RECIPE)
    params = experts()
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, x, logits):
        def loss(params):
            half = (params["layer"][name].astype(jnp.bfloat16) for name in ("wi_0", "wi_1", "wo"))
            quantized = state.quantized["layer"]
            routing = moe.route(logits, K)
            y = moe.dropless_mlp(x, routing, *half, recipe=RECIPE, quantized=quantized)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(optimizer.compute_params(params))
        return *optimizer.step(params, gradients, state), value

    x, logits = array((T, D), jnp.bfloat16), array((T, E))
    hlo, _ = compiled(h200, step, params, state, x, logits)
    assert hlo.count("quantize_joined") == hlo.count("quantize_blocks") == 0
    assert not large_instructions(hlo, E * D * F)
