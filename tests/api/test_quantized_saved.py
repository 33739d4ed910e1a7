"""Quantised weights in dictionaries, files, checkpoints of Orbax and exported programs."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from tests.support.weight_formats import FORMATS, bits


def test_serialisation(rng):
    q = jgg.quantize(rng.standard_normal((2, 64, 96)).astype(np.float32), "int4", zero_points=True)
    arrays = q.to_dict()
    assert all(isinstance(x, jax.Array | np.ndarray) for x in arrays.values())
    again = jgg.QuantizedArray.from_dict(jax.tree.map(np.asarray, arrays))
    assert again.format == q.format and again.shape == q.shape
    np.testing.assert_array_equal(jgg.dequantize(again), jgg.dequantize(q))
    described = json.loads(arrays["format"].tobytes())
    described["version"] = 99
    arrays["format"] = np.frombuffer(json.dumps(described).encode(), np.uint8)
    with pytest.raises(ValueError, match="version 99.*version 1"):
        jgg.QuantizedArray.from_dict(arrays)


@pytest.mark.parametrize("name, current", [("mxfp4", 2), ("fp8", 2), ("fp8_128x128", 3)])
def test_earlier_versions_are_refused(rng, name, current):
    """Their arrays may have the same shapes, with bits in other places."""
    q = jgg.quantize(rng.standard_normal((2, 128, 128)).astype(np.float32), name)
    for version in range(1, current):
        message = f"version {version}.*reads version {current}: quantise the weights again"
        with pytest.raises(ValueError, match=message):
            jgg.QuantizedArray.from_dict(_described(q.to_dict(), version=version))
    assert jgg.QuantizedArray.from_dict(_described(q.to_dict(), version=current)).shape == q.shape


def test_the_first_version_of_fp8_in_blocks_is_refused(rng):
    """It had one scale for each block, [ceil(n / 128), ceil(k / 128)], and no channel scales."""
    q = jgg.quantize(rng.standard_normal((2, 128, 128)).astype(np.float32), "fp8_128x128")
    arrays = _described(q.to_dict() | {"scales": np.ones((2, 1, 1), np.float32)}, version=1)
    del arrays["channel_scales"]
    with pytest.raises(ValueError, match="version 1.*reads version 3: quantise the weights again"):
        jgg.QuantizedArray.from_dict(arrays)


IN_ROWS = [
    (name, dict(layout="rows"))
    for name in ("fp8", "fp8_128x128", "fp8_1x128", "fp8_row", "fp8_tensor")
]


@pytest.mark.parametrize("name, options", [*FORMATS, *IN_ROWS], ids=str)
def test_files_of_numpy(rng, tmp_path, name, options):
    """NumPy's files keep neither bfloat16 nor FP8 dtypes, but `from_dict` knows them."""
    q = jgg.quantize(rng.standard_normal((2, 130, 70)).astype(np.float32), name, **options)
    np.savez(tmp_path / "q.npz", **q.to_dict())
    with np.load(tmp_path / "q.npz") as found:
        again = jgg.QuantizedArray.from_dict(found)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(q), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(bits(got), bits(want))


def _described(arrays, **changes):
    described = json.loads(arrays["format"].tobytes())
    removed = {name for name, x in changes.items() if x is None}
    text = json.dumps({n: x for n, x in (described | changes).items() if n not in removed})
    return arrays | {"format": np.frombuffer(text.encode(), np.uint8)}


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda a: a.pop("format"), ValueError, "must have format and values.*got values, scales"),
        (lambda a: a.pop("values"), ValueError, "must have format and values.*got scales"),
        (lambda a: a.update(bias=a["scales"]), ValueError, "no others than.*got.*bias"),
        (lambda a: a.pop("scales"), TypeError, "scales must be an array for the format int4"),
        (lambda a: a.update(format=np.zeros(5, np.uint8)), ValueError, "format must be JSON text"),
        (lambda a: a.update(_described(a, layout=None)), ValueError, "but there is no layout"),
        (lambda a: a.update(_described(a, layout="x")), ValueError, "no format 'int4' of layout"),
        (
            lambda a: a.update(_described(a, version=2, group_size=256)),
            ValueError,
            "version 2 of the layout 'packed', but this release reads version 1",
        ),
    ],
)
def test_from_dict_names_what_is_wrong(rng, change, error, message):
    q = jgg.quantize(rng.standard_normal((2, 64, 96)).astype(np.float32), "int4", zero_points=True)
    arrays = q.to_dict()
    change(arrays)
    with pytest.raises(error, match=message):
        jgg.QuantizedArray.from_dict(arrays)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(format=["x"]), r"format of.* must be a string, got \['x'\]"),
        (dict(layout=["x"]), r"layout of.* must be a string, got \['x'\]"),
        (dict(version="1"), "version of.* must be an integer, got '1'"),
        (dict(values=8), "values of.* must be a string, got 8"),
        (dict(values="abc"), "values of format 'int8'.* must be uint8, got 'abc'"),
        (dict(values="float32"), "values of format 'int8'.* must be uint8, got 'float32'"),
        (dict(group_size="all"), "group_size of.* must be an integer or null, got 'all'"),
        (dict(zero_points=0), "zero_points of.* must be true or false, got 0"),
        (dict(k=128.0), "k of.* must be an integer, got 128.0"),
        (dict(n=True), "n of.* must be an integer, got True"),
        (dict(k=-64), r"k and n of.* must not be negative, got \(-64, 128\)"),
        (dict(k=64), r"k and n in format must be \(128, 128\).*int8, got \(64, 128\)"),
        (dict(k=256, n=64), r"k and n in format must be \(128, 128\).*int8, got \(256, 64\)"),
    ],
    ids=str,
)
def test_from_dict_names_what_is_wrong_with_format(rng, changes, message):
    q = jgg.quantize(rng.standard_normal((2, 128, 128)).astype(np.float32), "int8")
    arrays = q.to_dict()
    with pytest.raises(ValueError, match=message):
        jgg.QuantizedArray.from_dict(_described(arrays, **changes))


def test_slices_can_be_saved(rng):
    """The dictionary of a slice along k has the size of the slice."""
    x = rng.standard_normal((2, 256, 192)).astype(np.float32)
    for name, layout in (("int4", "packed"), ("mxfp4", "packed"), ("fp8_128x128", "rows")):
        q = jgg.quantize(x, name, layout=layout)
        whole = np.asarray(jgg.dequantize(q, np.float32))
        specs = q.specs(P(None, "k", None))
        first = jax.tree.map(
            lambda x, spec: jnp.split(x, 2, spec.index("k"))[0] if "k" in spec else x, q, specs
        )
        again = jgg.QuantizedArray.from_dict(first.to_dict())
        assert again.shape == (2, 128, 192)
        np.testing.assert_array_equal(jgg.dequantize(again, np.float32), whole[:, :128])


def test_export_takes_and_returns_it(rng):
    q = jgg.quantize(rng.standard_normal((2, 64, 96)).astype(np.float32), "mxfp4")
    exported = jax.export.export(jax.jit(lambda q: (q, jgg.dequantize(q))))(q)
    again = jax.export.deserialize(exported.serialize())
    same, values = again.call(q)
    assert isinstance(same, jgg.QuantizedArray) and same.format == q.format
    np.testing.assert_array_equal(values, jgg.dequantize(q))


def test_orbax(rng, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    q = jgg.quantize(rng.standard_normal((2, 64, 96)).astype(np.float32), "mxfp4")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", {"w": q.to_dict()})
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "x")
    np.testing.assert_array_equal(
        jgg.dequantize(jgg.QuantizedArray.from_dict(found["w"])), jgg.dequantize(q)
    )
