"""Derivatives, vmap and the rest of JAX's transformations of sorting and moving rows."""

import functools
from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.op import ops
from tests.support.rows import Pairs

T, D, E, K = 7, 4, 5, 3


@pytest.fixture(params=[False, True], ids=["all", "counted"])
def pairs(request, rng) -> Pairs:
    return Pairs.random(rng, T, K, T * K + 3, counted=request.param)


def gather(pairs, known):
    inverse = pairs.row_of_pair if known else None

    def run(x):
        return moe.gather_rows(x, pairs.token_of_row(), pairs.count, inverse=inverse)

    return run


def combine(pairs, known):
    order = pairs.pair_of_row if known else None

    def run(rows, weights=None):
        options = dict(weights=weights, order=order, count=pairs.count)
        return moe.combine(rows, pairs.row_of_pair, **options)

    return run


def primitives(fn, *args) -> set[str]:
    """Returns the names of all primitives of a program, nested ones included."""
    return {primitive.name for primitive in all_primitives(fn, *args)}


def all_primitives(fn, *args) -> set:
    """Returns all primitives of a program, nested ones included."""
    found = set()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            found.add(eqn.primitive)
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


@pytest.mark.parametrize("known", [True, False], ids=["inverse known", "inverse unknown"])
class TestDerivatives:
    """Derivatives match finite differences in float64, to the second order in both modes."""

    def test_gather(self, known, pairs, rng):
        with jax.enable_x64(True):
            run, x = gather(pairs, known), rng.standard_normal((T, D))
            check_grads(lambda x: jnp.sin(run(x)), (x,), order=2, eps=1e-5)

    def test_combine(self, known, pairs, rng):
        weighted = known == (pairs.count is not None)  # so that all pairs of values occur
        with jax.enable_x64(True):
            rows, weights = rng.standard_normal((T * K + 3, D)), rng.standard_normal((T, K))
            operands = (rows, weights) if weighted else (rows,)
            run = combine(pairs, known)
            check_grads(lambda *args: jnp.sin(run(*args)), operands, order=2, eps=1e-5)

    def test_third_order(self, known, rng):
        pairs = Pairs.random(rng, 3, 2, 7)
        with jax.enable_x64(True):
            operands = rng.standard_normal((7, 2)), rng.standard_normal((3, 2))
            run = combine(pairs, known)
            check_grads(
                lambda *args: jnp.sin(run(*args)), operands, order=3, modes=["rev"], eps=1e-5
            )

    def test_gather_and_combine_are_transposes(self, known, pairs, rng):
        x = rng.standard_normal((T, D)).astype(np.float32)
        rows = rng.standard_normal((T * K + 3, D)).astype(np.float32)
        rows[pairs.valid :] = 0  # rows past `valid` have no effect
        run, back = gather(pairs, known), combine(pairs, known)
        (x_bar,) = jax.linear_transpose(run, x)(rows)
        np.testing.assert_allclose(x_bar, back(rows), atol=1e-5)
        (rows_bar,) = jax.linear_transpose(back, rows)(x)
        np.testing.assert_array_equal(rows_bar[: pairs.valid], run(x)[: pairs.valid])

    def test_half_precision_gradients_are_rounded_once(self, known, rng):
        pairs = Pairs.random(rng, T, 8, missing=0)
        x = jnp.zeros((T, D), jnp.bfloat16)
        ct = jnp.asarray(rng.standard_normal((T * 8, D)), jnp.bfloat16)
        (x_bar,) = jax.linear_transpose(gather(pairs, known), x)(ct)
        exact = np.asarray(ct, np.float64)[pairs.row_of_pair].sum(axis=1)
        assert x_bar.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float64(x_bar), exact, rtol=2.0**-8, atol=1e-6)


def test_rows_with_several_tokens_have_the_sum_of_their_gradients(rng):
    inverse = rng.integers(-2, 9, (T, K)).astype(np.int32)
    with jax.enable_x64(True):
        operands = rng.standard_normal((7, D)), rng.standard_normal((T, K))
        check_grads(
            lambda y, w: jnp.sin(moe.combine(y, inverse, weights=w)), operands, order=2, eps=1e-5
        )


def test_layers_move_rows_by_the_same_primitives(rng):
    """Layers and their second derivatives move rows by primitives of public operations."""
    sizes, rows = np.array([3, 4], np.int32), rng.integers(0, T, 7)
    matrices = jnp.ones((2, D, D))

    def loss(x, wi, wo, rows):
        return jgg.ragged_mlp(x, wi, wi, wo, sizes, rows=rows).sum()

    def of_gradient(*args):
        return jnp.sin(jax.grad(loss)(*args)).sum()

    found = all_primitives(jax.grad(of_gradient), jnp.ones((T, D)), matrices, matrices, rows)
    moves = {primitive for primitive in found if primitive.name in ("gather_rows", "combine_rows")}
    assert {primitive.name for primitive in moves} == {"gather_rows", "combine_rows"}
    assert moves <= set(ops)


def test_rows_are_added_up_in_their_order(rng):
    """If only the token of each row is known, float32 sums go from the first row to the last."""
    rows = rng.integers(-1, T + 1, 5 * T)
    ct = rng.standard_normal((len(rows), D)).astype(np.float32)
    x = jnp.zeros((T, D))
    (got,) = jax.linear_transpose(lambda x: moe.gather_rows(x, rows), x)(ct)
    want = np.zeros((T, D), np.float32)
    for token, row in zip(rows, ct, strict=True):
        if 0 <= token < T:
            want[token] += row
    np.testing.assert_array_equal(got, want)


def test_gradients_with_an_expert_order_run_no_scatter(rng):
    order = moe.sort_by_expert(rng.integers(0, E, (T, K)), E)
    x, weights = jnp.ones((T, D)), jnp.ones((T, K))

    def loss(x, weights):
        rows = jnp.sin(moe.dispatch(x, order))
        return jnp.sin(moe.combine(rows, order, K, weights)).sum()

    assert primitives(jax.grad(loss, (0, 1)), x, weights) >= {
        "gather_rows",
        "combine_rows",
        "row_dots",
    }
    for differentiated in (jax.grad(loss, (0, 1)), jax.hessian(loss, (0, 1))):
        assert not {"scatter", "scatter-add", "gather", "sort"} & primitives(
            differentiated, x, weights
        )


@jax.jit
def combine_and_gradients(rows, inverse, weights, count):
    def loss(rows, weights):
        return jnp.sin(moe.combine(rows, inverse, weights=weights, count=count)).sum()

    combined = moe.combine(rows, inverse, weights=weights, count=count)
    return combined, jax.grad(loss, (0, 1))(rows, weights)


@jax.jit
def gather_and_gradient(x, inverse, weights, count):
    rows = inverse.reshape(-1)
    gradient = jax.grad(lambda x: jnp.sin(moe.gather_rows(x, rows, count)).sum())
    return moe.gather_rows(x, rows, count), gradient(x)


AXES = [(0, 0, 0, 0), (0, None, None, None), (None, 0, None, None), (None, None, 0, None)]
AXES += [(None, None, None, 0), (1, -1, None, 1), (None, 0, 0, 0)]


@pytest.mark.parametrize("axes", AXES)
class TestVmap:
    """Results and gradients with some operands mapped equal those of a loop over the batch."""

    def operands(self, axes, rng):
        cases = [Pairs.random(rng, T, K, T * K + 2, counted=True) for _ in range(3)]
        arrays = (
            [rng.standard_normal((T * K + 2, D)).astype(np.float32) for _ in range(3)],
            [case.row_of_pair for case in cases],
            [case.weights for case in cases],
            [np.int32(case.count) for case in cases],
        )
        single = [
            [x[0] if axis is None else x[i] for x, axis in zip(arrays, axes, strict=True)]
            for i in range(3)
        ]
        mapped = [
            x[0] if axis is None else np.stack(x, min(axis, x[0].ndim))
            for x, axis in zip(arrays, axes, strict=True)
        ]
        return single, mapped

    def within(self, axes, mapped):
        return tuple(
            axis if axis is None else min(axis, x.ndim - 1)
            for axis, x in zip(axes, mapped, strict=True)
        )

    def check(self, run, axes, single, mapped):
        axes = self.within(axes, mapped)
        results = jax.jit(jax.vmap(run, axes))(*mapped)
        for i, operands in enumerate(single):
            for got, want in zip(
                jax.tree.leaves(results), jax.tree.leaves(run(*operands)), strict=True
            ):
                np.testing.assert_allclose(got[i], want, atol=1e-5)

    def test_combine_and_its_gradients(self, axes, rng):
        self.check(combine_and_gradients, axes, *self.operands(axes, rng))

    def test_gradients_of_a_mapped_combine(self, axes, rng):
        """Differentiates a mapped function; the other tests of this class map gradients."""
        _, (rows, inverse, weights, count) = self.operands(axes, rng)
        axes = self.within(axes, (rows, inverse, weights, count))

        def run(rows, inverse, weights, count):
            return jnp.sin(moe.combine(rows, inverse, weights=weights, count=count)).sum()

        def mapped(rows, weights):
            return jax.vmap(run, axes)(rows, inverse, weights, count).sum()

        def looped(rows, weights):
            operands = list(zip((rows, inverse, weights, count), axes, strict=True))
            return sum(
                run(*(x if axis is None else jnp.take(x, i, axis) for x, axis in operands))
                for i in range(3)
            )

        got, want = (jax.jit(jax.grad(f, (0, 1)))(rows, weights) for f in (mapped, looped))
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, want)

    def test_gather_and_its_gradient(self, axes, rng):
        self.check(gather_and_gradient, axes, *self.operands(axes, rng))


def test_gradient_of_operands_that_a_batch_shares(rng):
    """The cotangents of all batches are added up before they are rounded."""
    orders = [moe.sort_by_expert(rng.integers(0, E, (T, K)), E) for _ in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *orders)
    ct = jnp.asarray(rng.standard_normal((3, T * K, D)), jnp.bfloat16)
    run = jax.vmap(moe.dispatch, (None, 0))
    (x_bar,) = jax.linear_transpose(lambda x: run(x, stacked), jnp.zeros((T, D), jnp.bfloat16))(ct)
    exact = sum(
        np.asarray(ct[i], np.float64)[np.asarray(orders[i].inverse).reshape(T, K)].sum(axis=1)
        for i in range(3)
    )
    assert x_bar.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(x_bar), exact, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_of_sort(axis, rng):
    experts = np.stack([rng.integers(-1, E + 1, (T, K)) for _ in range(3)], axis)
    got = jax.vmap(lambda e: moe.sort_by_expert(e, E), axis)(experts)
    for i in range(3):
        want = moe.sort_by_expert(experts.take(i, axis), E)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one[i], other)


def layer(x, experts, weights):
    """Dispatches rows, applies tanh to them, and combines them."""
    order = moe.sort_by_expert(experts, E)
    rows = jnp.tanh(moe.dispatch(x, order))
    return moe.combine(rows, order, K, weights)


@pytest.fixture
def layer_operands(rng):
    experts = rng.integers(-1, E + 1, (8, K)).astype(np.int32)
    x = rng.standard_normal((8, D)).astype(np.float32)
    return x, experts, rng.standard_normal((8, K)).astype(np.float32)


def gradients(run):
    return jax.grad(lambda x, experts, weights: (run(x, experts, weights) ** 2).sum(), (0, 2))


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.checkpoint, lambda run: jax.jit(jax.checkpoint(run))],
    ids=["jit", "remat", "jit of remat"],
)
def test_jit_and_remat(transform, layer_operands):
    for got, want in zip(
        gradients(transform(layer))(*layer_operands), gradients(layer)(*layer_operands), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_scan(layer_operands):
    x, experts, weights = layer_operands
    all_experts = np.stack([experts, experts[::-1], (experts + 1) % E])

    def scanned(x, experts, weights):
        return jax.lax.scan(lambda x, e: (layer(x, e, weights), None), x, experts)[0]

    def looped(x, experts, weights):
        return functools.reduce(lambda x, e: layer(x, e, weights), experts, x)

    for got, want in zip(
        gradients(scanned)(x, all_experts, weights),
        gradients(looped)(x, all_experts, weights),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_shard_map(layer_operands):
    """Tokens are split over devices, which share the weights."""
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:4], "x")
    x, experts, weights = layer_operands

    def on_device(x, experts, scale):
        return layer(x, experts, jnp.broadcast_to(scale, x.shape[:1] + scale.shape))

    split = jax.shard_map(on_device, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=P("x"))
    operands = x, experts, weights[0]
    np.testing.assert_allclose(jax.jit(split)(*operands), on_device(*operands), rtol=1e-5)
    for got, want in zip(
        jax.jit(gradients(split))(*operands), gradients(on_device)(*operands), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_export(layer_operands, extension):
    exported = export.export(
        jax.jit(layer), platforms=["cuda", "cpu"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*layer_operands)
    np.testing.assert_allclose(
        export.deserialize(exported.serialize()).call(*layer_operands),
        layer(*layer_operands),
        rtol=1e-6,
    )
    for kernel in ("sort_by_expert", "dispatch_rows", "combine_rows"):
        assert f"jax_grouped_gemm.{kernel}.v1" in exported.mlir_module()


def test_export_for_any_number_of_tokens(layer_operands, extension):
    """For a symbolic number of tokens, the reference runs, on a GPU too."""
    (tokens,) = export.symbolic_shape("tokens")
    exported = export.export(
        jax.jit(gradients(layer)),
        platforms=["cuda", "cpu"],
        disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
    )(*(jax.ShapeDtypeStruct((tokens, x.shape[1]), x.dtype) for x in layer_operands))
    assert "jax_grouped_gemm." not in exported.mlir_module()
    for got, want in zip(
        exported.call(*layer_operands), gradients(layer)(*layer_operands), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_kernels_that_cannot_run_say_why(rng):
    x = jnp.zeros((T, D), jnp.int32)
    with pytest.raises(NotImplementedError, match="gather_rows.*platform cpu"):
        moe.gather_rows(x, np.zeros(3, int), implementation="cuda")

    def cuda_program(x):
        return (
            jax.jit(lambda x: moe.gather_rows(x, np.zeros(3, int), implementation="cuda"))
            .trace(x)
            .lower(lowering_platforms=("cuda",))
        )

    with pytest.raises(NotImplementedError, match="bfloat16, float16 or float32, got int32"):
        cuda_program(x)
