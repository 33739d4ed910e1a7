"""`ragged_dot_accumulate`: semantics, derivatives, transformations, errors and plans."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged import call, reference
from jax_grouped_gemm._src.ragged.tiles import NARROW_TILE, PINGPONG_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F16, F32
from tests.support.ops import CONTRACTING, MAJORS, accumulation_shapes, contracting, random, swap
from tests.support.plans import how

M, K, N, G = 48, 16, 24, 6
SIZES = np.array([9, 0, 17, 1, 0, 14], np.int32)  # 41 of 48 rows


def adds_in_place(plan: jgg.Plan) -> bool:
    return plan.kernel_problem is not None and plan.kernel_problem.accumulates


def operands(rng, m=M, k=K, n=N, g=G, dtype=F32):
    """Returns an accumulator and two factors."""
    lhs, rhs, accumulator = CONTRACTING.shapes(m, k, n, g)
    return (
        rng.standard_normal(accumulator, np.float32),
        random(rng, lhs, dtype),
        random(rng, rhs, dtype),
    )


def exact(accumulator, lhs, rhs, sizes, offset=0):
    product = oracle.ragged_contracting(lhs, rhs, sizes, offset, num_groups=len(accumulator))
    return oracle.accumulated(accumulator, product)


class TestSemantics:
    @MAJORS
    @pytest.mark.parametrize("dtype", [BF16, F16, F32])
    def test_against_float64(self, dtype, transpose_lhs, transpose_rhs, rng):
        accumulator, lhs, rhs = operands(rng, dtype=dtype)
        run = jax.jit(
            partial(
                jgg.ragged_dot_accumulate,
                transpose_lhs=transpose_lhs,
                transpose_rhs=transpose_rhs,
                precision="highest",
            )
        )
        for _ in range(4):
            sizes = sizes_of.any_kind(rng, M, G)
            out = run(accumulator, swap(lhs, transpose_lhs), swap(rhs, transpose_rhs), sizes)
            assert out.dtype == F32
            oracle.check(out, exact(accumulator, lhs, rhs, sizes))

    def test_groups_without_rows_keep_theirs(self, rng):
        accumulator, lhs, rhs = operands(rng)
        out = np.asarray(jgg.ragged_dot_accumulate(accumulator, lhs, rhs, SIZES))
        np.testing.assert_array_equal(out[SIZES == 0], accumulator[SIZES == 0])
        assert (out[SIZES > 0] != accumulator[SIZES > 0]).any(axis=(1, 2)).all()

    @pytest.mark.parametrize("offset", [-7, -2, 0, 1, 4, 6])
    @pytest.mark.parametrize("local", [2, G])
    def test_group_offset(self, offset, local, rng):
        accumulator, lhs, rhs = operands(rng, g=local)
        out = jgg.ragged_dot_accumulate(accumulator, lhs, rhs, SIZES, group_offset=offset)
        oracle.check(out, exact(accumulator, lhs, rhs, SIZES, offset))

    @pytest.mark.parametrize("m, k, n, g", [(0, 8, 8, 2), (8, 0, 8, 2), (8, 8, 0, 2), (8, 8, 8, 0)])
    def test_nothing_to_multiply(self, m, k, n, g, rng):
        accumulator, lhs, rhs = operands(rng, m, k, n, g)
        out = jgg.ragged_dot_accumulate(accumulator, lhs, rhs, np.ones(g, np.int32))
        np.testing.assert_array_equal(out, accumulator)

    def test_nan_in_the_tail(self, rng):
        accumulator, lhs, rhs = operands(rng)
        clean = jgg.ragged_dot_accumulate(accumulator, lhs, rhs, SIZES)
        lhs[SIZES.sum() :] = rhs[SIZES.sum() :] = np.nan
        np.testing.assert_array_equal(
            jgg.ragged_dot_accumulate(accumulator, lhs, rhs, SIZES), clean
        )

    def test_over_a_scan(self, rng):
        steps = 3
        accumulator, lhs, rhs = operands(rng, m=steps * M)
        batches = lhs.reshape(steps, M, K), rhs.reshape(steps, M, N)
        sizes = np.stack([sizes_of.multinomial(rng, M, G) for _ in range(steps)])

        def step(accumulator, batch):
            return jgg.ragged_dot_accumulate(accumulator, *batch), None

        out, _ = jax.lax.scan(step, accumulator, (*batches, sizes))
        products = oracle.ragged_contracting(*batches, sizes).value.sum(0)
        np.testing.assert_allclose(out, accumulator + products, rtol=1e-5, atol=1e-4)


def added(accumulator, lhs, rhs, sizes):
    """Adds a separate `contracting` product. This sum is the reference of derivatives and vmap."""
    return accumulator + contracting(lhs, rhs, sizes, preferred_element_type=accumulator.dtype)


class TestDerivatives:
    def test_vjp(self, rng):
        accumulator, lhs, rhs = operands(rng)
        cotangent = rng.standard_normal(accumulator.shape, np.float32)
        _, vjp = jax.vjp(lambda *x: jgg.ragged_dot_accumulate(*x, SIZES), accumulator, lhs, rhs)
        d_accumulator, *factors = vjp(cotangent)
        np.testing.assert_array_equal(d_accumulator, cotangent)
        oracle.check_all(factors, oracle.contracting_cotangents(lhs, rhs, SIZES, cotangent))

    @pytest.mark.parametrize("argnums", [0, 1, 2, (0, 1, 2)])
    def test_second_order(self, argnums, rng):
        arrays = operands(rng)
        tangents = operands(rng)

        def gradient_along(function):
            def loss(*x):
                return jnp.sum(jnp.sin(function(*x, SIZES)))

            return jax.jit(lambda *x: jax.jvp(jax.grad(loss, argnums), x, tangents))(*arrays)

        got, want = gradient_along(jgg.ragged_dot_accumulate), gradient_along(added)
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        jax.tree.map(close, got, want)

    def test_of_sizes_alone(self, rng):
        accumulator, lhs, rhs = operands(rng)
        out, tangent = jax.jvp(
            lambda x: x * jgg.ragged_dot_accumulate(accumulator, lhs, rhs, SIZES)[0, 0, 0],
            (2.0,),
            (1.0,),
        )
        np.testing.assert_allclose(out, 2 * tangent)


class TestTransformations:
    @pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2) if any(b)])
    def test_vmap(self, batched, rng):
        batch = 3
        one = *operands(rng), SIZES
        arrays = [
            np.stack([np.roll(x, i, axis=0) for i in range(batch)], axis=-1) if b else x
            for b, x in zip(batched, one, strict=True)
        ]
        axes = [-1 if b else None for b in batched]
        out = jax.jit(jax.vmap(jgg.ragged_dot_accumulate, axes))(*arrays)
        for i in range(batch):
            each = [x[..., i] if b else x for b, x in zip(batched, arrays, strict=True)]
            oracle.check(out[i], exact(*each))

    @pytest.mark.parametrize("inner, outer", [(0, 1), (1, 0), (1, 2), (3, 1), (0, 0), (2, 3)])
    def test_nested_vmap(self, inner, outer, rng):
        arrays = [*operands(rng), SIZES]
        inner_axes, outer_axes = [None] * 4, [None] * 4
        inner_axes[inner] = outer_axes[outer] = 0
        for position, size in ((inner, 2), (outer, 3)):
            x = arrays[position]
            arrays[position] = np.stack([np.roll(x, i, axis=-1) for i in range(size)])
        out, want = jax.jit(
            lambda *given: [
                jax.vmap(jax.vmap(function, inner_axes), outer_axes)(*given)
                for function in (jgg.ragged_dot_accumulate, added)
            ]
        )(*arrays)
        assert out.shape == (3, 2, G, K, N)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)

    def test_shard_map(self, rng):
        """Each device has a part of the rows, and `psum` adds up the devices' sums."""
        devices = jax.devices("cpu")[:4]
        mesh = jax.sharding.Mesh(devices, ("x",))
        accumulator, lhs, rhs = operands(rng, m=4 * M)
        sizes = np.stack([sizes_of.multinomial(rng, M, G) for _ in devices])

        @jax.jit
        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(), P("x"), P("x"), P("x")),
            out_specs=P(),
            check_vma=True,
        )
        def run(accumulator, lhs, rhs, sizes):
            part = jgg.ragged_dot_accumulate(jnp.zeros_like(accumulator), lhs, rhs, sizes[0])
            return accumulator + jax.lax.psum(part, "x")

        out = run(accumulator, lhs, rhs, sizes)
        products = oracle.ragged_contracting(lhs.reshape(4, M, K), rhs.reshape(4, M, N), sizes)
        np.testing.assert_allclose(out, accumulator + products.value.sum(0), rtol=1e-5, atol=1e-4)

    def test_export(self, rng):
        arrays = *operands(rng), SIZES
        program = jax.export.export(
            jax.jit(jgg.ragged_dot_accumulate),
            platforms=("cpu", "cuda"),
            disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
        )(*arrays)
        loaded = jax.export.deserialize(program.serialize())
        oracle.check(loaded.call(*arrays), exact(*arrays))


class TestErrors:
    @pytest.mark.parametrize(
        "change, message",
        [
            (dict(accumulator=np.zeros((G, K, N + 1), np.float32)), r"accumulator .*\[6, 16, 24\]"),
            (dict(accumulator=np.zeros((G - 1, K, N), np.float32)), r"accumulator .*\[6, 16, 24\]"),
            (dict(accumulator=np.zeros((K, N), np.float32)), r"accumulator .*\[6, 16, 24\]"),
            (
                dict(accumulator=np.zeros((G + 1, K, N), np.float32), group_offset=0),
                r"accumulator .*\[at most 6, 16, 24\]",
            ),
            (dict(accumulator=np.zeros((G, K, N), BF16)), "accumulator .* got bfloat16"),
            (dict(accumulator=np.zeros((G, K, N), np.int32)), "accumulator .* got int32"),
            (dict(rhs=np.zeros((M, N), np.complex64)), "accumulator must be complex.* rhs of"),
            (dict(accumulator=0.0), "accumulator must be a JAX or NumPy array"),
            (dict(lhs=np.zeros((1, M, K), np.float32)), r"lhs must have 2 dimensions.*\[1,48,16\]"),
            (dict(rhs=np.zeros(M, np.float32)), r"rhs must have 2 dimensions"),
            (dict(rhs=np.zeros((M + 1, N), np.float32)), r"contracting dimensions.*\[49,24\]"),
            (dict(group_sizes=np.zeros((1, G), np.int32)), "group_sizes must have 1 dimension,"),
            (dict(group_sizes=np.zeros(G, np.float32)), "group_sizes"),
            (dict(group_offset=0.5), "group_offset"),
            (dict(transpose_lhs=True), r"contracting dimensions"),
        ],
    )
    def test_arguments(self, change, message):
        arguments = dict(
            accumulator=np.zeros((G, K, N), np.float32),
            lhs=np.zeros((M, K), np.float32),
            rhs=np.zeros((M, N), np.float32),
            group_sizes=SIZES,
        )
        with pytest.raises(TypeError, match=message):
            jgg.ragged_dot_accumulate(**{**arguments, **change})

    def test_implementation(self, rng):
        arrays = *operands(rng), SIZES
        with pytest.raises(ValueError, match="implementation"):
            jgg.ragged_dot_accumulate(*arrays, implementation="gpu")
        with pytest.raises(NotImplementedError, match="ragged_accumulate.*platform cpu"):
            jgg.ragged_dot_accumulate(*arrays, implementation="cuda")


def planned(*arguments, **options) -> jgg.Plan:
    function = partial(jgg.ragged_dot_accumulate, **options)
    (only,) = jgg.explain(function, *arguments).plans
    return only


class TestPlans:
    @pytest.mark.parametrize("rows", [64, 512, 8192])
    @pytest.mark.parametrize("dtype", [BF16, F16])
    def test_are_those_of_the_product(self, rows, dtype):
        """An accumulation has the grid and the workspace of the product with the default tile."""
        arguments = accumulation_shapes(8 * rows, 1024, 1536, 8, dtype)
        mine = planned(*arguments)
        (product,) = jgg.explain(
            partial(contracting, preferred_element_type=F32, tile=DEFAULT_TILE),
            *arguments[1:],
        ).plans
        assert adds_in_place(mine) and how(mine) == "kernel"
        for name in ("tile", "grid", "workspace_bytes", "terms", "utilization"):
            assert getattr(mine, name) == getattr(product, name), name
        assert mine.candidates == (DEFAULT_TILE, NARROW_TILE)
        assert not adds_in_place(product)
        assert "added in place by the kernel" in str(mine)
        assert "added" not in str(product)

    def test_float32_operands_are_added_outside(self):
        mine = planned(*accumulation_shapes(512, 64, 64, 4, F32))
        assert how(mine) == "kernel" and mine.terms and not adds_in_place(mine)
        assert "added by XLA" in str(mine)

    @pytest.mark.parametrize("k, n", [(36, 64), (64, 36), (1, 1)])
    def test_rows_off_16_bytes_are_added_outside(self, k, n):
        mine = planned(*accumulation_shapes(512, k, n, 4))
        assert how(mine) == "copies" and not adds_in_place(mine)
        assert "added by XLA" in str(mine)

    def test_padded_rows_of_operands_alone_do_not_matter(self):
        accumulator, lhs, rhs, sizes = accumulation_shapes(333, 64, 128, 4)
        lhs = jax.ShapeDtypeStruct(lhs.shape[::-1], lhs.dtype)
        mine = planned(accumulator, lhs, rhs, sizes, transpose_lhs=True)
        assert how(mine) == "copies" and adds_in_place(mine)

    def test_reference(self):
        mine = planned(*accumulation_shapes(512, 64, 64, 4), implementation="xla")
        assert how(mine) == "xla" and not adds_in_place(mine)

    def test_tile_of_weight_gradients(self):
        arguments = accumulation_shapes(8 * 512, 1024, 768, 8)
        with jgg.use_tiles(wgrad=DEFAULT_TILE):
            mine = planned(*arguments)
        assert (mine.tile, mine.chosen_by) == (DEFAULT_TILE, "override")
        turns = PINGPONG_TILE
        with jgg.use_tiles(wgrad=turns), pytest.raises(ValueError, match="that are not added up"):
            planned(*arguments)


def stand_in(target, results, input_output_aliases):
    """Stands in for the kernel: computes only from the operands and attributes of the call."""
    assert target == "jax_grouped_gemm.ragged_accumulate.v1"
    assert input_output_aliases == {0: 0}
    out, workspace = results

    def call(accumulator, *arrays, transpose_lhs, transpose_rhs, **numbers):
        assert numbers.keys() == {"tile_m", "tile_n", "cluster"}
        assert {type(number) for number in numbers.values()} == {np.int32}
        assert (accumulator.shape, accumulator.dtype) == (out.shape, out.dtype) and out.dtype == F32
        for x in (accumulator, *arrays[:2]):
            assert x.shape[-1] * x.dtype.itemsize % 16 == 0, "TMA cannot address such rows"
        result = reference.ragged_accumulate(
            accumulator,
            *arrays,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            precision=None,
        )
        return result, jnp.zeros(workspace.shape, workspace.dtype)

    return call


@MAJORS
@pytest.mark.parametrize("m, dtype", [(M, BF16), (M + 3, F16)])
def test_call(m, dtype, transpose_lhs, transpose_rhs, rng, monkeypatch):
    monkeypatch.setattr(jax.ffi, "ffi_call", stand_in)
    accumulator, lhs, rhs = operands(rng, m=m, dtype=dtype)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    arrays = accumulator, swap(lhs, transpose_lhs), swap(rhs, transpose_rhs), SIZES
    mine = planned(*arrays, **majors)
    assert adds_in_place(mine)
    out = call.accumulate(mine, *map(jnp.asarray, arrays), jnp.zeros(1, jnp.int32))
    oracle.check(out, exact(accumulator, lhs, rhs, SIZES))
