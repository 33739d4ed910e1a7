"""Layers whose tokens are split over devices: each device sorts and computes its own tokens."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_grouped_gemm.flax.linen as jgg_linen  # noqa: E402
import jax_grouped_gemm.flax.nnx as jgg_nnx  # noqa: E402
from jax_grouped_gemm import moe  # noqa: E402
from tests.support.partition import (
    EIGHT,
    EXPLICIT,
    FOUR_BY_TWO,
    GATHER,
    KINDS,
    SUM,
    assert_same,
    collectives,
    entered,
    mesh_of,
    put,
)

T, D, F, E, TOP = 64, 16, 24, 8, 2


def layer_operands(rng):
    """Returns tokens, logits and matrices."""
    return [
        rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        for shape in ((T, D), (T, E), (E, D, F), (E, D, F), (E, F, D))
    ]


def layer_loss(x, logits, *matrices, **options):
    return jnp.sum(moe.dropless_mlp(x, moe.route(logits, TOP), *matrices, **options) ** 2)


STEP = jax.jit(jax.value_and_grad(layer_loss, range(5)))
LOGITS = (GATHER, (T, E))
"""XLA's `top_k` gathers the logits, but only on CPUs."""
LAYER_GRADIENTS = [(SUM, (E, D, F)), (SUM, (E, D, F)), (SUM, (E, F, D))]
LAYERS = {
    "tokens": (EIGHT, P("d"), P()),
    "fsdp": (EIGHT, P("d"), P(None, "d")),
    "fsdp of two axes": (FOUR_BY_TWO, P(("d", "e")), P(None, "d")),
    "tensors": (FOUR_BY_TWO, P("d"), P(None, None, "e")),
    "experts": (EIGHT, P("d"), P("d")),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
class TestDroplessMlp:
    def test_values_and_gradients(self, name, kind, rng):
        axes, of_tokens, of_matrices = LAYERS[name]
        mesh = mesh_of(axes, kind)
        arguments = layer_operands(rng)
        want = STEP(*arguments)
        with entered(mesh):
            split = put(mesh, arguments, [of_tokens] * 2 + [of_matrices] * 3)
            compiled = STEP.lower(*split).compile()
            assert_same(compiled(*split), want, 1e-5)
            if kind == EXPLICIT:
                of_gradients = jax.eval_shape(STEP, *split)[1]
                for x, gradient in zip(split, of_gradients, strict=True):
                    assert gradient.sharding.spec == jax.typeof(x).sharding.spec
        travelling = [x for x in collectives(compiled) if x != LOGITS]
        # Rows and tokens stay where they are: only arrays of the size of matrices travel.
        if name in ("tokens", "fsdp"):
            whole = [x for x in travelling if x[0] == GATHER]
            assert len(whole) == (0 if name == "tokens" else 3), travelling
            assert all(len(shape) == 3 for _, shape in travelling), travelling
        if name == "tokens":
            assert travelling == sorted(LAYER_GRADIENTS)


class TestTokenAxes:
    @pytest.fixture
    def split(self, rng):
        mesh = mesh_of(FOUR_BY_TWO)
        return put(mesh, layer_operands(rng), [P("d"), P("d"), P(), P(), P()])

    @pytest.mark.parametrize("axes, tokens", [(None, T // 8), ("d", T // 4), ((), T)])
    def test_split_by_these(self, axes, tokens, split):
        program = jax.jit(lambda *a: layer_loss(*a, token_axes=axes)).lower(*split).as_text()
        manual = re.search(r"manual_computation.*?\((.*?)\) ->", program.replace("\n", " "))
        assert (manual is None) == (axes == ())
        if manual:
            assert f"tensor<{tokens}x{D}xf32>" in program

    def test_tokens_that_do_not_divide_stay_whole_along_an_axis(self, split):
        x, logits, *matrices = split
        program = jax.jit(layer_loss).lower(x[:12], logits[:12], *matrices).as_text()
        assert f"tensor<3x{D}xf32>" in program

    @pytest.mark.parametrize(
        "axes, message",
        [("f", "token_axes must name auto axes.*'f'.*'d', 'e'"), ("d", "66.*multiple of the 4")],
    )
    def test_names_what_is_wrong(self, axes, message, split):
        x, logits, *matrices = split
        x, logits = (jnp.concatenate([a, a[:2]]) for a in (x, logits))
        with pytest.raises(ValueError, match=f"dropless_mlp: .*{message}"):
            layer_loss(x, logits, *matrices, token_axes=axes)


def of_nnx(x, **options):
    """Returns the parameters' shapes of an NNX layer, and a function of parameters and x."""
    make = functools.partial(jgg_nnx.MoE, D, F, E, TOP, **options)
    graph, parameters = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    return parameters, lambda parameters, x: nnx.merge(graph, parameters)(x)[0]


def of_linen(x, **options):
    layer = jgg_linen.MoE(F, E, TOP, **options)
    parameters = linen.unbox(jax.eval_shape(layer.init, jax.random.key(0), x))
    return parameters, lambda parameters, x: layer.apply(parameters, x)[0]


FLAVOURS = {"nnx": of_nnx, "linen": of_linen}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_flax_layer(flavour, rng):
    def drawn(x):
        return rng.standard_normal(x.shape).astype(x.dtype) / x.shape[-1] ** 0.5

    x = drawn(jax.ShapeDtypeStruct((8, 4, D), np.float32))
    shapes, apply = FLAVOURS[flavour](x)
    parameters = jax.tree.map(drawn, shapes)
    step = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(apply(*a) ** 2), (0, 1)))
    want = step(parameters, x)
    for kind in KINDS:
        mesh = mesh_of(EIGHT, kind)
        with entered(mesh):
            # The experts' matrices are split along the axis of the tokens.
            leaves, tree = jax.tree.flatten(parameters)
            placed = put(mesh, leaves, [P(None, "d") if w.ndim == 3 else P() for w in leaves])
            split = jax.tree.unflatten(tree, placed), *put(mesh, [x], [P("d")])
            compiled = step.lower(*split).compile()
            assert_same(compiled(*split), want, 1e-5)
        gathered = {shape for travelling, shape in collectives(compiled) if travelling == GATHER}
        assert gathered <= {(E, D, F), (E, F, D), (8, 4, E), (32, E)}


@pytest.mark.parametrize("axes, tokens", [(None, 4), ("d", 8), ((), 32)])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_token_axes_of_flax_layers(flavour, axes, tokens):
    split = NamedSharding(mesh_of(FOUR_BY_TWO), P("d"))
    x = jax.ShapeDtypeStruct((8, 4, D), np.float32, sharding=split)
    parameters, apply = FLAVOURS[flavour](x, token_axes=axes)
    assert f"tensor<{tokens}x{D}xf32>" in jax.jit(apply).lower(parameters, x).as_text()


def test_scan_and_remat(rng):
    x, logits, *matrices = layer_operands(rng)
    stacked = [np.stack([w, -w]) for w in matrices]

    def loss(x, logits, *stacked):
        @jax.checkpoint
        def body(x, matrices):
            return x + moe.dropless_mlp(x, moe.route(logits, TOP), *matrices), None

        return jnp.sum(jax.lax.scan(body, x, stacked)[0] ** 2)

    step = jax.jit(jax.value_and_grad(loss, range(5)))
    want = step(x, logits, *stacked)
    for kind in KINDS:
        mesh = mesh_of(EIGHT, kind)
        with entered(mesh):
            specs = [P("d")] * 2 + [P(None, None, "d")] * 3
            split = put(mesh, [x, logits, *stacked], specs)
            compiled = step.lower(*split).compile()
            assert_same(compiled(*split), want, 1e-5)
        gathered = {shape for travelling, shape in collectives(compiled) if travelling == GATHER}
        assert gathered <= {(E, D, F), (E, F, D), (1, E, D, F), (1, E, F, D), (T, E)}
