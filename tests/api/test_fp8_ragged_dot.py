"""The trainable FP8 matmul: accuracy, straight-through gradients, recipes, transforms."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import checkpoint_policies, moe
from tests.support import fp8_oracle, oracle
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import BF16, F32

M, K, N, G = 220, 256, 136, 4
RECIPES = {
    "default": jgg.Recipe(),
    "powers of two": jgg.Recipe(power_of_two_scales=True),
    "e5m2 gradients": jgg.Recipe(gradient_dtype=jnp.float8_e5m2),
    "bf16 forward": jgg.Recipe(forward="bf16"),
    "bf16 dgrad": jgg.Recipe(dgrad="bf16"),
    "bf16 wgrad": jgg.Recipe(wgrad="bf16"),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def operands(rng, m=M, k=K, n=N, g=G, dtype=BF16):
    """Returns lhs, rhs and the cotangent of the result."""
    shapes = (m, k), (g, k, n), (m, n)
    return [jnp.asarray(rng.standard_normal(s, np.float32).astype(dtype)) for s in shapes]


def products(lhs, rhs, sizes, cotangent, call=jgg.fp8_ragged_dot, **options):
    """Returns result and cotangents of lhs and rhs, compiled once for equal shapes and options."""
    arrays = {n: options.pop(n) for n in ("group_offset", "quantized_rhs") if n in options}
    return _products(lhs, rhs, sizes, cotangent, arrays, call, tuple(options.items()))


@partial(jax.jit, static_argnums=(5, 6))
def _products(lhs, rhs, sizes, cotangent, arrays, call, options):
    options = arrays | dict(options)
    out, vjp = jax.vjp(lambda lhs, rhs: call(lhs, rhs, sizes, **options), lhs, rhs)
    return out, *vjp(cotangent.astype(out.dtype))


def exact_products(lhs, rhs, sizes, cotangent, offset=0):
    """Returns the product and its gradients without quantisation, in float64."""
    return (
        oracle.ragged_noncontracting(lhs, rhs, sizes, offset),
        *oracle.noncontracting_cotangents(lhs, rhs, sizes, cotangent, offset),
    )


class TestAccuracy:
    @EVERY_RECIPE
    def test_cosine(self, recipe, rng):
        """All three products are within 1e-3 of unquantised ones, or 3e-3 if an operand is e5m2."""
        args = *operands(rng)[:2], sizes_of.multinomial(rng, M, G), operands(rng)[2]
        got, exact = products(*args, recipe=recipe), exact_products(*args)
        is_e5m2 = recipe.gradient_dtype == jnp.float8_e5m2
        limits = (1e-3, *(2 * [3e-3 if is_e5m2 else 1e-3]))
        for one, want, limit in zip(got, exact, limits, strict=True):
            assert fp8_oracle.cosine_distance(one, want.value) < limit
            # Straight-through gradients have the right length too.
            assert abs(np.linalg.norm(np.float64(one)) / np.linalg.norm(want.value) - 1) < 1e-2

    @EVERY_RECIPE
    def test_products_of_the_quantised_operands(self, recipe, rng):
        """Each product in FP8 is the product of the operands that the oracle quantises."""
        lhs, rhs, ct = (np.asarray(x) for x in operands(rng))
        sizes = sizes_of.multinomial(rng, M - 30, G)
        got = products(lhs, rhs, sizes, ct, recipe=recipe)
        quantize = partial(fp8_oracle.quantize, power_of_two=recipe.power_of_two_scales)
        forward, gradient = recipe.forward_dtype, recipe.gradient_dtype

        def weights(block):
            pairs = [quantize(w, block, forward) for w in rhs]
            return [np.stack(x) for x in zip(*pairs, strict=True)]

        exact = list(exact_products(lhs, rhs, sizes, ct))
        if recipe.forward == "fp8":
            rows = quantize(lhs, (1, 128), forward)
            exact[0] = fp8_oracle.noncontracting(*rows, *weights((128, 128)), sizes)
        if recipe.dgrad == "fp8":
            rows = quantize(ct, (1, 128), gradient)
            values, scales = weights((128, 128))
            swapped = values.swapaxes(1, 2), scales.swapaxes(1, 2)
            exact[1] = fp8_oracle.noncontracting(*rows, *swapped, sizes)
        if recipe.wgrad == "fp8":
            groups = partial(
                fp8_oracle.quantize_groups,
                group_sizes=sizes,
                power_of_two=recipe.power_of_two_scales,
            )
            columns = *groups(lhs, dtype=forward), *groups(ct, dtype=gradient)
            exact[2] = fp8_oracle.contracting(*columns, sizes, M)
        for one, want in zip(got, exact, strict=True):
            fp8_oracle.check(one, want)

    def test_bf16_recipe_is_ragged_dot(self, rng):
        lhs, rhs, ct = operands(rng)
        sizes = sizes_of.multinomial(rng, M, G)
        recipe = jgg.Recipe(forward="bf16", dgrad="bf16", wgrad="bf16")
        got = products(lhs, rhs, sizes, ct, recipe=recipe)
        want = products(lhs, rhs, sizes, ct, call=jgg.ragged_dot)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.float32(one), np.float32(other))

    @pytest.mark.parametrize("lhs_dtype, rhs_dtype", [(BF16, F32), (F32, F32), (jnp.float16, F32)])
    def test_dtypes(self, lhs_dtype, rhs_dtype, rng):
        """Cotangents have the operands' dtypes, so float32 master weights get float32 gradients."""
        lhs, rhs, ct = operands(rng)
        args = lhs.astype(lhs_dtype), rhs.astype(rhs_dtype), sizes_of.uniform(M, G), ct
        for recipe in (jgg.Recipe(), jgg.Recipe("bf16", "bf16", "bf16")):
            out, d_lhs, d_rhs = products(*args, recipe=recipe, preferred_element_type=BF16)
            assert (out.dtype, d_lhs.dtype, d_rhs.dtype) == (BF16, lhs_dtype, rhs_dtype)
            for one, want in zip((out, d_lhs, d_rhs), exact_products(*args), strict=True):
                assert fp8_oracle.cosine_distance(one, want.value) < 1e-3

    @pytest.mark.parametrize("k, n", [(40, 24), (130, 257), (7, 5)])
    def test_dimensions(self, k, n, rng):
        lhs, rhs, ct = operands(rng, k=k, n=n)
        sizes = sizes_of.multinomial(rng, M, G)
        exact = exact_products(lhs, rhs, sizes, ct)
        for one, want in zip(products(lhs, rhs, sizes, ct), exact, strict=True):
            assert one.shape == want.value.shape
            assert fp8_oracle.cosine_distance(one, want.value) < 3e-3


class TestSemantics:
    def test_rows_without_a_group(self, rng):
        """Rows without a group get zero as result and gradient, and their values have no effect."""
        lhs, rhs, ct = operands(rng)
        sizes = np.array([50, 0, 70, 60])
        clean = products(lhs, rhs, sizes, ct)
        lhs, ct = lhs.at[180:].set(np.nan), ct.at[180:].set(np.inf)
        got = products(lhs, rhs, sizes, ct)
        for one, want in zip(got, clean, strict=True):
            np.testing.assert_array_equal(np.float32(one), np.float32(want))
        assert not np.float32(got[0])[180:].any() and not np.float32(got[1])[180:].any()
        assert not np.float32(got[2])[1].any()

    def test_nan_stays_in_its_group(self, rng):
        lhs, rhs, ct = operands(rng)
        sizes = np.array([50, 40, 70, 60])
        clean = products(lhs, rhs, sizes, ct)
        got = products(lhs.at[60, 3].set(np.nan), rhs, sizes, ct)
        out, d_lhs, d_rhs = (np.float32(x) for x in got)
        assert np.isnan(out[60]).all() and np.isnan(d_rhs[1, 3]).all()
        for one, want, where in (
            (out, clean[0], np.arange(M) != 60),
            (d_lhs, clean[1], slice(None)),
            (d_rhs, clean[2], np.arange(G) != 1),
        ):
            np.testing.assert_array_equal(one[where], np.float32(want)[where])

    @pytest.mark.parametrize("offset", [0, 1, 3, -1])
    def test_group_offset(self, offset, rng):
        lhs, rhs, ct = operands(rng, g=2)
        sizes = sizes_of.multinomial(rng, M, G)
        got = products(lhs, rhs, sizes, ct, group_offset=np.int32(offset))
        exact = exact_products(lhs, rhs, sizes, ct, offset)
        for one, want in zip(got, exact, strict=True):
            assert not np.float64(one)[want.depth == 0].any()
            if want.value.any():
                assert fp8_oracle.cosine_distance(one, want.value) < 1e-3

    def test_weights_quantised_in_advance(self, rng):
        lhs, rhs, ct = operands(rng)
        sizes = sizes_of.multinomial(rng, M, G)
        quantized = jgg.quantize_weights(rhs)
        got = products(lhs, rhs, sizes, ct, quantized_rhs=quantized)
        for one, want in zip(got, products(lhs, rhs, sizes, ct), strict=True):
            np.testing.assert_array_equal(np.float32(one), np.float32(want))


def count_primitives(jaxpr) -> Counter:
    counts = Counter(eqn.primitive.name for eqn in jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            counts += count_primitives(inner)
    return counts


class TestTransforms:
    def test_remat_quantises_nothing_twice(self, rng):
        lhs, rhs, _ = operands(rng)
        sizes = sizes_of.uniform(M, G)

        def loss(lhs, rhs):
            return jnp.sum(jnp.sin(jgg.fp8_ragged_dot(lhs, rhs, sizes).astype(F32)))

        def counts(policy):
            gradient = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1))
            counts = count_primitives(jax.make_jaxpr(gradient)(lhs, rhs).jaxpr)
            return counts["quantize_ragged"] + counts["quantize_rows"], counts["quantize_blocks"]

        assert counts(checkpoint_policies.quantized_operands_saveable) == (2, 1)
        both = checkpoint_policies.grouped_matmuls_and_quantized_operands_saveable
        assert counts(both) == (2, 1)
        assert counts(None) == (3, 2)
        want = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
        # JAX would turn saved float8_e4m3fn values of 256 and more into NaN, so bytes are saved.
        for policy in (both, checkpoint_policies.quantized_operands_saveable):
            got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(lhs, rhs)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(np.float32(one), np.float32(other))

    def test_residuals_are_fp8(self, rng):
        lhs, rhs, _ = operands(rng)
        _, vjp = jax.vjp(lambda *x: jgg.fp8_ragged_dot(*x, sizes_of.uniform(M, G)), lhs, rhs)
        kept = {x.dtype.name for x in jax.tree.leaves(vjp) if hasattr(x, "dtype") and x.size > M}
        assert kept <= {"float8_e4m3fn", "float32"} and "float8_e4m3fn" in kept
        wide = [x for x in jax.tree.leaves(vjp) if getattr(x, "dtype", None) == F32]
        assert all(x.size <= max(lhs.size, rhs.size) // 64 for x in wide)

    def test_accumulation_over_microbatches_quantises_weights_once(self, rng):
        lhs = jnp.stack([operands(rng)[0] for _ in range(3)])
        rhs = operands(rng)[1].astype(F32)
        sizes = sizes_of.multinomial(rng, M, G)

        def loss(rhs, lhs, quantized):
            out = jgg.fp8_ragged_dot(lhs, rhs, sizes, quantized_rhs=quantized)
            return jnp.sum(out.astype(F32) ** 2)

        def accumulate(rhs):
            quantized = jgg.quantize_weights(rhs)

            def step(total, lhs):
                return total + jax.grad(loss)(rhs, lhs, quantized), None

            return jax.lax.scan(step, jnp.zeros_like(rhs), lhs)[0]

        counts = count_primitives(jax.make_jaxpr(accumulate)(rhs).jaxpr)
        assert counts["quantize_blocks"] == 1
        want = sum(jax.jit(jax.grad(loss))(rhs, x, None) for x in lhs)
        np.testing.assert_allclose(jax.jit(accumulate)(rhs), want, rtol=1e-5, atol=1e-3)

    # Every pair of operands has every combination of mapped and not mapped.
    @pytest.mark.parametrize("batched", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
    def test_vmap(self, batched, rng):
        many = [operands(rng, m=70, k=130, n=40) for _ in range(2)]
        lhs, rhs, ct = (np.stack(x) for x in zip(*many, strict=True))
        sizes = np.stack([sizes_of.multinomial(rng, 60, G) for _ in range(2)])
        args = [x if b else x[0] for x, b in zip((lhs, rhs, sizes), batched, strict=True)]

        def run(lhs, rhs, sizes, ct):
            return products(lhs, rhs, sizes, ct)

        in_axes = *(0 if b else None for b in batched), 0
        got = jax.vmap(run, in_axes)(*args, ct)
        for i in range(2):
            one = [x[i] if b else x for x, b in zip(args, batched, strict=True)]
            for y, want in zip(got, run(*one, ct[i]), strict=True):
                np.testing.assert_array_equal(np.float32(y[i]), np.float32(want))

    def test_expert_parallel_gradients(self, rng):
        """With replicated rows and sharded experts, gradients are those of one device."""
        lhs, rhs, ct = operands(rng, dtype=F32)
        sizes = sizes_of.multinomial(rng, M, G)

        def body(lhs, rhs, ct):
            first = jax.lax.axis_index("x") * rhs.shape[0]
            call = partial(jgg.fp8_ragged_dot, group_offset=first)

            def loss(lhs, rhs):
                return jnp.sum(jax.lax.psum(call(lhs, rhs, sizes), "x") * ct)

            return jax.grad(loss, (0, 1))(lhs, rhs)

        mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
        specs = dict(in_specs=(P(), P("x"), P()), out_specs=(P(), P("x")))
        got = jax.jit(jax.shard_map(body, mesh=mesh, **specs))(lhs, rhs, ct)
        for one, want in zip(got, products(lhs, rhs, sizes, ct)[1:], strict=True):
            np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-4)

    def test_second_derivative(self, rng):
        lhs, rhs, _ = operands(rng)

        def loss(lhs):
            return jnp.sum(jgg.fp8_ragged_dot(lhs, rhs, sizes_of.uniform(M, G)).astype(F32) ** 2)

        with pytest.raises(NotImplementedError, match="fp8_ragged_dot is differentiable once"):
            jax.grad(lambda lhs: jnp.sum(jax.grad(loss)(lhs).astype(F32)))(lhs)


class TestMoE:
    T, D, F, E = 48, 128, 256, 4

    def inputs(self, rng):
        shapes = [(self.T, self.D), (self.T, self.E)]
        shapes += [(self.E, self.D, self.F)] * 2 + [(self.E, self.F, self.D)]
        scales = [1, 1, self.D**-0.5, self.D**-0.5, self.F**-0.5]
        return [
            jnp.asarray((scale * rng.standard_normal(shape)).astype(BF16))
            for shape, scale in zip(shapes, scales, strict=True)
        ]

    def test_layer_and_gradients(self, rng):
        inputs = self.inputs(rng)

        def layer(recipe, x, logits, *weights):
            routing = moe.route(logits, 2)
            return moe.dropless_mlp(x, routing, *weights, recipe=recipe).astype(F32)

        @partial(jax.jit, static_argnums=0)
        def results(recipe, *inputs):
            y, vjp = jax.vjp(partial(layer, recipe), *inputs)
            return y, *vjp(2 * y)

        with_fp8, without = (results(recipe, *inputs) for recipe in (jgg.Recipe(), None))
        for one, want in zip(with_fp8, without, strict=True):
            assert one.dtype == want.dtype
            assert 0 < fp8_oracle.cosine_distance(one, want) < 1e-2

    def test_flax_layers(self, rng):
        flax = pytest.importorskip("jax_grouped_gemm.flax")
        flax_nnx = pytest.importorskip("flax.nnx")
        x, recipe = self.inputs(rng)[0], jgg.Recipe()
        options = dict(dtype=BF16, recipe=recipe)
        layer = flax.nnx.MoE(
            self.D, self.F, self.E, 2, rngs=flax_nnx.Rngs(int(rng.integers(2**31))), **options
        )
        params = flax_nnx.to_pure_dict(flax_nnx.state(layer))
        graph, state = flax_nnx.split(layer)

        def linen(x, params, **options):
            return flax.linen.MoE(self.F, self.E, 2, **options).apply({"params": params}, x)[0]

        @jax.jit
        def results(x, state, params):
            y, _ = flax_nnx.merge(graph, state)(x)
            return y, linen(x, params, **options), linen(x, params, dtype=BF16)

        y, same, other = results(x, state, params)
        np.testing.assert_array_equal(np.float32(y), np.float32(same))
        assert 0 < fp8_oracle.cosine_distance(y, other) < 1e-2

    @pytest.mark.parametrize(
        "options", [dict(precision="highest"), dict(implementation=jax.lax.ragged_dot)]
    )
    def test_recipe_excludes(self, options, rng):
        x, logits, *weights = self.inputs(rng)
        with pytest.raises(ValueError, match="recipe.*precision.*implementation"):
            moe.dropless_mlp(x, moe.route(logits, 2), *weights, recipe=jgg.Recipe(), **options)


class TestErrors:
    def test_recipe(self):
        with pytest.raises(ValueError, match="wgrad.*'fp4'"):
            jgg.Recipe(wgrad="fp4")
        with pytest.raises(ValueError, match="scaling.*'rowwise'.*`ragged_dot`"):
            jgg.Recipe(scaling="rowwise")
        with pytest.raises(TypeError, match="forward_dtype.*float8.*bfloat16"):
            jgg.Recipe(forward_dtype=BF16)

    def test_operands(self, rng):
        lhs, rhs, _ = operands(rng)
        sizes = sizes_of.uniform(M, G)
        for bad, error, match in (
            ((lhs.astype(jnp.int32), rhs, sizes), TypeError, "lhs.*int32"),
            ((lhs, rhs[0], sizes), TypeError, r"rhs \[g, k, n\].*\(256, 136\)"),
            ((lhs, rhs.mT, sizes), TypeError, r"\(220, 256\).*\(4, 136, 256\)"),
            ((lhs, rhs, sizes[:3]), TypeError, "4 matrices.*3 groups"),
        ):
            with pytest.raises(error, match=match):
                jgg.fp8_ragged_dot(*bad)
        with pytest.raises(TypeError, match="recipe must be.*'fp8'"):
            jgg.fp8_ragged_dot(lhs, rhs, sizes, recipe="fp8")
        with pytest.raises(TypeError, match="quantized_rhs must be"):
            quantized = jgg.quantize_weights(rhs, jnp.float8_e5m2)
            jgg.fp8_ragged_dot(lhs, rhs, sizes, quantized_rhs=quantized)

    @pytest.mark.parametrize(
        "change, message",
        [
            (
                lambda q: q._replace(scales_t=q.scales_t[:1]),
                r"scales_t is float32 of .*\(4, 2, 2\)",
            ),
            (lambda q: q._replace(scales=q.scales.mT[:, :1]), r"scales is float32 of"),
            (lambda q: q._replace(scales=q.scales.astype(BF16)), "scales is float32.*bfloat16"),
            (lambda q: q._replace(values_t=q.values), "values_t is float8_e4m3fn"),
            (lambda q: q._replace(values=None), "quantized_rhs.values must be a JAX"),
            (tuple, "must be QuantizedWeights.*got tuple"),
            (lambda q: q.values, "must be QuantizedWeights"),
        ],
    )
    def test_quantized_weights(self, change, message, rng):
        lhs, rhs, _ = operands(rng)
        quantized = change(jgg.quantize_weights(rhs))
        with pytest.raises(TypeError, match=message):
            jgg.fp8_ragged_dot(lhs, rhs, sizes_of.uniform(M, G), quantized_rhs=quantized)
