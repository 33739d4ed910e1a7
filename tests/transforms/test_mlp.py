"""JAX's transformations of `ragged_mlp`, what its backward pass keeps, and its plans."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import mlp

SIZES = np.array([5, 0, 9, 3, 4], np.int32)
FACTORS = ("x", "wi_0", "wi_1", "wo", "weights")


def small(rng, dtype=np.float32, **options):
    return mlp.case(rng, tokens=12, embed=8, hidden=8, sizes=SIZES, dtype=dtype, **options)


def compared(one, other):
    """Asserts that two trees of results are close."""
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5), one, other)


def unfused(x, wi_0, wi_1, wo, sizes, rows=None, weights=None, group_offset=None):
    """Computes the MLP as separate products, whose derivatives JAX combines."""
    x = x if rows is None else x[rows]
    dot = partial(jgg.ragged_dot, group_sizes=sizes, group_offset=group_offset)
    hidden = jax.nn.silu(dot(x, wi_0)) * dot(x, wi_1)
    return dot(hidden * (1 if weights is None else weights[:, None]), wo)


class TestDerivatives:
    @pytest.mark.parametrize("with_rows", [True, False])
    def test_against_differences(self, with_rows, rng):
        case = small(rng, with_rows=with_rows)
        with jax.enable_x64(True):
            factors = [jnp.asarray(a, jnp.float64) for a in case.factors]
            # The default step is for float32, and too large for the tolerance of float64.
            layer = partial(case.run, jgg.ragged_mlp)
            check_grads(layer, factors, order=2, modes=("fwd", "rev"), eps=1e-5)

    def test_forward_mode(self, rng):
        case, other = small(rng), small(rng)
        got, want = (
            jax.jit(partial(jax.jvp, partial(case.run, f)))(case.factors, other.factors)
            for f in (jgg.ragged_mlp, unfused)
        )
        compared(got, want)

    def test_linearize(self, rng):
        case, other = small(rng), small(rng)
        y, linear = jax.linearize(partial(case.run, jgg.ragged_mlp), *case.factors)
        want = jax.jvp(partial(case.run, unfused), case.factors, other.factors)
        compared((y, linear(*other.factors)), want)

    @pytest.mark.parametrize("first", [jax.jacfwd, jax.jacrev])
    def test_hessian_times_vector(self, first, rng):
        case, other = small(rng), small(rng)

        def product(function):
            def loss(*factors):
                return jnp.sum(jnp.sin(case.run(function, *factors)))

            every = tuple(range(5))
            if first is jax.jacfwd:  # forward over reverse
                return jax.jvp(jax.grad(loss, every), case.factors, other.factors)[1]

            def along(*factors):
                return jax.jvp(loss, factors, other.factors)[1]

            return jax.grad(along, every)(*case.factors)

        compared(jax.jit(lambda: product(jgg.ragged_mlp))(), jax.jit(lambda: product(unfused))())

    def test_no_gradient_is_made_of_scatter_adds(self, rng):
        case = small(rng)

        def loss(*factors):
            return jnp.sum(case.run(jgg.ragged_mlp, *factors))

        assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss, range(5)))(*case.factors))


class TestWhatIsKept:
    """The backward pass keeps 2 T D + 4 m F bytes of 16-bit arrays, and a few integers."""

    T, D, F, E, K = 32, 16, 24, 4, 2

    def kept(self, function, *factors):
        """Returns dtypes and shapes of what the backward pass keeps, except the matrices."""
        leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *factors))
        matrices = [(x.shape, x.dtype) for x in factors if x.ndim == 3]
        found = [(x.shape, x.dtype) for x in leaves]
        for matrix in matrices:
            assert found.count(matrix) == matrices.count(matrix)
        return sorted(
            (str(dtype), shape) for shape, dtype in found if (shape, dtype) not in matrices
        )

    def case(self, rng, **options):
        return mlp.case(
            rng, tokens=self.T, top_k=self.K, embed=self.D, hidden=self.F, experts=self.E,
            dtype=jnp.bfloat16, **options,
        )  # fmt: skip

    def test_with_rows(self, rng):
        case, m = self.case(rng), self.T * self.K
        assert self.kept(partial(case.run, jgg.ragged_mlp), *case.factors) == [
            ("bfloat16", (self.T, self.D)),
            ("bfloat16", (m, self.F)),
            ("bfloat16", (m, self.F)),
            ("float32", (m,)),
            ("int32", (1,)),
            ("int32", (self.E,)),
            ("int32", (m,)),
        ]

    def test_sorted_rows(self, rng):
        case = self.case(rng, with_rows=False, with_weights=False)
        m = self.T * self.K
        assert self.kept(partial(case.run, jgg.ragged_mlp), *case.factors) == [
            ("bfloat16", (m, self.D)),
            ("bfloat16", (m, self.F)),
            ("bfloat16", (m, self.F)),
            ("int32", (1,)),
            ("int32", (self.E,)),
        ]

    def test_a_policy_that_keeps_neither(self, rng):
        case = self.case(rng)
        policy = jax.checkpoint_policies.save_only_these_names("something else")
        layer = jax.checkpoint(partial(case.run, jgg.ragged_mlp), policy=policy)
        shapes = [shape for _, shape in self.kept(layer, *case.factors)]
        assert (self.T * self.K, self.F) not in shapes and (self.T, self.D) in shapes

    def test_the_names(self, rng):
        case = self.case(rng)
        policy = jax.checkpoint_policies.save_only_these_names("mlpwi_0", "mlpwi_1")
        layer = jax.checkpoint(partial(case.run, jgg.ragged_mlp), policy=policy)
        kept = self.kept(layer, *case.factors)
        assert kept.count(("bfloat16", (self.T * self.K, self.F))) == 2
        gradient = jax.grad(lambda *a: layer(*a).astype(jnp.float32).sum(), range(5))
        assert str(jax.make_jaxpr(gradient)(*case.factors)).count("gated_ragged_dot[") == 1

    def test_the_layer_of_tokens(self, rng):
        """`dropless_mlp` keeps x by tokens, without a copy for each row, and not its result."""
        case, m = self.case(rng), self.T * self.K
        routing = moe.route(jnp.asarray(rng.standard_normal((self.T, self.E)), np.float32), self.K)

        def layer(*factors):
            return moe.dropless_mlp(factors[0], routing, *factors[1:])

        kept = self.kept(layer, *case.factors[:4])
        large = [shape for dtype, shape in kept if dtype == "bfloat16"]
        assert sorted(large) == sorted([(self.T, self.D), (m, self.F), (m, self.F)])


class TestTransformations:
    @pytest.mark.parametrize(
        "axes", [(0, None, None, None, None), (None, 0, 1, None, None), (0, 0, 0, 0, 0)]
    )
    def test_vmap_and_its_gradient(self, axes, rng):
        cases = [small(rng) for _ in range(3)]
        first = cases[0]
        factors = [
            first.factors[i] if axis is None else np.stack([c.factors[i] for c in cases], axis)
            for i, axis in enumerate(axes)
        ]

        def values_and_gradients(function):
            def run(*factors):
                return jnp.sum(jnp.sin(first.run(function, *factors)))

            return jax.vmap(jax.value_and_grad(run, tuple(range(5))), axes)

        got, want = (jax.jit(values_and_gradients(f))(*factors) for f in (jgg.ragged_mlp, unfused))
        compared(got, want)

    def test_gradient_of_vmap(self, rng):
        case = small(rng)
        xs = rng.standard_normal((3, *case.x.shape), np.float32)

        def loss(function):
            def of(xs, *factors):
                run = jax.vmap(lambda x: case.run(function, x, *factors))
                return jnp.sum(jnp.sin(run(xs)))

            return jax.jit(jax.grad(of, tuple(range(5))))

        compared(loss(jgg.ragged_mlp)(xs, *case.factors[1:]), loss(unfused)(xs, *case.factors[1:]))

    def test_vmap_of_indices(self, rng):
        case = small(rng)
        sizes = np.stack([rng.permutation(SIZES) for _ in range(3)])
        run = jax.jit(partial(jgg.ragged_mlp, rows=case.rows))
        got = jax.jit(jax.vmap(lambda s: run(*case.factors[:4], s)))(sizes)
        for one, size in zip(got, sizes, strict=True):
            compared(one, run(*case.factors[:4], size))

    def test_scan_over_layers(self, rng):
        cases = [small(rng, with_rows=False, with_weights=False) for _ in range(3)]
        stacked = [np.stack([c.factors[i] for c in cases]) for i in (1, 2, 3)]

        def loss(function, x, *stacked):
            def step(x, weights):
                return x + function(x, *weights, SIZES), None

            return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, stacked)[0] ** 2)

        got, want = (
            jax.jit(jax.grad(partial(loss, f), range(4)))(cases[0].x, *stacked)
            for f in (jgg.ragged_mlp, unfused)
        )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), got, want)

    @pytest.mark.parametrize("with_rows", [True, False])
    def test_shard_map(self, with_rows, rng):
        """Each device has all rows, and the matrices of its own experts."""
        case = mlp.case(rng, experts=8, with_rows=with_rows)
        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        split, whole = P("i"), P()

        @partial(
            jax.shard_map, mesh=mesh, in_specs=(whole, split, split, split, whole), out_specs=whole
        )
        def run(x, wi_0, wi_1, wo, weights):
            y = jgg.ragged_mlp(
                x, wi_0, wi_1, wo, case.sizes, rows=case.rows, weights=weights,
                group_offset=2 * jax.lax.axis_index("i"),
            )  # fmt: skip
            return jax.lax.psum(y, "i")

        def gradients(function):
            def loss(*factors):
                return jnp.sum(jnp.sin(function(*factors)))

            return jax.jit(jax.value_and_grad(loss, tuple(range(5))))(*case.factors)

        compared(gradients(run), gradients(partial(case.run, jgg.ragged_mlp)))

    @pytest.mark.parametrize(
        "tokens, forward",
        [(12, "few_rows_dot.v2"), (60, "gated_ragged_dot.v3")],
        ids=["few", "many"],
    )
    def test_export(self, tokens, forward, rng, extension):
        case = mlp.case(rng, tokens=tokens, embed=8, hidden=8, dtype=jnp.bfloat16)
        run = jax.jit(jax.grad(lambda *a: case.run(jgg.ragged_mlp, *a).astype(jnp.float32).sum()))
        exported = export.export(
            run, platforms=["cuda", "cpu"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
        )(*case.factors)
        text = exported.mlir_module()
        for name in (forward, "gated_ragged_dot_transpose", "paired_ragged_dot"):
            assert f"@jax_grouped_gemm.{name}" in text
        again = export.deserialize(exported.serialize())
        np.testing.assert_array_equal(again.call(*case.factors), run(*case.factors))


class TestLayers:
    def test_the_layer_is_fused_where_it_can_be(self, rng):
        case = mlp.case(rng, dtype=jnp.bfloat16)
        routing = moe.route(jnp.asarray(rng.standard_normal((24, 5)), np.float32), 2)

        def layer(x, *weights, **options):
            return moe.dropless_mlp(x, routing, *weights, **options)

        def ops(**options):
            plans = jgg.explain(partial(layer, **options), *case.factors[:4]).plans
            return [p.problem.op for p in plans]

        products = ["ragged_noncontracting"] * 3
        assert ops() == ["gated_ragged_dot", "ragged_noncontracting"]
        assert ops(implementation="xla") == products
        assert ops(activation="gelu") == ops()
        # The first plan says why the layer is not fused.
        assert ops(activation=lambda gate: gate) == ["expert_mlp", *products]
        assert ops(apply_router_weight_on_input=True) == ["expert_mlp", *products]
        np.testing.assert_array_equal(
            jax.jit(layer)(*case.factors[:4]),
            jax.jit(partial(layer, implementation="xla"))(*case.factors[:4]),
        )

    def test_gradients_of_the_layer_are_those_of_the_reference(self, rng):
        """Fused and separate operations round alike, except in x's gradient: it sums products."""
        case = mlp.case(rng, dtype=jnp.bfloat16)
        logits = jnp.asarray(rng.standard_normal((24, 5)), np.float32)
        cotangent = rng.standard_normal((24, 16), np.float32)

        def loss(logits, *factors, **options):
            y = moe.dropless_mlp(factors[0], moe.route(logits, 2), *factors[1:], **options)
            return jnp.sum(y.astype(jnp.float32) * cotangent)

        got, want = (
            jax.jit(jax.grad(partial(loss, implementation=i), range(5)))(logits, *case.factors[:4])
            for i in (None, "xla")
        )
        for name, one, other in zip(("logits", *FACTORS), got, want, strict=False):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            tolerance = dict(atol=0.02 * np.abs(other).max()) if name == "x" else dict(rtol=2**-6)
            np.testing.assert_allclose(one, other, **{"atol": 1e-6, **tolerance}, err_msg=name)
