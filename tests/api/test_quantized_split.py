"""Quantised weights that are split over devices, and slices of them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support.quantized import (
    EMBED,
    EXPERTS,
    FORMATS,
    SIZES,
    grouped,
    mlp_weights,
    of_one_device,
    routed,
    weights,
    with_gradient,
)


def test_expert_parallel(rng):
    packed, arrays = mlp_weights(rng, "mxfp4")
    x, routing = routed(rng)
    want = moe.dropless_mlp(x, routing, *arrays)
    mesh = jax.make_mesh((4,), ("expert",), (jax.sharding.AxisType.Auto,))
    layer = moe.expert_parallel(mesh, expert_axis="expert")
    placed = jax.device_put(packed, jax.sharding.NamedSharding(mesh, P("expert")))
    y, _ = jax.jit(layer)(x, routing, *placed)
    np.testing.assert_allclose(y, want, atol=1e-5)
    both = jax.make_mesh((2, 2), ("expert", "model"), (jax.sharding.AxisType.Auto,) * 2)
    layer = moe.expert_parallel(both, expert_axis="expert", tensor_axis="model")
    with pytest.raises(ValueError, match=r"wi_0 \(4, 96, 160\).*mxfp4.*2 slices along n.*64"):
        layer(x, routing, *packed)


@pytest.mark.parametrize(
    "options",
    [dict(chunks=2, overlap=False), dict(save="nothing", overlap=False), dict(save="rows")],
    ids=str,
)
def test_expert_parallel_schedules(rng, options):
    """Packed weights give the right gradients in chunks, without overlap, and for any `save`."""
    packed, arrays = mlp_weights(rng, "mxfp4")
    x, routing = routed(rng)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    mesh = jax.make_mesh((2,), ("expert",), (jax.sharding.AxisType.Auto,))
    layer = moe.expert_parallel(mesh, expert_axis="expert", **options)
    found = with_gradient(lambda *operands: layer(*operands)[0])(dy, x, routing, *packed)
    for got, want in zip(found, of_one_device(dy, x, routing, *arrays), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


# Over explicit axes, arrays are placed one by one. Two formats suffice, because their arrays have
# every rank.
SPLIT = [*((name, False) for name in FORMATS), ("mxfp4", True), ("int8", True)]


@pytest.mark.parametrize(
    "name, explicit", SPLIT, ids=[f"{name}-{'explicit' if e else 'auto'}" for name, e in SPLIT]
)
def test_packed_bytes_that_are_split(rng, name, explicit):
    """Weights that are split along experts, k and n are gathered in their packed form."""
    size = 256  # devices then have whole blocks
    pairs = [weights(rng, name, (EXPERTS, size, size)) for _ in range(3)]
    packed, arrays = zip(*pairs, strict=True)
    x, dy = rng.standard_normal((2, 16, size)).astype(np.float32)
    routing = moe.route(rng.standard_normal((16, EXPERTS)).astype(np.float32), 2)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2, 2), ("expert", "model", "data"), (kind,) * 3)
    layer = moe.expert_parallel(mesh, expert_axis="expert", tensor_axis="model", fsdp_axis="data")
    specs = [P("expert", "data", "model")] * 2 + [P("expert", "model", "data")]

    def place(q, spec):
        return jax.device_put(
            q, jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), q.specs(spec))
        )

    placed = [place(q, spec) for q, spec in zip(packed, specs, strict=True)]
    assert placed[0].values.addressable_shards[0].data.nbytes * 8 == packed[0].values.nbytes
    split = jax.device_put((dy, x), jax.sharding.NamedSharding(mesh, P(("expert", "data"))))
    operands = *split, routing, *placed
    lowered = with_gradient(lambda *operands: layer(*operands)[0]).lower(*operands)
    (y, dx), (want, want_dx) = lowered.compile()(*operands), of_one_device(dy, x, routing, *arrays)
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(dx, want_dx, atol=1e-4)
    lines = lowered.as_text().splitlines()
    gathers = [line for line in lines if "all_gather" in line and "ui8" in line]
    assert explicit or gathers, "what travels is packed"


@pytest.mark.parametrize("name", ["mxfp4", "int4", "int8", "fp8_128x128"])
@pytest.mark.parametrize("spec", [P("i"), P(None, ("i", "j")), P(None, None, "i"), P("j", "i")])
def test_quantising_arrays_that_explicit_axes_split(rng, name, spec):
    """The result has the bits of whole arrays. It is split alike where slices fit the format."""
    x = rng.standard_normal((4, 256, 256)).astype(np.float32)
    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 2), ("i", "j"), (kind, kind))
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    want = jgg.quantize(x, name)
    fits = name != "int4" or ("i", "j") not in tuple(spec)
    for set_mesh in (False, True):
        if set_mesh:
            with jax.set_mesh(mesh):
                got = jax.jit(lambda x: jgg.quantize(x, name))(split)
        else:
            got = jgg.quantize(split, name)
        specs = want.specs(spec if fits else P()).arrays
        for array, found in got.arrays.items():
            np.testing.assert_array_equal(found, want.arrays[array])
            sharding = jax.sharding.NamedSharding(mesh, specs[array])
            assert found.sharding.is_equivalent_to(sharding, found.ndim)


def test_slices_inside_shard_map(rng):
    """Matrices may be split along k or n: each device multiplies by its own slice."""
    q, w = weights(rng, "int4", (EXPERTS, 256, 128))
    x = rng.standard_normal((18, 256)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))
    want = grouped(x, w, SIZES)

    def columns(x, q):
        assert q.shape == (EXPERTS, 256, 64)
        return jgg.ragged_dot(x, q, SIZES)

    def rows(x, q):
        assert q.shape == (EXPERTS, 128, 128)
        return jax.lax.psum(jgg.ragged_dot(x, q, SIZES), "i")

    @jax.jit
    def both(x, q):
        specs = P(), q.specs(P(None, None, "i"))
        by_columns = jax.shard_map(columns, mesh=mesh, in_specs=specs, out_specs=P(None, "i"))
        specs = P(None, "i"), q.specs(P(None, "i"))
        by_rows = jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=P())
        return by_columns(x, q), by_rows(x, q)

    for got in both(x, q):
        np.testing.assert_allclose(got, want, atol=1e-5)
    with pytest.raises(TypeError, match="slice of a QuantizedArray along n.*multiples of 64"):
        uneven, _ = weights(rng, "int4", (EXPERTS, 256, 100))
        jax.shard_map(
            columns,
            mesh=mesh,
            in_specs=(P(), uneven.specs(P(None, None, "i"))),
            out_specs=P(None, "i"),
        )(x, uneven)


@pytest.mark.parametrize("name", ["fp8_128x128", "fp8_1x128"])
def test_slices_of_rows_hold_whole_blocks(rng, name):
    """Two slices of 100 elements have as many blocks as 200 elements, but other blocks."""
    x = jgg.quantize(rng.standard_normal((18, 256)).astype(np.float32), "fp8_1x128")
    q = jgg.quantize(
        rng.standard_normal((EXPERTS, 256, 200)).astype(np.float32), name, layout="rows"
    )
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))
    split = P(None, None, "i")
    with pytest.raises(TypeError, match="slice of a QuantizedArray along n.*multiples of 128"):
        jax.shard_map(jgg.dequantize, mesh=mesh, in_specs=(q.specs(split),), out_specs=split)(q)
    if name == "fp8_128x128":
        with pytest.raises(TypeError, match="slice of a QuantizedArray along n.*multiples of 128"):
            jax.shard_map(
                lambda x, q: jgg.ragged_dot(x, q, SIZES),
                mesh=mesh,
                in_specs=(x.specs(P()), q.specs(split)),
                out_specs=P(None, "i"),
            )(x, q)
        layer = moe.expert_parallel(
            jax.make_mesh((1, 2), ("e", "t"), (jax.sharding.AxisType.Auto,) * 2),
            expert_axis="e",
            tensor_axis="t",
            recipe=jgg.Recipe(),
        )
        y, routing = routed(rng)
        shapes = (EXPERTS, EMBED, 200), (EXPERTS, EMBED, 200), (EXPERTS, 200, EMBED)
        w = [
            jgg.quantize(rng.standard_normal(s).astype(np.float32), name, layout="rows")
            for s in shapes
        ]
        with pytest.raises(
            ValueError, match="wi_0.*2 slices along n: each must be a multiple of 128"
        ):
            layer(y, routing, *w)


@pytest.mark.parametrize("spec", [P(None, "i"), P(None, None, "i")])
def test_slices_that_cut_blocks(rng, spec):
    """Records have the scales of their blocks, so that slices need not hold whole blocks."""
    q = jgg.quantize(rng.standard_normal((2, 384, 384)).astype(np.float32), "fp8_128x128")
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))

    def split(function):
        return jax.shard_map(function, mesh=mesh, in_specs=(q.specs(spec),), out_specs=spec)

    np.testing.assert_array_equal(jax.jit(split(jgg.dequantize))(q), jgg.dequantize(q))
    with pytest.raises(ValueError, match="unpack: slices must hold whole blocks of 128, got"):
        split(lambda q: q.unpack().scales)(q)
    with pytest.raises(ValueError, match="to_dict: slices must hold whole blocks of 128, got"):
        split(lambda q: q.to_dict()["values"])(q)


def test_tokens_that_are_split(rng):
    packed, arrays = mlp_weights(rng, "int8")
    x, routing = routed(rng)
    want = moe.dropless_mlp(x, routing, *arrays)
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        x, routing, packed = jax.device_put((x, routing, packed), split)
        np.testing.assert_allclose(jax.jit(moe.dropless_mlp)(x, routing, *packed), want, atol=1e-5)
