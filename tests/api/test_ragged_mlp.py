"""`ragged_mlp` and `gated_ragged_dot` against a float64 computation of one row at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import group_sizes as sizes_of
from tests.support import mlp

M = 48

ROWS = pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "sorted"])
WEIGHTS = pytest.mark.parametrize("with_weights", [True, False], ids=["weights", "ones"])


def gradients(case, cotangent, **options):
    return case.value_and_gradients(cotangent, **options)[1:]


def exact_gradients(case, cotangent, activation="silu"):
    """Returns gradients with respect to x, wi_0, wi_1, wo and weights, in float64."""
    x, dy = case.on_rows, np.asarray(cotangent, np.float64)
    wi_0, wi_1, wo = (np.asarray(w).astype(np.float64) for w in (case.wi_0, case.wi_1, case.wo))
    dx, dwi_0, dwi_1, dwo = (np.zeros(a.shape) for a in (x, wi_0, wi_1, wo))
    dweights = np.zeros(len(x))
    for g, (start, end) in enumerate(case.windows):
        part = slice(start, end)
        w = np.ones(len(x)) if case.weights is None else case.weights.astype(np.float64)
        w = w[part, None]
        a, u, da, du = mlp.activated(activation, x[part] @ wi_0[g], x[part] @ wi_1[g])
        dh = dy[part] @ wo[g].T
        dgate, dup = w * dh * da * u, w * dh * a * du
        dx[part] = dgate @ wi_0[g].T + dup @ wi_1[g].T
        dwi_0[g], dwi_1[g] = x[part].T @ dgate, x[part].T @ dup
        dwo[g] = (w * a * u).T @ dy[part]
        dweights[part] = (dh * a * u).sum(1)
    if case.rows is not None:
        of_tokens = np.zeros(np.shape(case.x))
        np.add.at(of_tokens, case.rows, dx)
        dx = of_tokens
    return [dx, dwi_0, dwi_1, dwo, dweights][: len(case.factors)]


def check_close(actual, exact, tolerance=1e-5):
    for one, want in zip(actual, exact, strict=True):
        np.testing.assert_allclose(one, want, atol=tolerance * max(1, np.abs(want).max()))


class TestValues:
    @pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
    def test_activations(self, activation, rng):
        # With this spread, gates lie on both sides of every limit.
        case = mlp.case(rng, spread=6.0)
        y = case.value(activation=activation)
        exact = case.exact(activation)
        np.testing.assert_allclose(y, exact, atol=2e-5 * np.abs(exact).max())

    @ROWS
    @WEIGHTS
    def test_operands_that_may_be_missing(self, with_rows, with_weights, rng):
        case = mlp.case(rng, with_rows=with_rows, with_weights=with_weights)
        np.testing.assert_allclose(case.value(), case.exact(), atol=1e-5)

    @ROWS
    def test_group_sizes(self, with_rows, rng):
        """All rows may be in one group or in none, and sizes may be negative or too large."""
        lists = [sizes_of.one_hot(M, 5, 3), np.zeros(5, np.int32)]
        lists += [sizes_of.any_kind(rng, M, 5) for _ in range(8)]
        for sizes in lists:
            case = mlp.case(rng, sizes=sizes, with_rows=with_rows)
            np.testing.assert_allclose(case.value(), case.exact(), atol=1e-5)

    @pytest.mark.parametrize("offset", [-2, 0, 2, 4])
    def test_window(self, offset, rng):
        case = mlp.case(rng, local=3, offset=offset)
        np.testing.assert_allclose(case.value(), case.exact(), atol=1e-5)

    def test_biases(self, rng):
        case = mlp.case(rng)
        shapes = [w.shape[::2] for w in (case.wi_0, case.wi_1, case.wo)]
        biases = tuple(rng.standard_normal(shape, np.float32) for shape in shapes)
        np.testing.assert_allclose(case.value(biases=biases), case.exact(biases=biases), atol=2e-5)

    def test_without_a_gate(self, rng):
        case = mlp.case(rng)
        y = jgg.ragged_mlp(
            case.x, case.wi_0, None, case.wo, case.sizes, rows=case.rows, weights=case.weights,
            activation="relu2",
        )  # fmt: skip
        ones = jnp.eye(24)[None]  # up = 1 for every row
        hidden = jgg.ragged_dot(case.x[case.rows], case.wi_0, case.sizes)
        hidden = jax.nn.relu(hidden) ** 2 * case.weights[:, None] * ones.sum(1)
        np.testing.assert_allclose(y, jgg.ragged_dot(hidden, case.wo, case.sizes), atol=1e-5)

    def test_any_function(self, rng):
        case = mlp.case(rng)
        named = case.value(activation="relu")
        np.testing.assert_array_equal(case.value(activation=lambda g: jnp.maximum(g, 0)), named)

    def test_mixed_dtypes(self, rng):
        case = mlp.case(rng)
        case.x = case.x.astype(jnp.bfloat16)
        y = case.value()
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, case.exact(), atol=1e-5)

    @pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
    def test_rows_of_any_integer_type(self, dtype, rng):
        """`rows` may have a type too small to count all tokens, and may point past the last one."""
        x, *matrices = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((300, 3), (2, 3, 5), (2, 3, 5), (2, 5, 3))
        )
        rows = np.array([0, 1, 254, 3 if dtype != np.int64 else 2**32 + 1])
        sizes = np.array([2, 2], np.int32)

        def gradient(rows):
            return jax.grad(lambda x: jgg.ragged_mlp(x, *matrices, sizes, rows=rows).sum())(x)

        expected = gradient(np.where(rows < 300, rows, -1).astype(np.int32))
        np.testing.assert_array_equal(gradient(rows.astype(dtype)), expected)

    def test_rows_out_of_range_are_zero(self, rng):
        case = mlp.case(rng)
        case.rows = case.rows.copy()
        case.rows[:4] = [-1, 24, 2**31 - 1, -(2**31)]
        y = np.asarray(case.value())
        assert not y[:4].any()
        (dx, *_) = gradients(case, np.ones_like(y))
        exact = mlp.Case(**(vars(case) | dict(rows=np.where(np.arange(M) < 4, 0, case.rows))))
        exact.weights = np.where(np.arange(M) < 4, 0, exact.weights)
        check_close([dx], exact_gradients(exact, np.ones_like(y))[:1])

    @ROWS
    def test_what_no_group_owns_is_never_read(self, with_rows, rng):
        sizes = np.array([7, 0, 9, 3, 4], np.int32)
        clean = mlp.case(rng, sizes=sizes, offset=1, local=3, with_rows=False)
        dirty = mlp.Case(**vars(clean))
        dirty.x, dirty.weights = clean.x.copy(), clean.weights.copy()
        owned = np.zeros(M, bool)
        owned[7:19] = True
        dirty.x[~owned], dirty.weights[~owned] = np.nan, np.inf
        if with_rows:
            dirty.rows = np.arange(M, dtype=np.int32)
        y, want = np.asarray(dirty.value()), np.asarray(clean.value())
        np.testing.assert_array_equal(y, want)
        assert not y[~owned].any() and y[owned].any()
        cotangent = rng.standard_normal(y.shape, np.float32)
        poisoned = np.where(owned[:, None], cotangent, np.nan)
        for got, exact in zip(
            gradients(dirty, poisoned), exact_gradients(clean, cotangent), strict=True
        ):
            np.testing.assert_allclose(got, exact, atol=1e-5)

    @pytest.mark.parametrize("sizes", [dict(tokens=0), dict(hidden=0), dict(embed=0)])
    def test_nothing(self, sizes, rng):
        case = mlp.case(rng, sizes=np.zeros(5), **sizes)
        y = case.value()
        assert y.shape == case.exact().shape and not np.asarray(y).any()


class TestRounding:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize("activation", mlp.FUSED)
    def test_gate_and_up_are_rounded_before_the_activation(self, activation, dtype, rng):
        """Gate and up are rounded like residuals, and like the results of separate products."""
        case = mlp.case(rng, dtype=dtype, spread=4.0)
        x = case.x[case.rows]
        gate, up = (jgg.ragged_dot(x, w, case.sizes) for w in (case.wi_0, case.wi_1))
        gated = jax.jit(partial(moe.gated_activation, activation=activation))
        hidden = gated(gate, up, jnp.asarray(case.weights))
        want = jgg.ragged_dot(hidden, case.wo, case.sizes)
        # XLA may fuse tanh differently in one larger program, which changes last bits.
        same = np.asarray(case.value(activation=activation)) == want
        assert same.mean() > 0.97 if activation == "gelu_tanh" else same.all()
        first = jax.jit(partial(jgg.gated_ragged_dot, activation=activation))
        got = first(case.x, case.wi_0, case.wi_1, case.sizes, rows=case.rows, weights=case.weights)
        np.testing.assert_array_equal(got, hidden)

    def test_kept_or_computed_again(self, rng):
        """Gradients have the same bits under every checkpoint policy."""
        case = mlp.case(rng, dtype=jnp.bfloat16)
        cotangent = rng.standard_normal((M, 16), np.float32)
        policies = jax.checkpoint_policies
        names = policies.save_only_these_names("mlpwi_0", "mlpwi_1")
        results = []
        for policy in (None, names, policies.nothing_saveable, policies.everything_saveable):
            remat = partial(jax.checkpoint, policy=policy) if policy else lambda f: f

            def loss(*factors, remat=remat):
                y = remat(partial(case.run, jgg.ragged_mlp))(*factors)
                return jnp.sum(y.astype(jnp.float32) * cotangent)

            results.append(jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))(*case.factors))
        for other in results[1:]:
            jax.tree.map(np.testing.assert_array_equal, other, results[0])


class TestGradients:
    @pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
    def test_activations(self, activation, rng):
        case = mlp.case(rng, spread=6.0)
        cotangent = rng.standard_normal((M, 16), np.float32)
        got = gradients(case, cotangent, activation=activation)
        check_close(got, exact_gradients(case, cotangent, activation), 3e-5)

    @ROWS
    @WEIGHTS
    def test_operands_that_may_be_missing(self, with_rows, with_weights, rng):
        case = mlp.case(rng, with_rows=with_rows, with_weights=with_weights)
        cotangent = rng.standard_normal((M, 16), np.float32)
        check_close(gradients(case, cotangent), exact_gradients(case, cotangent))

    def test_tokens_of_unequal_numbers_of_rows(self, rng):
        case = mlp.case(rng, tokens=6, top_k=8)
        case.rows = rng.choice(np.array([0, 0, 0, 2, 5], np.int32), M)
        cotangent = rng.standard_normal((M, 16), np.float32)
        check_close(gradients(case, cotangent), exact_gradients(case, cotangent))

    @pytest.mark.parametrize("wanted", range(5))
    def test_of_one_operand_alone(self, wanted, rng):
        case = mlp.case(rng)
        cotangent = rng.standard_normal((M, 16), np.float32)

        def loss(factor):
            factors = [*case.factors[:wanted], factor, *case.factors[wanted + 1 :]]
            return jnp.sum(case.run(jgg.ragged_mlp, *factors) * cotangent)

        got = jax.jit(jax.grad(loss))(case.factors[wanted])
        check_close([got], [exact_gradients(case, cotangent)[wanted]])

    def test_biases(self, rng):
        """Gradients of biases match float64 differences along a random direction."""
        case = mlp.case(rng)
        biases, directions = (
            [rng.standard_normal(w.shape[::2]) for w in (case.wi_0, case.wi_1, case.wo)]
            for _ in range(2)
        )
        cotangent = rng.standard_normal((M, 16))

        def loss(biases):
            y = case.run(jgg.ragged_mlp, *case.factors, biases=biases)
            return jnp.sum(y * cotangent)

        got = jax.grad(loss)(tuple(b.astype(np.float32) for b in biases))
        along = sum(np.sum(np.asarray(g) * d) for g, d in zip(got, directions, strict=True))
        step, pairs = 1e-6, list(zip(biases, directions, strict=True))
        ends = (
            np.sum(cotangent * case.exact(biases=[b + s * d for b, d in pairs]))
            for s in (step, -step)
        )
        np.testing.assert_allclose(along, np.subtract(*ends) / (2 * step), rtol=1e-4, atol=1e-3)


class TestArguments:
    @pytest.mark.parametrize(
        "change, error, message",
        [
            (dict(wi_1=np.ones((5, 16, 23), np.float32)), TypeError, "wi_1 must have the shape"),
            (dict(wo=np.ones((5, 16, 24), np.float32)), TypeError, "wo must have the shape"),
            (dict(weights=np.ones(3, np.float32)), TypeError, r"weights must have .*\(48,\)"),
            (dict(x=np.ones((24, 17), np.float32)), TypeError, "x must have the shape"),
            (dict(x=np.ones((24, 16), np.int32)), TypeError, "x must be floating"),
            (dict(rows=np.ones(48, np.float32)), TypeError, "rows must be integer"),
            (dict(rows=np.ones((4, 12), np.int32)), TypeError, r"rows must be \[m\]"),
            (dict(sizes=np.ones(6, np.int32)), TypeError, "ragged_mlp: wi_0 has 5 .* 6 groups"),
            (dict(sizes=np.ones(5, np.float32)), TypeError, "group_sizes must be integers"),
        ],
    )
    def test_operands(self, change, error, message, rng):
        case = mlp.Case(**(vars(mlp.case(rng)) | change))
        with pytest.raises(error, match=message):
            case.run(jgg.ragged_mlp, *case.factors)

    @pytest.mark.parametrize(
        "options, error, message",
        [
            (dict(activation="swish"), ValueError, "activation must be"),
            (dict(activation=3), TypeError, "activation must be"),
            (dict(implementation="triton"), ValueError, "implementation must be"),
            (dict(biases=(None, None)), TypeError, "biases must be a tuple of 3"),
            (dict(biases=(np.ones(4, np.float32), None, None)), TypeError, r"biases\[0\]"),
            (dict(group_offset=1.5), TypeError, "group_offset"),
        ],
    )
    def test_options(self, options, error, message, rng):
        case = mlp.case(rng)
        with pytest.raises(error, match=message):
            case.run(jgg.ragged_mlp, *case.factors, **options)

    def test_kernels_can_be_insisted_on(self, rng):
        case = mlp.case(rng)
        with pytest.raises(NotImplementedError, match="gated_ragged_dot.*platform cpu"):
            case.value(implementation="cuda")
