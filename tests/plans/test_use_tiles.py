"""Kernel configurations chosen by the user, as `explain` and a program for an H200 show them."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import oracle
from tests.support.aot import Program
from tests.support.ops import OPS, random
from tests.support.plans import how
from tests.support.tiles import NOT_COMPILED, A, B, C, add_tiles

M, K, N, G = 264, 128, 192, 4

LHS = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
RHS = jax.ShapeDtypeStruct((G, K, N), jnp.bfloat16)
SIZES = jax.ShapeDtypeStruct((G,), jnp.int32)


@pytest.fixture(autouse=True)
def more_tiles(monkeypatch):
    add_tiles(monkeypatch)


def loss(lhs, rhs, sizes, product=jgg.ragged_dot):
    return jnp.sum(product(lhs, rhs, sizes).astype(jnp.float32) ** 2)


gradients = jax.grad(loss, (0, 1))


def product_of(plan: jgg.Plan) -> str:
    """Returns the product of `loss` that a plan is for, if rhs is stored [g, k, n]."""
    if plan.problem.out == "gkn":
        return "wgrad"
    return {"gkn": "forward", "gnk": "dgrad"}[plan.problem.rhs]


def chosen(function, *arguments) -> dict[str, jgg.TileConfig]:
    """Returns the tiles that `use_tiles` chose, by product."""
    plans = jgg.explain(function, *arguments).plans
    return {product_of(p): p.tile for p in plans if p.chosen_by != "default"}


def tiles(function, *arguments) -> list[jgg.TileConfig]:
    return [plan.tile for plan in jgg.explain(function, *arguments).plans]


class TestChoice:
    def test_of_each_product_alone(self):
        assert chosen(gradients, LHS, RHS, SIZES) == {}
        with jgg.use_tiles(forward=A):
            assert chosen(gradients, LHS, RHS, SIZES) == {"forward": A}
        with jgg.use_tiles(dgrad=A):
            assert chosen(gradients, LHS, RHS, SIZES) == {"dgrad": A}
        with jgg.use_tiles(wgrad=A):
            assert chosen(gradients, LHS, RHS, SIZES) == {"wgrad": A}

    def test_of_all_products(self):
        with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
            assert chosen(gradients, LHS, RHS, SIZES) == {"forward": A, "dgrad": B, "wgrad": C}

    @pytest.mark.parametrize("op", OPS, ids=repr)
    def test_of_cotangents_by_operand(self, op):
        """The cotangent of lhs takes the tile of dgrad, and that of rhs the tile of wgrad."""
        lhs, rhs, out = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in op.shapes(M, K, N, G))

        def of_lhs(lhs, rhs, sizes, ct):
            return jax.vjp(lambda lhs: op.call(lhs, rhs, sizes), lhs)[1](ct)

        def of_rhs(lhs, rhs, sizes, ct):
            return jax.vjp(lambda rhs: op.call(lhs, rhs, sizes), rhs)[1](ct)

        with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
            assert tiles(of_lhs, lhs, rhs, SIZES, out) == [A, B]
            assert tiles(of_rhs, lhs, rhs, SIZES, out) == [A, C]

    def test_is_explained(self):
        with jgg.use_tiles(forward=A):
            text = str(jgg.explain(jgg.ragged_dot, LHS, RHS, SIZES))
        assert f"tile {A} (overridden)" in text and "192x96" in text
        assert "overridden" not in str(jgg.explain(jgg.ragged_dot, LHS, RHS, SIZES))

    def test_decides_grid_and_utilization(self):
        with jgg.use_tiles(forward=B):
            (plan,) = jgg.explain(jgg.ragged_dot, LHS, RHS, SIZES).plans
        # Groups have 66 rows on average, so two tiles of 64 rows, and two tiles of 96 columns.
        assert plan.grid == G * 2 * 2
        assert plan.utilization == pytest.approx(M * N / (132 * 64 * 96))

    def test_candidates_are_what_may_be_chosen(self):
        (plan,) = jgg.explain(jgg.ragged_dot, LHS, RHS, SIZES).plans
        assert {A, B, C, plan.tile} <= set(plan.candidates)

    def test_holds_in_control_flow(self):
        def function(lhs, rhs, sizes):
            square = rhs @ rhs.mT
            lhs, _ = jax.lax.scan(
                lambda x, _: (jgg.ragged_dot(x, square, sizes), None), lhs, length=3
            )
            lhs = jax.lax.cond(
                lhs[0, 0] > 0, lambda: jgg.ragged_dot(lhs, square, sizes), lambda: lhs
            )
            return jax.checkpoint(jgg.ragged_dot)(lhs, rhs, sizes)

        for tile in (A, B):
            with jgg.use_tiles(forward=tile):
                assert tiles(function, LHS, RHS, SIZES) == [tile] * 3

    def test_leaves_products_without_a_kernel_alone(self):
        operands = [x.update(dtype=jnp.complex64) for x in (LHS, RHS)]
        with jgg.use_tiles(forward=A):
            (plan,) = jgg.explain(jgg.ragged_dot, *operands, SIZES).plans
        assert how(plan) == "xla" and plan.tile is None

    def test_text_of_a_configuration(self):
        assert str(jgg.TileConfig(64, 128, 2)) == "64x128, cluster 2"
        assert str(jgg.TileConfig(64, 128, 1, stream_k=True)) == "64x128, cluster 1, stream-k"


class TestContext:
    def test_inner_takes_precedence_and_keeps_the_rest(self):
        with jgg.use_tiles(forward=A, dgrad=A):
            with jgg.use_tiles(dgrad=B, wgrad=C):
                inner = chosen(gradients, LHS, RHS, SIZES)
            assert chosen(gradients, LHS, RHS, SIZES) == {"forward": A, "dgrad": A}
        assert inner == {"forward": A, "dgrad": B, "wgrad": C}

    def test_ends_with_an_exception(self):
        with pytest.raises(RuntimeError), jgg.use_tiles(forward=A):
            raise RuntimeError
        assert chosen(gradients, LHS, RHS, SIZES) == {}

    def test_decorates(self):
        product = jgg.use_tiles(forward=B)(jgg.ragged_dot)
        assert tiles(product, LHS, RHS, SIZES) == [B]
        assert tiles(product, LHS, RHS, SIZES) == [B]

    def test_around_the_forward_pass_holds_for_gradients_computed_outside(self):
        def product(*arguments):
            with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
                return jgg.ragged_dot(*arguments)

        function = jax.grad(partial(loss, product=product), (0, 1))
        assert chosen(function, LHS, RHS, SIZES) == {"forward": A, "dgrad": B, "wgrad": C}

        def jitted(*arguments):
            return jax.grad(partial(loss, product=jax.jit(product)), (0, 1))(*arguments)

        assert chosen(jitted, LHS, RHS, SIZES) == {"forward": A, "dgrad": B, "wgrad": C}


class TestTransforms:
    @pytest.mark.parametrize("batched", [axes for axes in np.ndindex(2, 2, 2) if any(axes)])
    def test_vmap(self, batched):
        arguments = [
            x.update(shape=(3, *x.shape)) if b else x
            for x, b in zip((LHS, RHS, SIZES), batched, strict=True)
        ]
        with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
            mapped = jax.vmap(gradients, [0 if b else None for b in batched])
            assert sorted(map(str, tiles(mapped, *arguments))) == sorted(map(str, (A, B, C)))

    def test_forward_mode_takes_the_forward_tile(self):
        with jgg.use_tiles(forward=A):
            jvp = partial(
                jax.jvp, lambda lhs, rhs: jgg.ragged_dot(lhs, rhs, jnp.ones(G, jnp.int32))
            )
            assert tiles(jvp, (LHS, RHS), (LHS, RHS)) == [A, A, A]

    def test_cotangents_of_cotangents_are_predicted(self):
        def second(lhs, rhs, sizes):
            return loss(*gradients(lhs, rhs, sizes), sizes)

        with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
            plans = jgg.explain(jax.grad(second, (0, 1)), LHS, RHS, SIZES).plans
        # Default tiles compute the cotangents of dgrad's two operands and of wgrad's two.
        assert [plan.chosen_by for plan in plans].count("default") == 4
        assert {plan.tile for plan in plans if plan.chosen_by == "override"} == {A, B, C}

    @pytest.mark.parametrize("op", OPS, ids=repr)
    def test_results_are_the_same(self, op, rng):
        lhs, rhs, out = (random(rng, shape, jnp.bfloat16) for shape in op.shapes(M, K, N, G))
        sizes = rng.multinomial(M - 7, np.full(G, 1 / G)).astype(np.int32)
        with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
            oracle.check(op.call(lhs, rhs, sizes), op.exact(lhs, rhs, sizes))
            cotangents = op.cotangents(lhs, rhs, sizes, out)
        exact = op.exact_cotangents(lhs, rhs, sizes, out)
        for got, want in zip(cotangents, exact, strict=True):
            oracle.check(got, want)


class TestCaches:
    """JAX caches traces and programs. The chosen tiles are part of the keys of these caches."""

    def test_traces(self):
        product = jax.jit(jgg.ragged_dot)
        (predicted,) = tiles(product, LHS, RHS, SIZES)
        for tile in (A, B, A):
            with jgg.use_tiles(forward=tile):
                assert tiles(product, LHS, RHS, SIZES) == [tile]
        assert tiles(product, LHS, RHS, SIZES) == [predicted]

    def test_of_gradients(self):
        function = jax.jit(jax.grad(partial(loss, product=jax.jit(jgg.ragged_dot)), (0, 1)))
        for tile in (A, B, A):
            with jgg.use_tiles(forward=C, dgrad=tile):
                assert chosen(function, LHS, RHS, SIZES) == {"forward": C, "dgrad": tile}

    def test_programs(self):
        count = 0

        @jax.jit
        def function(*arguments):
            nonlocal count
            count += 1
            return jgg.ragged_dot(*arguments)

        operands = [jnp.zeros(x.shape, x.dtype) for x in (LHS, RHS, SIZES)]
        for tile, traced in ((A, 1), (A, 1), (B, 2), (A, 2)):
            with jgg.use_tiles(forward=tile):
                function(*operands)
            assert count == traced


class TestErrors:
    def test_not_compiled(self):
        with (
            jgg.use_tiles(forward=NOT_COMPILED),
            pytest.raises(ValueError, match="96x96") as error,
        ):
            jax.eval_shape(jgg.ragged_dot, LHS, RHS, SIZES)
        assert "ragged_noncontracting" in str(error.value)
        for tile in (A, B, C):
            assert str(tile) in str(error.value)

    @pytest.mark.parametrize("product", ["dgrad", "wgrad"])
    def test_not_compiled_for_a_cotangent(self, product):
        with jgg.use_tiles(**{product: NOT_COMPILED}):
            jax.eval_shape(jgg.ragged_dot, LHS, RHS, SIZES)
            with pytest.raises(ValueError, match="96x96"):
                jax.eval_shape(gradients, LHS, RHS, SIZES)

    def test_not_compiled_for_the_reference_too(self):
        with jgg.use_tiles(forward=NOT_COMPILED), pytest.raises(ValueError, match="96x96"):
            jgg.ragged_dot(jnp.ones((4, 8)), jnp.ones((1, 8, 8)), jnp.array([4]))

    def test_products_that_no_kernel_runs_are_not_affected(self, rng):
        lhs, rhs = (rng.integers(-5, 5, shape) for shape in ((4, 8), (1, 8, 8)))
        expected = jgg.ragged_dot(lhs, rhs, np.array([4]))
        with jgg.use_tiles(forward=NOT_COMPILED):
            np.testing.assert_array_equal(jgg.ragged_dot(lhs, rhs, np.array([4])), expected)

    @pytest.mark.parametrize("name", ["forward", "dgrad", "wgrad"])
    def test_of_another_type(self, name):
        with pytest.raises(TypeError, match=f"{name} must be .* got '128x256'"):
            with jgg.use_tiles(**{name: "128x256"}):
                pass


class TestFp8:
    @pytest.mark.parametrize(
        "fp8", [(), ("forward",), ("dgrad",), ("wgrad",), ("forward", "dgrad")]
    )
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
    def test_each_product_of_a_recipe(self, wrap, fp8):
        """Under `jit`, the gradients are traced after the context of `use_tiles` has ended."""
        products = ("forward", "dgrad", "wgrad")
        recipe = jgg.Recipe(**{name: "fp8" if name in fp8 else "bf16" for name in products})

        def product(*arguments):
            with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
                return jgg.fp8_ragged_dot(*arguments, recipe=recipe)

        function = jax.grad(partial(loss, product=wrap(product)), (0, 1))
        by_op = {(p.problem.op, p.tile) for p in jgg.explain(function, LHS, RHS, SIZES).plans}
        ops = ("ragged_noncontracting", "ragged_noncontracting", "ragged_contracting")
        assert by_op == {
            (f"scaled_{op}" if name in fp8 else op, tile)
            for name, op, tile in zip(products, ops, (A, B, C), strict=True)
        }

    def test_scaled_products(self):
        k, n, b = K, N, -(-M // 128) + G
        e4m3 = partial(jax.ShapeDtypeStruct, dtype=jnp.float8_e4m3fn)
        f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        with jgg.use_tiles(forward=A):
            assert tiles(
                jgg.scaled_ragged_dot, e4m3((M, k)), f32((M, 1)), e4m3((G, k, n)), f32((G,)), SIZES
            ) == [A]
            assert tiles(
                partial(jgg.scaled_ragged_dot_contracting, num_rows=M),
                *(e4m3((b, k, 128)), f32((b, k)), e4m3((b, n, 128)), f32((b, n)), SIZES),
            ) == [A]


@pytest.mark.parametrize(
    "recipe, counts", [(None, (1, 0, 3)), (jgg.Recipe(), (2, 2, 3))], ids=["bf16", "fp8"]
)
def test_flax_layer_needs_no_argument(recipe, counts):
    """`use_tiles` does not apply to fused kernels, which in bfloat16 leave four products."""
    pytest.importorskip("flax", reason="Flax is not installed")
    from jax_grouped_gemm.flax.linen import MoE

    layer = MoE(64, 4, 2, dtype=jnp.bfloat16, recipe=recipe)
    x = jax.ShapeDtypeStruct((2, 16, 32), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def layer_loss(variables, x):
        return jnp.sum(layer.apply(variables, x)[0].astype(jnp.float32) ** 2)

    function = jax.grad(layer_loss, (0, 1))
    with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
        found = tiles(function, variables, x)
    assert tuple(found.count(tile) for tile in (A, B, C)) == counts


class TestProgramForH200:
    """The tiles of `use_tiles` reach the kernels of a compiled program."""

    @staticmethod
    def called(program: Program) -> dict[str, set[jgg.TileConfig]]:
        """Returns the tiles in the attributes of each kernel that has a tile."""
        found = {}
        for call in program.calls:
            if "tile_m" in call.text:
                numbers = {
                    name: int(re.search(rf"\b{name} = (\d+) : i32", call.text)[1])
                    for name in ("tile_m", "tile_n", "cluster")
                }
                found.setdefault(call.kernel, set()).add(jgg.TileConfig(**numbers))
        return found

    def test_of_one_function_under_different_choices(self, h200):
        function = jax.jit(jax.value_and_grad(loss, (0, 1)))
        for forward, dgrad, wgrad in ((A, B, C), (B, C, A), (A, B, C)):
            with jgg.use_tiles(forward=forward, dgrad=dgrad, wgrad=wgrad):
                program = h200.compile(function, LHS, RHS, SIZES)
            assert self.called(program) == {
                "ragged_noncontracting": {forward, dgrad},
                "ragged_contracting": {wgrad},
            }

    def test_of_scaled_products(self, h200):
        function = jax.value_and_grad(partial(loss, product=jgg.fp8_ragged_dot), (0, 1))
        with jgg.use_tiles(forward=A, dgrad=B, wgrad=C):
            program = h200.compile(function, LHS, RHS, SIZES)
        assert self.called(program) == {
            "scaled_ragged_noncontracting": {A, B},
            "scaled_ragged_contracting": {C},
        }
