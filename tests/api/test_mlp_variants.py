"""`ragged_mlp` with biases, with gate and up in one matrix, and without an up projection.

Values and gradients are compared with float64 results, computed one group at a time.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.activations import ACTIVATIONS, hidden_layer
from tests.support import group_sizes as sizes_of
from tests.support import mlp

M, D, F, E = 48, 16, 24, 5
BF16 = jnp.bfloat16
FORMS = ("two", "both", "alone")  # gate and up in two matrices, in one, or a gate alone
FORM = pytest.mark.parametrize("form", FORMS)


@dataclass
class Variant:
    """A case of `ragged_mlp` of one form, with biases."""

    case: mlp.Case
    biases: tuple
    form: str

    @property
    def factors(self):
        """The operands that have gradients, by name."""
        c = self.case
        given = dict(x=c.x, wi_0=c.wi_0, wi_1=c.wi_1, wo=c.wo, weights=c.weights)
        given |= dict(zip(("b0", "b1", "bo"), self.biases, strict=True))
        if self.form == "both":
            given["wi_0"] = np.concatenate([given["wi_0"], given.pop("wi_1")], axis=2)
        if self.form == "alone":
            del given["wi_1"], given["b1"]
        return {name: x for name, x in given.items() if x is not None}

    def run(self, factors, **options):
        biases = tuple(factors.get(name) for name in ("b0", "b1", "bo"))
        return self.case.run(
            jgg.ragged_mlp, factors["x"], factors["wi_0"], factors.get("wi_1"), factors["wo"],
            factors.get("weights"), biases=biases, **options,
        )  # fmt: skip

    def exact(self, cotangent, activation="silu"):
        """Returns the value and the gradients, in float64."""
        c, x = self.case, self.case.on_rows
        wi_0, wi_1, wo = (np.asarray(w).astype(np.float64) for w in (c.wi_0, c.wi_1, c.wo))
        b0, b1, bo = (
            np.zeros(w.shape[::2]) if b is None else np.asarray(b).astype(np.float64)
            for b, w in zip(self.biases, (wi_0, wi_1, wo), strict=True)
        )
        weights = np.ones(len(x)) if c.weights is None else c.weights.astype(np.float64)
        y, dx, dweights = np.zeros((len(x), wo.shape[2])), np.zeros(x.shape), np.zeros(len(x))
        names = ("wi_0", "wi_1", "wo", "b0", "b1", "bo")
        d = {n: np.zeros(a.shape) for n, a in zip(names, (wi_0, wi_1, wo, b0, b1, bo), strict=True)}
        for g, (start, end) in enumerate(c.windows):
            part, dy = slice(start, end), cotangent[start:end].astype(np.float64)
            w = weights[part, None]
            gate, up = x[part] @ wi_0[g] + b0[g], x[part] @ wi_1[g] + b1[g]
            a, u, da, du = mlp.activated(activation, gate, up)
            if self.form == "alone":
                u, du = np.ones_like(u), np.zeros_like(du)
            hidden = w * a * u
            y[part] = hidden @ wo[g] + w * bo[g]
            dh = dy @ wo[g].T
            dgate, dup = w * dh * da * u, w * dh * a * du
            dx[part] = dgate @ wi_0[g].T + dup @ wi_1[g].T
            d["wi_0"][g], d["wi_1"][g] = x[part].T @ dgate, x[part].T @ dup
            d["wo"][g], d["bo"][g] = hidden.T @ dy, (w * dy).sum(0)
            d["b0"][g], d["b1"][g] = dgate.sum(0), dup.sum(0)
            dweights[part] = (dh * a * u).sum(1) + dy @ bo[g]
        if c.rows is not None:
            of_tokens = np.zeros(np.shape(c.x))
            np.add.at(of_tokens, c.rows, dx)
            dx = of_tokens
        d |= dict(x=dx, weights=dweights)
        if self.form == "both":
            d["wi_0"] = np.concatenate([d["wi_0"], d["wi_1"]], axis=2)
        return y, {name: d[name] for name in self.factors}

    def exact_sine(self):
        """Returns the sum of sin y and its gradients, in float64."""
        y, _ = self.exact(np.zeros((len(self.case.on_rows), D)))
        return np.sin(y).sum(), self.exact(np.cos(y))[1]

    def moved(self, direction, step):
        """Returns the variant whose operands, in float64, are `step` further in a direction."""

        def moved(x, by):
            return x.astype(np.float64) + step * by.astype(np.float64)

        names = "x", "wi_0", "wi_1", "wo", "weights"
        own, other = vars(self.case), vars(direction.case)
        case = replace(self.case, **{name: moved(own[name], other[name]) for name in names})
        return replace(self, case=case, biases=tuple(map(moved, self.biases, direction.biases)))


def variant(rng, form, *, biased=(True, True, True), dtype=np.float32, **options) -> Variant:
    case = mlp.case(rng, embed=D, hidden=F, experts=E, dtype=dtype, **options)
    shapes = [w.shape[::2] for w in (case.wi_0, case.wi_1, case.wo)]
    biases = [
        rng.standard_normal(shape).astype(dtype) if given else None
        for shape, given in zip(shapes, biased, strict=True)
    ]
    return Variant(case, tuple(biases), form)


@partial(jax.jit, static_argnames=("form", "activation"))
def value_and_gradients(factors, sizes, rows, cotangent, form, offset, activation):
    """Returns y and the gradients of factors, compiled once for variants of equal shapes."""
    case = mlp.Case(None, None, None, None, sizes, rows, offset=offset)
    y, vjp = jax.vjp(partial(Variant(case, (), form).run, activation=activation), factors)
    return y, vjp(jnp.asarray(cotangent, y.dtype))[0]


def check(one: Variant, rng, activation="silu", tolerance=3e-5):
    cotangent = rng.standard_normal((len(one.case.on_rows), D), np.float32)
    c = one.case
    y, gradients = value_and_gradients(
        one.factors, c.sizes, c.rows, cotangent, one.form, c.offset, activation
    )
    exact, exact_gradients = one.exact(cotangent, activation)
    for name, got, want in [
        ("y", y, exact),
        *((name, gradients[name], exact_gradients[name]) for name in one.factors),
    ]:
        got = np.asarray(got).astype(np.float64)
        bound = tolerance * max(1, np.abs(want).max())
        np.testing.assert_allclose(got, want, atol=bound, err_msg=name)


# Clipped activations need an up projection. If gate and up are in one matrix, their results are
# separated before the activation, so two activations suffice.
OF_FORM = dict(two=mlp.ACTIVATIONS, both=("silu", "swiglu_oai"), alone=mlp.UNCLIPPED)


@pytest.mark.parametrize("form, activation", [(f, a) for f in FORMS for a in OF_FORM[f]])
def test_activations(form, activation, rng):
    check(variant(rng, form), rng, activation)


@FORM
@pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "sorted"])
@pytest.mark.parametrize("with_weights", [True, False], ids=["weights", "ones"])
def test_operands_that_may_be_missing(form, with_rows, with_weights, rng):
    # Test single biases only with `rows`, because biases do not depend on where rows came from.
    # Router weights multiply the last bias, but not those of gate and up.
    one_bias = [(with_weights, not with_weights, False), (False, False, True)]
    for biased in [(False,) * 3, *(one_bias if with_rows else ())]:
        options = dict(with_rows=with_rows, with_weights=with_weights)
        check(variant(rng, form, biased=biased, **options), rng)


@FORM
def test_group_sizes(form, rng):
    """Experts may be empty or have all rows. Sizes may leave a tail of rows, or be invalid."""
    lists = [sizes_of.one_hot(M, E, 3), np.zeros(E, np.int32)]
    lists += [sizes_of.any_kind(rng, M, E) for _ in range(4)]
    for sizes in lists:
        check(variant(rng, form, sizes=sizes), rng)


@FORM
@pytest.mark.parametrize("offset", [-2, 2, 4])
def test_experts_that_are_not_here(form, offset, rng):
    check(variant(rng, form, local=3, offset=offset), rng)


@FORM
def test_16_bits(form, rng):
    check(variant(rng, form, dtype=BF16), rng, tolerance=0.03)


def test_biases_of_another_dtype(rng):
    one = variant(rng, "two", dtype=BF16)
    one.biases = tuple(b.astype(np.float32) for b in one.biases)
    check(one, rng, tolerance=0.03)
    gradient = jax.grad(lambda f: jnp.sum(one.run(f).astype(jnp.float32)))
    gradients = jax.eval_shape(gradient, one.factors)
    assert {name: x.dtype for name, x in gradients.items()} == {
        name: x.dtype for name, x in one.factors.items()
    }


@FORM
def test_what_no_group_owns_is_never_read(form, rng):
    sizes = np.array([7, 0, 9, 3, 4], np.int32)
    clean = variant(rng, form, sizes=sizes, with_rows=False)
    owned = np.arange(M) < 23
    x, weights = clean.case.x.copy(), clean.case.weights.copy()
    x[~owned], weights[~owned] = np.nan, np.inf
    dirty = replace(clean, case=replace(clean.case, x=x, weights=weights))
    cotangent = rng.standard_normal((M, D), np.float32)
    results = [
        value_and_gradients(one.factors, sizes, None, dy, form, None, "silu")
        for one, dy in ((dirty, np.where(owned[:, None], cotangent, np.nan)), (clean, cotangent))
    ]
    assert not np.asarray(results[0][0])[~owned].any()
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *results)


@FORM
def test_what_is_kept(form, rng):
    """Gradients keep operands, indices, and gate and up of 4 m F bytes (2 m F without up)."""
    one = variant(rng, form, dtype=BF16)
    leaves = jax.tree.leaves(jax.eval_shape(lambda f: jax.vjp(one.run, f)[1], one.factors))
    factors = [(x.shape, x.dtype) for x in one.factors.values()]
    found = sorted((x.shape, str(x.dtype)) for x in leaves if (x.shape, x.dtype) not in factors)
    indices = [((1,), "int32"), ((E,), "int32"), ((M,), "int32")]
    assert found == sorted([((M, F), "bfloat16")] * (1 if form == "alone" else 2) + indices)


def inner(one, other):
    return sum(jax.tree.leaves(jax.tree.map(lambda a, b: (a * b).sum(), one, other)))


@FORM
def test_derivatives_of_any_order(form, rng):
    """Second derivatives match float64 differences of exact values and of exact gradients."""
    one, direction = (variant(rng, form, tokens=8, sizes=[5, 0, 3, 2, 4]) for _ in range(2))
    cotangent = rng.standard_normal((16, D))
    with jax.enable_x64(True):

        @jax.jit
        def derivatives(factors, along):
            gradient = jax.grad(lambda f: inner(one.run(f), cotangent))

            def tangent(f):
                return jax.jvp(one.run, (f,), (along,))[1]

            twice = [
                jax.jvp(gradient, (factors,), (along,))[1],
                jax.grad(lambda f: inner(tangent(f), cotangent))(factors),
                jax.grad(lambda f: inner(gradient(f), along))(factors),
            ]
            return jax.jvp(tangent, (factors,), (along,)), gradient(factors), twice

        # A step of length 0 keeps the operands' values, and makes them float64.
        (first, second), gradient, twice = derivatives(
            one.moved(direction, 0).factors, direction.moved(direction, 0).factors
        )
    step = 1e-4
    (below, d_below), (y, dy), (above, d_above) = (
        one.moved(direction, by).exact(cotangent) for by in (-step, 0, step)
    )
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(first, (above - below) / (2 * step))
    close(second, (above - 2 * y + below) / step**2)
    jax.tree.map(close, gradient, dy)
    for each in twice:
        jax.tree.map(lambda x, a, b: close(x, (a - b) / (2 * step)), each, d_above, d_below)


@FORM
def test_vmap_scan_and_remat(form, rng):
    one, *others = (variant(rng, form, with_rows=False) for _ in range(4))
    others = [replace(each, case=replace(each.case, sizes=one.case.sizes)) for each in others]
    stacked = jax.tree.map(lambda *x: np.stack(x), *(each.factors for each in others))

    def loss(factors):
        return jnp.sum(jnp.sin(one.run(factors)))

    want = jax.tree.map(lambda *x: np.stack(x), *(each.exact_sine() for each in others))
    got = jax.jit(jax.vmap(jax.value_and_grad(loss)))(stacked)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)

    names = jax.checkpoint_policies.save_only_these_names("mlpwi_0", "mlpwi_1")
    nothing = jax.checkpoint_policies.nothing_saveable
    for policy in dict(two=(names, nothing), both=(names,), alone=(nothing,))[form]:

        def all_of(stacked, policy=policy):
            step = jax.checkpoint(lambda total, f: (total + loss(f), None), policy=policy)
            return jax.lax.scan(step, 0.0, stacked)[0]

        got = jax.jit(jax.grad(all_of))(stacked)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want[1])


@FORM
def test_shard_map(form, rng):
    """Experts are divided among devices. Each device has all rows, and its window of the groups."""
    one = variant(rng, form)
    one = replace(one, case=replace(one.case, sizes=sizes_of.multinomial(rng, M, 4)))
    factors = {n: x[:4] if n not in ("x", "weights") else x for n, x in one.factors.items()}
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {n: jax.P() if n in ("x", "weights") else jax.P("i") for n in factors}

    @partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=jax.P())
    def run(factors):
        return jax.lax.psum(one.run(factors, group_offset=jax.lax.axis_index("i")), "i")

    got = jax.jit(jax.value_and_grad(lambda f: jnp.sum(jnp.sin(run(f)))))(factors)
    value, gradients = one.exact_sine()
    want = value, {n: x[:4] if n not in ("x", "weights") else x for n, x in gradients.items()}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)


@FORM
def test_export(form, rng, extension):
    one = variant(rng, form, dtype=BF16)

    def run(factors):
        return jax.grad(lambda f: jnp.sum(one.run(f).astype(jnp.float32)))(factors)

    exported = jax.export.export(
        jax.jit(run), platforms=["cuda", "cpu"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(one.factors)
    again = jax.export.deserialize(exported.serialize())
    jax.tree.map(np.testing.assert_array_equal, again.call(one.factors), jax.jit(run)(one.factors))


def test_the_hidden_layer_alone(rng):
    one = variant(rng, "both", biased=(True, True, False))
    c = one.case
    biases = one.biases[:2]
    options = dict(rows=c.rows, weights=c.weights, biases=biases)
    got = jgg.gated_ragged_dot(
        c.x, one.factors["wi_0"], None, c.sizes, concatenated=True, **options
    )
    want = jgg.gated_ragged_dot(c.x, c.wi_0, c.wi_1, c.sizes, **options)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "columns, wi_1, message",
    [
        (24, True, "wi_1 must be None where wi_0 has gate and up"),
        (23, False, r"wi_0 must be \[g, D, 2 F\] to have gate and up"),
    ],
)
def test_errors_of_one_matrix(columns, wi_1, message, rng):
    x, wi = np.ones((M, D), np.float32), np.ones((E, D, columns), np.float32)
    sizes = sizes_of.uniform(M, E)
    with pytest.raises(TypeError, match=message):
        jgg.gated_ragged_dot(x, wi, wi if wi_1 else None, sizes, concatenated=True)


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=(1, 2))
def hidden(activation, gate, up):
    return hidden_layer(ACTIVATIONS[activation], gate[None, None], up[None, None], None).sum()


@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
@pytest.mark.parametrize("gate", [-3e38, -2e19, -1e13, 1e13, 2e19])
def test_slopes_of_large_gates_are_finite(activation, gate):
    """Slopes are finite for gates whose squares or products with other factors overflow float32."""
    up = 3.0
    if activation == "relu2" and gate > 1e13:
        gate = 1e13  # the value is the square of the gate, which must be finite

    value, slopes = hidden(activation, np.float32(gate), np.float32(up))
    with np.errstate(over="ignore"):  # exp overflows where the sigmoid is zero
        exact, factor, slope, factor_slope = mlp.activated(
            activation, np.float64(gate), np.float64(up)
        )
    np.testing.assert_allclose(value, exact * factor, rtol=1e-6)
    np.testing.assert_allclose(slopes[0], slope * factor, rtol=1e-6)
    np.testing.assert_allclose(slopes[1], exact * factor_slope, rtol=1e-6)
