"""`jax.export` of functions that take and return the package's own containers."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe, optim
from tests.support import fp8_oracle
from tests.support import group_sizes as sizes_of

# `MuonDimensionNumbers` names axes, and holds no arrays.
NO_ARRAYS = {optim.MuonDimensionNumbers}


def named_tuples() -> list[type]:
    """Returns all named tuples of the public modules, except `NO_ARRAYS`."""
    found = [
        value
        for module in (jgg, moe, optim)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, tuple) and hasattr(value, "_fields")
    ]
    return sorted(set(found) - NO_ARRAYS, key=lambda kind: kind.__name__)


def exported(function, *arguments) -> bytes:
    program = jax.export.export(jax.jit(function), disabled_checks=jgg.EXPORT_DISABLED_CHECKS)
    return bytes(program(*arguments).serialize())


def loaded(program: bytes) -> jax.export.Exported:
    return jax.export.deserialize(bytearray(program))


def project(x, weights: jgg.QuantizedWeights, group_sizes):
    """Quantises rows at run time, like a server; the weights were quantised in advance."""
    rows, scales = jgg.quantize_blockwise(x)
    return jgg.scaled_ragged_dot(
        *(rows, scales, weights.values_t, weights.scales_t, group_sizes),
        transpose_rhs=True,
        preferred_element_type=jnp.float32,
    )


@pytest.fixture
def served(rng):
    """Rows, quantised weights and group sizes."""
    m, k, n, g = 50, 200, 144, 3
    x = rng.standard_normal((m, k), np.float32)
    weights = jgg.quantize_weights(rng.standard_normal((g, k, n), np.float32))
    return x, weights, sizes_of.multinomial(rng, m, g)


def test_quantised_weights_are_an_argument(served):
    x, weights, group_sizes = served
    got = loaded(exported(project, *served)).call(*served)
    want = fp8_oracle.noncontracting(
        *(*fp8_oracle.quantize(x, (1, 128), jnp.float8_e4m3fn), weights.values, weights.scales),
        group_sizes,
    )
    fp8_oracle.check(got, want)
    # The program contains no weights, so it takes other weights of the same shape.
    doubled = weights._replace(scales_t=2 * weights.scales_t)
    np.testing.assert_allclose(
        loaded(exported(project, *served)).call(x, doubled, group_sizes), 2 * np.asarray(got)
    )


ANOTHER_PROCESS = """
import sys
import numpy as np, jax, jax.numpy as jnp
import jax_grouped_gemm as jgg
folder = sys.argv[1]
given = np.load(folder + "/operands.npz")
values, scales = given["values"].view(jnp.float8_e4m3fn), given["scales"]
transposed = (a.swapaxes(1, 2) for a in (values, scales))
program = jax.export.deserialize(bytearray(open(folder + "/program", "rb").read()))
got = program.call(given["x"], jgg.QuantizedWeights(*transposed, values, scales), given["sizes"])
np.testing.assert_allclose(got, given["want"], rtol=1e-5, atol=1e-5)
"""


def test_another_process_needs_the_package_only(served, tmp_path):
    x, weights, sizes = served
    (tmp_path / "program").write_bytes(exported(project, *served))
    values, scales = np.asarray(weights.values_t).view(np.uint8), np.asarray(weights.scales_t)
    operands = dict(x=x, values=values, scales=scales, sizes=sizes, want=project(*served))
    np.savez(tmp_path / "operands.npz", **operands)
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path)]
    subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def test_a_layer_with_weights_that_were_quantised_once(rng):
    embed, hidden, experts = 64, 128, 4
    shapes = [(experts, embed, hidden)] * 2 + [(experts, hidden, embed)]
    weights = [rng.standard_normal(shape, np.float32) / 8 for shape in shapes]
    recipe = jgg.Recipe()

    def layer(x, logits, weights, quantized):
        routing = moe.route(logits, 2)
        y = moe.dropless_mlp(x, routing, *weights, recipe=recipe, quantized=quantized)
        return y, routing, moe.auxiliary_losses(routing)

    operands = (
        rng.standard_normal((20, embed), np.float32),
        rng.standard_normal((20, experts), np.float32),
        weights,
        jgg.quantize_mlp(*weights, recipe),
    )
    got, want = loaded(exported(layer, *operands)).call(*operands), layer(*operands)
    assert isinstance(got[1], moe.Routing) and isinstance(got[2], moe.AuxiliaryLosses)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("kind", named_tuples(), ids=lambda kind: kind.__name__)
def test_containers(kind, rng):
    """An exported program returns each container with its type and with its fields in order."""
    given = kind(*(rng.standard_normal(3, np.float32) for _ in kind._fields))
    program = exported(lambda x: jax.tree.map(lambda a: 2 * a, x), given)
    got = loaded(program).call(given)
    assert type(got) is kind
    for name in kind._fields:
        np.testing.assert_array_equal(getattr(got, name), 2 * getattr(given, name))
