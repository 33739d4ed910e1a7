"""Trains a small mixture of experts with different optimisers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jax_grouped_gemm.optim import MuonDimensionNumbers, muon

STEPS = 200
TOKENS = 256


def _mlp(params, x):
    """Applies all experts to all tokens, weighted by the router, in float32 without kernels."""
    probabilities = jax.nn.softmax(x @ params["router"])
    gate, up = (jnp.einsum("td,gdf->gtf", x, params[name]) for name in ("gate", "up"))
    outs = jnp.einsum("gtf,gfd->gtd", jax.nn.silu(gate) * up, params["down"])
    return jnp.einsum("tg,gtd->td", probabilities, outs)


def _draw(key, experts, d, f):
    shapes = {
        "router": (d, experts),
        "gate": (experts, d, f),
        "up": (experts, d, f),
        "down": (experts, f, d),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / shape[-2] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def optimizers(implementation=None):
    """Returns our Muon in its default float16, and Optax's Muon in float32."""
    matrices = ("gate", "up", "down")

    def numbers(kind):
        return {"router": None} | dict.fromkeys(matrices, kind(1, 2))

    return {
        "ours": muon(
            0.02,
            muon_weight_dimension_numbers=numbers(MuonDimensionNumbers),
            implementation=implementation,
        ),
        "optax": optax.contrib.muon(
            0.02, muon_weight_dimension_numbers=numbers(optax.contrib.MuonDimensionNumbers)
        ),
    }


def losses(optimizer, seed: int, experts: int, d: int, f: int) -> jax.Array:
    """Returns the losses of `STEPS` steps that learn the outputs of another random model."""
    teacher_key, student_key, data_key = jax.random.split(jax.random.key(seed), 3)
    teacher = _draw(teacher_key, experts, d, f)
    student = _draw(student_key, experts, d, f)

    def step(carry, key):
        params, state = carry
        x = jax.random.normal(key, (TOKENS, d))

        def loss_of(params):
            return jnp.mean(jnp.square(_mlp(params, x) - _mlp(teacher, x)))

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def run(student, keys):
        return jax.lax.scan(step, (student, optimizer.init(student)), keys)[1]

    with jax.default_matmul_precision("highest"):
        return run(student, jax.random.split(data_key, STEPS))
