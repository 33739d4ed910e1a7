"""Tests of the pure JAX implementation alone: its tiles, dtypes, precision and memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.ops import BOTH_OPS, NONCONTRACTING, random

pytestmark = pytest.mark.usefixtures("either_form")

K, N, G = 6, 7, 4


def call(op, *operands, **options):
    return op.call(*operands, implementation="xla", **options)


def operands(op, rng, dtype=np.float32, *, m, k=K, n=N, g=G):
    """Returns random lhs and rhs of `op`."""
    return [random(rng, shape, dtype) for shape in op.shapes(m, k, n, g)[:2]]


class TestTiles:
    """Groups have fewer rows than a tile, exactly one tile, or some tiles and a part of one."""

    @BOTH_OPS
    @pytest.mark.parametrize("m, g", [(5, 3), (16, 1), (17, 1), (300, 9), (1100, 2)])
    def test_edges(self, op, m, g, rng):
        lhs, rhs = operands(op, rng, m=m, g=g)
        for _ in range(20):
            sizes = sizes_of.tile_edges(rng, m, g)
            oracle.check(call(op, lhs, rhs, sizes), op.exact(lhs, rhs, sizes))

    @BOTH_OPS
    def test_last_tile_is_moved_up(self, op, rng):
        """A tile that would end past lhs begins earlier. A mask excludes rows of other groups."""
        lhs, rhs = operands(op, rng, m=1000, g=3)
        sizes = np.array([995, 4, 1], np.int32)
        lhs[-1] = np.inf
        if op is not NONCONTRACTING:
            rhs[-1] = np.nan
        out, exact = call(op, lhs, rhs, sizes), op.exact(lhs, rhs, sizes)
        np.testing.assert_array_equal(np.isfinite(out), np.isfinite(exact.value))
        finite = np.isfinite(exact.value)
        np.testing.assert_allclose(out[finite], exact.value[finite], rtol=1e-4, atol=1e-4)


class TestDtypes:
    @BOTH_OPS
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
    def test_16_bit(self, op, dtype, out_dtype, rng):
        lhs, rhs = operands(op, rng, dtype, m=200, k=150)
        sizes = sizes_of.multinomial(rng, 190, G)
        out = call(op, lhs, rhs, sizes, preferred_element_type=out_dtype)
        assert out.dtype == out_dtype
        oracle.check(out, op.exact(lhs, rhs, sizes))

    @BOTH_OPS
    def test_complex(self, op, rng):
        lhs, rhs = (
            x + 1j * y
            for x, y in zip(operands(op, rng, m=50), operands(op, rng, m=50), strict=True)
        )
        sizes = sizes_of.multinomial(rng, 45, G)
        out = call(op, lhs, rhs, sizes)
        assert out.dtype == np.complex64
        real = op.exact(lhs.real, rhs.real, sizes).value - op.exact(lhs.imag, rhs.imag, sizes).value
        imag = op.exact(lhs.real, rhs.imag, sizes).value + op.exact(lhs.imag, rhs.real, sizes).value
        np.testing.assert_allclose(out, real + 1j * imag, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("dtype, out_dtype", [(np.int8, np.int8), (np.uint8, np.int32)])
    def test_integers_wrap_like_jax(self, dtype, out_dtype, rng):
        lhs, rhs = (
            rng.integers(0, 128, shape).astype(dtype)
            for shape in NONCONTRACTING.shapes(40, K, N, G)[:2]
        )
        sizes = sizes_of.multinomial(rng, 40, G)
        out = call(NONCONTRACTING, lhs, rhs, sizes, preferred_element_type=out_dtype)
        want = jax.lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=out_dtype)
        assert out.dtype == want.dtype
        np.testing.assert_array_equal(out, want)


class TestPrecision:
    def dots(self, **options) -> list[str]:
        """Returns the precision of each dot that a float32 product is lowered to."""
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 8), (2, 8, 8))]
        sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
        lowered = jax.jit(partial(jgg.ragged_dot, **options)).lower(*shapes, sizes)
        lines = lowered.as_text().splitlines()
        return [line.partition("precision = ")[2][:18] for line in lines if "dot_general" in line]

    @pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST])
    def test_reaches_the_dots(self, precision):
        assert self.dots(precision=precision) == ["[HIGHEST, HIGHEST]"]

    def test_default_of_the_context(self):
        assert self.dots() == ["[DEFAULT, DEFAULT]"]
        with jax.default_matmul_precision("float32"):
            assert self.dots() == ["[HIGHEST, HIGHEST]"]


class TestMemory:
    @BOTH_OPS
    def test_no_copy_per_group(self, op):
        m, k, n, g = 2048, 64, 32, 64
        lhs, rhs, _ = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in op.shapes(m, k, n, g))
        sizes = jax.ShapeDtypeStruct((g,), jnp.int32)

        def gradients(lhs, rhs, sizes):
            def loss(lhs, rhs):
                return jnp.sum(call(op, lhs, rhs, sizes).astype(jnp.float32) ** 2)

            return jax.grad(loss, (0, 1))(lhs, rhs)

        for function in (partial(call, op), gradients):
            memory = jax.jit(function).lower(lhs, rhs, sizes).compile().memory_analysis()
            # All arrays have 0.3 M elements. A masked copy for each group would have 4 M to 8 M.
            assert memory.temp_size_in_bytes < 4e6


@BOTH_OPS
@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2", "float4_e2m1fn"])
def test_elements_of_less_than_a_byte(op, name, rng):
    """Results equal exact products, wrapped if the result has the operands' dtype."""
    dtype = getattr(jnp, name)
    is_float = name.startswith("float")
    low, high = (-3, 4) if is_float else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max + 1)
    wide = jnp.float32 if is_float else jnp.int32
    lhs, rhs = (
        rng.integers(low, high, shape).astype(dtype) for shape in op.shapes(20, K, N, G)[:2]
    )
    sizes = sizes_of.multinomial(rng, 17, G)

    @jax.jit
    def both(lhs, rhs, sizes):
        out = call(op, lhs, rhs, sizes, preferred_element_type=wide)
        narrow = call(op, lhs, rhs, sizes)
        assert narrow.dtype == dtype
        return out, narrow.astype(wide)

    out, narrow = both(lhs, rhs, sizes)
    expected = op.exact(lhs, rhs, sizes).value.astype(wide)
    assert out.dtype == wide
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(narrow, expected.astype(dtype).astype(wide))


class TestForm:
    """Products use masks if a loop over tiles is not faster, because loops compile slowly."""

    @pytest.fixture
    def either_form(self):
        """Overrides the fixture of the module, so that products have the form that users get."""

    def has_loop(self, op, m, k, n, g, dtype=jnp.float32, out_dtype=None, total_groups=None):
        lhs, rhs, _ = (jax.ShapeDtypeStruct(s, dtype) for s in op.shapes(m, k, n, g))
        sizes = jax.ShapeDtypeStruct((total_groups or g,), jnp.int32)
        lowered = jax.jit(
            lambda *x: op.call.__wrapped__(*x, 0, preferred_element_type=out_dtype)
        ).lower(lhs, rhs, sizes)
        return "stablehlo.while" in lowered.as_text()

    @BOTH_OPS
    @pytest.mark.parametrize(
        "m, k, n, g", [(64, 32, 32, 8), (4, 256, 256, 2), (512, 16, 8, 4), (2048, 1, 1, 1)]
    )
    def test_up_to_the_limit(self, op, m, k, n, g):
        assert not self.has_loop(op, m, k, n, g)
        assert self.has_loop(op, m + 1, k, n, g) == (g > 1)

    @BOTH_OPS
    @pytest.mark.parametrize(
        "dtype, out_dtype, is_loop",
        [
            (jnp.bfloat16, jnp.bfloat16, False),
            (jnp.float8_e4m3fn, jnp.float16, False),
            (jnp.int8, jnp.int8, True),
            (jnp.int32, jnp.int32, True),
            (jnp.complex64, jnp.complex64, True),
        ],
    )
    def test_of_what_is_summed_in_float32(self, op, dtype, out_dtype, is_loop):
        assert self.has_loop(op, 64, 32, 32, 8, dtype, out_dtype) == is_loop
        assert not self.has_loop(op, 64, 32, 32, 1, dtype, out_dtype)

    def test_one_group_of_several_has_tiles(self):
        """The one local group may own only a few of all rows, so it is computed in tiles."""
        shape = 512, 64, 64, 1
        assert self.has_loop(NONCONTRACTING, *shape, total_groups=8)
        assert not self.has_loop(NONCONTRACTING, *shape)


@BOTH_OPS
@pytest.mark.parametrize("size", [0, 5, 13, 20, -3])
def test_one_group_is_one_dot(op, size, rng):
    """Rows that the single group does not own may hold NaN, and do not affect the result."""
    lhs, rhs, _ = (random(rng, shape, np.float32) for shape in op.shapes(13, 6, 7, 1))
    sizes = np.array([size], np.int32)
    exact = op.exact(lhs, rhs, sizes)
    for array in (lhs, rhs):
        if len(array) == 13:
            array[max(size, 0) :] = np.nan
    lowered = jax.jit(lambda *x: call(op, *x)).lower(lhs, rhs, sizes)
    assert "stablehlo.while" not in lowered.as_text()
    oracle.check(lowered.compile()(lhs, rhs, sizes), exact)


def test_gradients_of_layers_are_programs_of_moderate_size():
    """XLA spends time on each instruction, even if it removes many, so programs must be small."""
    embed, hidden, experts = 16, 24, 4

    def instructions(**options):
        def loss(layers, x):
            for router, *weights in layers:
                x += moe.dropless_mlp(x, moe.route(x @ router, 2), *weights, **options)
            return x.sum()

        shapes = (embed, experts), *[(experts, embed, hidden)] * 2, (experts, hidden, embed)
        layers = [[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]] * 4
        x = jax.ShapeDtypeStruct((32, embed), jnp.float32)
        hlo = jax.jit(jax.grad(loss)).lower(layers, x).compiler_ir("hlo").as_hlo_text()
        return hlo.count(" = ")

    assert instructions() <= 3 * instructions(implementation=jax.lax.ragged_dot)


@BOTH_OPS
def test_rank_promotion_may_be_an_error(op, rng):
    lhs, rhs = operands(op, rng, m=40)
    sizes = sizes_of.multinomial(rng, 37, G)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        out, pullback = jax.vjp(lambda *x: call(op, *x, sizes), lhs, rhs)
        pullback(out)
