"""With `adapters`, code that calls `jax.lax.ragged_dot` or tokamax runs this package's products."""

import re
import threading

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import ragged_dot, ragged_dot_general  # imported by name, as in other packages
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import adapters

SIZES = np.array([5, 0, 9, 7], np.int32)  # three of 24 rows belong to no group


@pytest.fixture
def operands(rng):
    lhs, rhs = rng.standard_normal((24, 16)), rng.standard_normal((4, 16, 8))
    return jnp.asarray(lhs, jnp.float32), jnp.asarray(rhs, jnp.float32), jnp.asarray(SIZES)


@pytest.fixture
def lines_in_programs():
    """Makes programs name the Python lines that they come from. conftest.py switches this off."""
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", limit)


def is_ours(function, *arguments) -> bool:
    """Returns whether this package, and not JAX, computes the ragged products of a program."""
    text = str(jax.make_jaxpr(function)(*arguments))
    ours, theirs = re.search(r"= ragged_(non)?contracting\[", text), "= ragged_dot_general[" in text
    assert bool(ours) != theirs, text
    return bool(ours)


def expected(lhs, rhs, sizes):
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((len(lhs), rhs.shape[2]))
    ends = np.cumsum(sizes)
    for w, begin, end in zip(rhs, ends - sizes, ends, strict=True):
        out[begin:end] = lhs[begin:end] @ w
    return out


class TestReplaceLax:
    def test_names_that_were_imported_before(self, operands):
        assert not is_ours(ragged_dot, *operands)
        with adapters.replace_lax():
            assert is_ours(ragged_dot, *operands)
            assert is_ours(jax.lax.ragged_dot, *operands)
            out = ragged_dot(*operands)
        np.testing.assert_allclose(out, expected(*operands), atol=1e-5)
        assert not is_ours(ragged_dot, *operands)

    def test_general_products(self, operands):
        lhs, _, sizes = operands
        numbers = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())),
            lhs_ragged_dimensions=(0,),
            rhs_group_dimensions=(),
        )
        want = ragged_dot_general(lhs, 2 * lhs, sizes, numbers)
        with adapters.replace_lax():
            assert is_ours(lambda x: ragged_dot_general(x, 2 * x, sizes, numbers), lhs)
            out = ragged_dot_general(lhs, 2 * lhs, sizes, numbers)
        np.testing.assert_allclose(out, want, atol=1e-4)

    def test_a_jitted_function_is_traced_again(self, operands):
        traced = []

        @jax.jit
        def function(*operands):
            traced.append(is_ours(ragged_dot, *operands))
            return ragged_dot(*operands)

        function(*operands)
        with adapters.replace_lax():
            function(*operands)
            function(*operands)
        function(*operands)
        assert traced == [False, True]

    def test_a_program_that_was_traced_before(self, operands):
        program = jax.make_jaxpr(ragged_dot)(*operands)
        run = jax.extend.core.jaxpr_as_fun(program)
        with adapters.replace_lax():
            assert is_ours(run, *operands)

    def test_derivatives(self, operands):
        lhs, rhs, sizes = operands

        def loss(lhs, rhs):
            return jnp.sum(jnp.sin(ragged_dot(lhs, rhs, sizes)))

        want = jax.grad(loss, (0, 1))(lhs, rhs)
        with adapters.replace_lax():
            assert is_ours(jax.grad(jax.checkpoint(loss), (0, 1)), lhs, rhs)
            found = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
            _, tangent = jax.jvp(loss, (lhs, rhs), (lhs, rhs))
        for ours, theirs in zip(found, want, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
        np.testing.assert_allclose(
            tangent, sum(jnp.vdot(g, x) for g, x in zip(want, (lhs, rhs), strict=True)), rtol=1e-4
        )

    def test_vmap_and_scan(self, operands):
        lhs, rhs, sizes = operands
        batch = jnp.stack([lhs, 2 * lhs])

        def mapped(batch):
            return jax.vmap(lambda x: ragged_dot(x, rhs, sizes))(batch)

        def scanned(batch):
            return jax.lax.scan(lambda c, x: (c, ragged_dot(x, rhs, sizes)), 0, batch)[1]

        with adapters.replace_lax():
            for function in (mapped, scanned):
                assert is_ours(function, batch)
                for out, x in zip(function(batch), batch, strict=True):
                    np.testing.assert_allclose(out, expected(x, rhs, sizes), atol=1e-4)

    def test_shard_map(self, operands):
        lhs, rhs, sizes = operands
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = dict(in_specs=(P(), P(None, None, "x"), P()), out_specs=P(None, "x"))
        function = jax.shard_map(ragged_dot, mesh=mesh, **specs)
        with adapters.replace_lax():
            assert is_ours(function, *operands)
            out = jax.jit(function)(*operands)
        np.testing.assert_allclose(out, expected(*operands), atol=1e-5)

    def test_other_threads_are_left_alone(self, operands):
        found = []
        with adapters.replace_lax():
            thread = threading.Thread(target=lambda: found.append(is_ours(ragged_dot, *operands)))
            thread.start()
            thread.join()
        assert found == [False]

    def test_always(self, operands):
        found = []
        adapters.replace_lax_always()
        try:
            thread = threading.Thread(target=lambda: found.append(is_ours(ragged_dot, *operands)))
            thread.start()
            thread.join()
            assert found == [True] and is_ours(ragged_dot, *operands)
        finally:
            adapters.replace_lax_always(False)
        assert not is_ours(ragged_dot, *operands)
        with pytest.raises(TypeError, match="replace must be a boolean, got 1"):
            adapters.replace_lax_always(1)

    def test_errors_are_those_of_jax(self, operands):
        lhs, rhs, sizes = operands
        with adapters.replace_lax():
            with pytest.raises(TypeError):
                ragged_dot(lhs[:, :3], rhs, sizes)
        assert not is_ours(ragged_dot, *operands)

    def test_what_ours_does_not_offer(self, operands):
        """JAX itself computes products that we lack: sums over the ragged and another dimension."""
        x, sizes = operands[0].reshape(24, 4, 4), operands[2]
        numbers = jax.lax.RaggedDotDimensionNumbers((((0, 1), (0, 1)), ((), ())), [0], [])
        want = ragged_dot_general(x, x, sizes, numbers)
        with adapters.replace_lax():
            out = ragged_dot_general(x, x, sizes, numbers)
        np.testing.assert_array_equal(out, want)

    def test_first_use_under_explicit_axes(self, operands):
        adapters._original.cache_clear()
        with jax.set_mesh(jax.make_mesh((2,), ("x",))):
            with adapters.replace_lax():
                assert is_ours(ragged_dot, *operands)

    def test_programs_name_the_lines_of_the_user(self, operands, lines_in_programs):
        def lowered():
            return jax.jit(lambda *x: ragged_dot(*x)).lower(*operands).as_text(debug_info=True)

        with adapters.replace_lax():
            ours = lowered()
        for text in (ours, lowered()):
            assert "test_adapters.py" in text
            assert "adapters.py" not in text.replace("test_adapters.py", "") and "_src" not in text

    def test_a_primitive_that_others_have_wrapped(self, operands, monkeypatch):
        with adapters.replace_lax():
            primitive = adapters._original()
        calls, theirs = [], type(primitive).bind.__get__(primitive)
        monkeypatch.setattr(
            primitive, "bind", lambda *args, **params: calls.append(1) or theirs(*args, **params)
        )
        with adapters.replace_lax():
            assert is_ours(lambda *x: ragged_dot(*x), *operands)
        with_theirs = len(calls)
        assert not is_ours(lambda *x: ragged_dot(*x), *operands)
        assert len(calls) == with_theirs + 1

    def test_a_function_that_the_user_has_replaced(self, operands, monkeypatch):
        """`replace_lax` still works if the user has put our function in the place of JAX's."""
        adapters._original.cache_clear()
        monkeypatch.setattr(jax.lax, "ragged_dot", jgg.ragged_dot)
        with adapters.replace_lax():
            assert is_ours(lambda *x: jax.lax.ragged_dot(*x), *operands)
            assert is_ours(lambda *x: ragged_dot(*x), *operands)

    @pytest.mark.parametrize(
        "function, built",
        [
            (jnp.sin, r"\('sin', 1, "),
            (lambda x: jnp.sin(jnp.cos(x)), r"\('cos', 1, .*\('sin', 1, "),
        ],
    )
    def test_an_unknown_jax(self, function, built, operands, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(
                adapters, "jax_ragged_dot_general", lambda lhs, *_, **numbers: function(lhs)
            )
            adapters._original.cache_clear()
            with pytest.raises(
                RuntimeError, match=f"ragged_dot_general of JAX .* built of .{built}"
            ):
                adapters.replace_lax_always()
        adapters._original.cache_clear()
        with adapters.replace_lax():
            assert is_ours(ragged_dot, *operands)


def test_kernels_of_unchanged_code(h200):
    """Inside `replace_lax`, both gradients of `jax.lax.ragged_dot` compile to kernels."""
    shapes = [(4096, 512), (8, 512, 1024)]
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)

    def step(lhs, rhs, sizes):
        return jax.grad(lambda *x: ragged_dot(*x, sizes).sum(dtype=jnp.float32), (0, 1))(lhs, rhs)

    assert not h200.compile(step, lhs, rhs, sizes).kernels
    with adapters.replace_lax():
        assert sum(h200.compile(step, lhs, rhs, sizes).kernels.values()) == 2


def test_kernels_of_an_unchanged_flax_layer(h200):
    """Inside `replace_lax`, both gradients of a user's Flax NNX layer compile to kernels."""
    nnx = pytest.importorskip("flax.nnx")

    class Experts(nnx.Module):
        def __init__(self, rngs):
            weights = jax.random.normal(rngs.params(), (8, 512, 1024), jnp.bfloat16)
            self.kernel = nnx.Param(weights)

        def __call__(self, x, sizes):
            return jax.lax.ragged_dot(x, self.kernel[...], sizes)

    graph, params = nnx.split(nnx.eval_shape(lambda: Experts(nnx.Rngs(0))))
    (kernel,), tree = jax.tree.flatten(params)
    x = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)

    def step(kernel, x, sizes):
        def loss(kernel, x):
            layer = nnx.merge(graph, jax.tree.unflatten(tree, [kernel]))
            return layer(x, sizes).sum(dtype=jnp.float32)

        return jax.grad(loss, (0, 1))(kernel, x)

    kernel = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
    assert not h200.compile(step, kernel, x, sizes).kernels
    with adapters.replace_lax():
        assert sum(h200.compile(step, kernel, x, sizes).kernels.values()) == 2


class TestTokamax:
    def test_as_tokamax_calls_it(self, operands):
        lhs, rhs, sizes = operands

        class GroupSizes:
            value = sizes

        for given in (sizes, GroupSizes()):
            out = adapters.tokamax_ragged_dot(
                lhs,
                rhs,
                group_sizes=given,
                precision=None,
                preferred_element_type=jnp.float32,
                activation=None,
                manual_axis_type=None,
            )
            np.testing.assert_allclose(out, expected(*operands), atol=1e-5)

    def test_in_tokamax(self, operands):
        tokamax = pytest.importorskip("tokamax")
        # Otherwise tokamax would parse pytest's options.
        pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()
        own = [adapters.tokamax_ragged_dot]
        out = tokamax.ragged_dot(*operands, implementation=own)
        np.testing.assert_allclose(out, expected(*operands), atol=1e-5)
        with_next = tokamax.ragged_dot(
            *operands, activation=jax.nn.relu, implementation=[*own, "xla"]
        )
        np.testing.assert_allclose(with_next, np.maximum(expected(*operands), 0), atol=1e-5)

    def test_declines(self, operands):
        lhs, rhs, sizes = operands
        call = adapters.tokamax_ragged_dot
        with pytest.raises(NotImplementedError, match="no activation of tokamax"):
            call(lhs, rhs, group_sizes=sizes, activation=jax.nn.relu)
        with pytest.raises(NotImplementedError, match="no new of tokamax"):
            call(lhs, rhs, group_sizes=sizes, new=1)
        with pytest.raises(NotImplementedError, match="got rhs of QuantizedArray"):
            call(lhs, jgg.quantize(jnp.ones((4, 32, 8)), "int8"), group_sizes=sizes)
