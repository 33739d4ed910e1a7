"""`ragged_dot` in the place of `jax.lax.ragged_dot`: sharding, sizes of 64 bits, messages, NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg

SIZES = np.array([3, 4], np.int32)


@pytest.fixture
def operands(rng):
    return rng.standard_normal((8, 6), np.float32), rng.standard_normal((2, 6, 4), np.float32)


class TestOutSharding:
    @pytest.fixture
    def mesh(self):
        return jax.make_mesh((4,), ("d",), (AxisType.Explicit,))

    def test_none_is_the_seventh_argument(self, operands):
        np.testing.assert_array_equal(
            jgg.ragged_dot(*operands, SIZES, None, None, None, None),
            jgg.ragged_dot(*operands, SIZES),
        )

    @pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P()])
    @pytest.mark.parametrize("named", [False, True])
    def test_arrays_over_explicit_axes(self, spec, named, operands, mesh):
        expected = jgg.ragged_dot(*operands, SIZES)
        with jax.set_mesh(mesh):
            x, w = jax.device_put(operands[0], P("d")), operands[1]
            sharding = NamedSharding(mesh, spec) if named else spec

            def product(x, w):
                return jgg.ragged_dot(x, w, SIZES, out_sharding=sharding)

            y = jax.jit(product)(x, w)
            assert jax.typeof(y).sharding.spec == P(*spec, *[None] * (2 - len(spec)))
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
            gradients = jax.jit(jax.grad(lambda *a: (product(*a) ** 2).sum(), (0, 1)))(x, w)
        assert jax.typeof(gradients[0]).sharding.spec == P("d", None)
        want = jax.grad(lambda *a: (jgg.ragged_dot(*a, SIZES) ** 2).sum(), (0, 1))(*operands)
        for ours, exact in zip(gradients, want, strict=True):
            np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-5)

    def test_without_it_rows_stay_split(self, operands, mesh):
        with jax.set_mesh(mesh):
            y = jgg.ragged_dot(jax.device_put(operands[0], P("d")), operands[1], SIZES)
        assert jax.typeof(y).sharding.spec == P("d", None)
        np.testing.assert_allclose(y, jgg.ragged_dot(*operands, SIZES), rtol=1e-5, atol=1e-6)

    def test_what_it_may_be(self, operands):
        jgg.ragged_dot(*operands, SIZES, out_sharding=P())
        with pytest.raises(ValueError, match="explicit mesh axes.*'d'"):
            jgg.ragged_dot(*operands, SIZES, out_sharding=P("d"))
        with pytest.raises(TypeError, match="out_sharding.*got 'd'"):
            jgg.ragged_dot(*operands, SIZES, out_sharding="d")


def test_ours_in_the_place_of_jax_own(operands, monkeypatch):
    expected = jgg.ragged_dot(*operands, SIZES)
    monkeypatch.setattr(jax.lax, "ragged_dot_general", jgg.ragged_dot_general)
    monkeypatch.setattr(jax.lax, "ragged_dot", jgg.ragged_dot)
    # The shapes must be new, because JAX caches the abstract evaluation of earlier ones.
    x = np.concatenate([operands[0]] * 2)
    np.testing.assert_array_equal(jax.lax.ragged_dot(x, operands[1], SIZES)[:7], expected[:7])


class TestSizesOf64Bits:
    """Without x64, sizes and offsets of 64 bits are clipped to the range of int32, not wrapped."""

    @pytest.mark.parametrize(
        "sizes, means",
        [
            (np.array([2**33, 1]), [8, 0]),
            (np.array([-(2**33) + 4, 3]), [0, 3]),
            (np.array([3, 2**63], np.uint64), [3, 5]),
        ],
    )
    def test_group_sizes(self, sizes, means, operands):
        np.testing.assert_array_equal(
            jgg.ragged_dot(*operands, sizes), jgg.ragged_dot(*operands, np.array(means))
        )
        np.testing.assert_array_equal(
            jgg.fp8_ragged_dot(*operands, sizes), jgg.fp8_ragged_dot(*operands, np.array(means))
        )

    @pytest.mark.parametrize("offset", [np.uint64(2**63), 2**40, 2**70, -(2**70), np.int64(2**33)])
    def test_offsets_beyond_the_groups(self, offset, operands):
        x, w = operands
        assert not np.any(jgg.ragged_dot(x, w[:1], SIZES, group_offset=offset))

    @pytest.mark.parametrize("offset", [True, 1.0, "1", np.float32(1)])
    def test_other_offsets(self, offset, operands):
        with pytest.raises(TypeError, match="group_offset must be integers"):
            jgg.ragged_dot(*operands, SIZES, group_offset=offset)


class TestMessages:
    def test_keys(self, operands):
        with pytest.raises(TypeError, match=r"lhs must be an array of numbers.*key<fry>"):
            jgg.ragged_dot(jax.random.split(jax.random.key(0), 8), operands[1], SIZES)

    def test_a_matrix_in_place_of_a_stack(self, operands):
        with pytest.raises(TypeError, match=r"rhs \[g, k, n\].*float32\[6,4\]"):
            jgg.ragged_dot(operands[0], operands[1][0], SIZES)

    def test_a_transposed_stack(self, operands):
        with pytest.raises(TypeError, match=r"rhs \[g, n, k\] with transpose_rhs=True"):
            jgg.ragged_dot(*operands, SIZES, transpose_rhs=True)

    def test_precision(self, operands):
        with pytest.raises(ValueError, match="precision must be .*'foo'"):
            jgg.ragged_dot(*operands, SIZES, precision="foo")

    def test_lists_and_variables_of_flax(self, operands):
        advice = r"must be .*, got {}: .*; jnp\.asarray\(\) makes an array of it"
        with pytest.raises(TypeError, match="group_sizes " + advice.format("list")):
            jgg.ragged_dot(*operands, SIZES.tolist())

        class Variable:
            def __jax_array__(self):
                return jnp.asarray(operands[1])

        with pytest.raises(TypeError, match="rhs " + advice.format("Variable")):
            jgg.ragged_dot(operands[0], Variable(), SIZES)
        jgg.ragged_dot(operands[0], jnp.asarray(Variable()), jnp.asarray(SIZES.tolist()))

    def test_long_lists_are_not_printed(self, operands):
        with pytest.raises(TypeError, match="lhs must be a JAX or NumPy array") as caught:
            jgg.ragged_dot(np.ones((200, 200)).tolist(), operands[1], SIZES)
        assert len(str(caught.value)) < 350


def test_nan_in_rows_of_no_group_with_debug_nans(operands):
    x, w = operands
    x[7] = np.nan
    x, w = jnp.asarray(x), jnp.asarray(w)
    with jax.debug_nans(True):
        gradient = jax.grad(lambda w: jgg.ragged_dot(x, w, SIZES).sum())(w)
    assert np.isfinite(gradient).all()
