"""FP8 layers over a mesh whose weights are quantised in advance by `quantize_mlp`."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

T, D, F, E, K = 24, 512, 96, 4, 2
MESHES = {
    "data": (dict(data=2, expert=2), {}),
    "fsdp": (dict(fsdp=2, expert=2), dict(fsdp_axis="fsdp")),
    "two fsdp": (dict(a=2, b=2, expert=2), dict(fsdp_axis=("a", "b"))),
    "rows travel": (dict(expert=4), dict(strategy="ragged_all_to_all")),
    "chunks": (dict(expert=2), dict(chunks=2, overlap=False)),
    "nothing saved": (dict(expert=2), dict(save="nothing", combine="all_to_all")),
}


def mesh_of(axes, kind=AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices("cpu")[: int(np.prod([*axes.values()]))])
    return Mesh(devices.reshape([*axes.values()]), tuple(axes), axis_types=(kind,) * len(axes))


def operands(rng):
    def draw(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    logits = rng.standard_normal((T, E)).astype(np.float32)
    return draw(T, D) * 5, logits, (draw(E, D, F), draw(E, D, F), draw(E, F, D)), draw(T, D) * 5


def run(layer, x, logits, matrices, dy, **more):
    def of(x, logits, *matrices):
        return layer(x, moe.route(logits, K), *matrices, **more)

    y, pullback = jax.vjp(of, x, logits, *matrices)
    return y, *pullback(dy)


@jax.jit
def one_device(*given):
    return run(moe.dropless_mlp, *given, recipe=jgg.Recipe())


quantize = jax.jit(jgg.quantize_mlp)
EXPLICIT = "data", "two fsdp"


@pytest.mark.parametrize("name", MESHES)
def test_quantised_weights_are_those_of_one_device(name, rng):
    axes, options = MESHES[name]
    kind = AxisType.Explicit if name in EXPLICIT else AxisType.Auto
    mesh, given, recipe = mesh_of(axes, kind), operands(rng), jgg.Recipe()
    quantized, expected = quantize(*given[2]), one_device(*given)
    x, logits, matrices, dy = given
    with jax.set_mesh(mesh):
        many = moe.expert_parallel(mesh, expert_axis="expert", recipe=recipe, **options)

        @jax.jit
        def step(q, *given):
            return run(lambda *operands: many(*operands, quantized=q)[0], *given)

        in_step = step(None, *given)
        # NaN in the matrices has no effect, because the layer reads only the quantised weights.
        nan = tuple(np.full_like(w, np.nan) for w in matrices)
        got = step(quantized, x, logits, nan, dy)
    for a, b in zip(got, in_step, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(np.abs(b).max()))
    # Gradients of weights differ more: over devices, FP8 blocks have other rows and scales.
    for a, b, bound in zip(got, expected, (1e-5, 1e-5, 1e-4, 0.06, 0.06, 0.06), strict=True):
        assert np.linalg.norm(np.subtract(a, b)) < bound * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("options", "quantized", "error", "message"),
    [
        (dict(tensor_axis="tensor"), None, ValueError, "quantized must be None with tensor_axis"),
        (dict(recipe=None), None, ValueError, "quantized needs the recipe"),
        (dict(fsdp_axis="fsdp"), None, ValueError, "D must be a multiple of 128 for each of the 2"),
        ({}, "wi", TypeError, "quantized must be a QuantizedMlp.*got QuantizedWeights"),
        ({}, "other", TypeError, "quantized must be quantize_mlp of these weights"),
        ({}, "dict", TypeError, "quantized.wi must be QuantizedWeights.*got dict"),
    ],
)
def test_what_is_refused(options, quantized, error, message, rng):
    x, logits, matrices, _ = operands(rng)
    x, matrices = x[:, :192], (*(w[:, :192] for w in matrices[:2]), matrices[2][..., :192])
    # The layer checks only shapes and types, so nothing is computed.
    quantize = functools.partial(jax.eval_shape, jgg.quantize_mlp)
    q = quantize(*matrices)
    q = {
        "wi": q.wi,
        "other": quantize(*(w[..., :64, :] for w in matrices[:2]), matrices[2][..., :64]),
        "dict": q._replace(wi=q.wi._asdict()),
    }.get(quantized, q)
    mesh = mesh_of(dict(fsdp=2, expert=2, tensor=2))
    layer = moe.expert_parallel(
        mesh,
        **dict(expert_axis="expert", recipe=jgg.Recipe(), token_axes=("fsdp", "expert")) | options,
    )
    with pytest.raises(error, match=message):
        jax.eval_shape(
            lambda x, logits, q: layer(x, moe.route(logits, K), *matrices, quantized=q),
            x,
            logits,
            q,
        )


def test_weights_are_no_options_of_a_layer():
    with pytest.raises(TypeError, match="no option is called quantized"):
        moe.expert_parallel(mesh_of(dict(expert=2)), expert_axis="expert", quantized=())
