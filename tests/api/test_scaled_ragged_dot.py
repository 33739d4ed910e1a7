"""Products of FP8 operands with scales against float64 products of the dequantised operands."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fp8.formats import IN_BLOCKS
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.fp8.scaled import primitive
from jax_grouped_gemm._src.ragged.plan import plan_product
from tests.support import fp8_oracle, fp8_products
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import E4M3, E5M2

M, K, N, G = 150, 200, 144, 4
KB, NB = 2, 2  # blocks of 128 in K and N


def fp8(rng, shape, dtype=E4M3):
    return rng.standard_normal(shape, np.float32).astype(dtype)


def scales(rng, shape):
    return np.exp(rng.uniform(-2, 2, shape)).astype(np.float32)


LHS_SCALES = {
    "1x128": (M, KB),
    "rows": (M, 1),
    "row vector": (M,),
    "tensor": (),
    "tensor of one": (1, 1),
    "column-major": (KB, 152),
}
RHS_SCALES = {
    "128x128": (G, KB, NB),
    "channels": (G, N),
    "groups": (G,),
    "tensor": (),
}


def full_scales(lhs_scale, rhs_scale):
    """Returns the scales in the shapes that the oracle takes."""
    if lhs_scale.shape == (KB, 152):
        lhs_scale = lhs_scale[:, :M].T
    elif lhs_scale.ndim < 2:
        lhs_scale = lhs_scale.reshape(-1, 1)
    if rhs_scale.shape == (G, N):
        rhs_scale = rhs_scale[:, None, :]
    elif rhs_scale.ndim < 3:
        rhs_scale = np.broadcast_to(rhs_scale.reshape(-1, 1, 1), (G, 1, 1))
    return lhs_scale, rhs_scale


class TestNoncontracting:
    def run(self, lhs, lhs_scale, rhs, rhs_scale, sizes, offset=None, transpose=True, **options):
        if transpose:
            rhs = np.ascontiguousarray(np.swapaxes(rhs, 1, 2))
            rhs_scale = np.swapaxes(rhs_scale, 1, 2) if rhs_scale.ndim == 3 else rhs_scale
        options.setdefault("lhs_scaling", fp8_products.lhs_scaling(lhs, lhs_scale))
        function = partial(jgg.scaled_ragged_dot, transpose_rhs=transpose, **options)
        return jax.jit(lambda *args: function(*args[:-1], group_offset=args[-1]))(
            lhs, lhs_scale, rhs, rhs_scale, sizes, offset
        )

    @pytest.mark.parametrize("lhs_shape", LHS_SCALES.values(), ids=LHS_SCALES)
    @pytest.mark.parametrize("rhs_shape", RHS_SCALES.values(), ids=RHS_SCALES)
    def test_scale_shapes(self, lhs_shape, rhs_shape, rng):
        lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, K, N))
        lhs_scale, rhs_scale = scales(rng, lhs_shape), scales(rng, rhs_shape)
        sizes = sizes_of.multinomial(rng, M - 9, G)
        full_lhs, full_rhs = full_scales(lhs_scale, rhs_scale)
        exact = fp8_oracle.noncontracting(lhs, full_lhs, rhs, full_rhs, sizes)
        for transpose in (False, True):
            out = self.run(lhs, lhs_scale, rhs, rhs_scale, sizes, transpose=transpose)
            assert out.dtype == jnp.bfloat16
            fp8_oracle.check(out, exact)

    @pytest.mark.parametrize("lhs_dtype, rhs_dtype", list(product((E4M3, E5M2), repeat=2)))
    @pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
    def test_dtypes(self, lhs_dtype, rhs_dtype, out_dtype, rng):
        lhs, rhs = fp8(rng, (M, K), lhs_dtype), fp8(rng, (G, K, N), rhs_dtype)
        lhs_scale, rhs_scale = scales(rng, (M, KB)), scales(rng, (G, KB, NB))
        sizes = sizes_of.multinomial(rng, M, G)
        out = self.run(lhs, lhs_scale, rhs, rhs_scale, sizes, preferred_element_type=out_dtype)
        assert out.dtype == out_dtype
        fp8_oracle.check(out, fp8_oracle.noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes))

    @pytest.mark.parametrize("k, n", [(128, 256), (16, 16), (130, 1), (7, 5), (384, 129)])
    def test_dimensions(self, k, n, rng):
        kb, nb = -(-k // 128), -(-n // 128)
        lhs, rhs = fp8(rng, (M, k)), fp8(rng, (G, k, n))
        lhs_scale, rhs_scale = scales(rng, (M, kb)), scales(rng, (G, kb, nb))
        sizes = sizes_of.any_kind(rng, M, G)
        out = self.run(lhs, lhs_scale, rhs, rhs_scale, sizes)
        fp8_oracle.check(out, fp8_oracle.noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes))

    def test_nan_in_rows_that_no_group_owns(self, rng):
        lhs, rhs = fp8(rng, (M, K)), fp8(rng, (2, K, N))
        lhs_scale, rhs_scale = scales(rng, (M, KB)), scales(rng, (2, KB, NB))
        sizes = np.array([20, 50, 30, 40])
        lhs[:20], lhs_scale[100:] = np.nan, np.nan
        exact = fp8_oracle.noncontracting(
            np.where(np.isnan(lhs.astype(np.float32)), 0, lhs.astype(np.float32)),
            np.nan_to_num(lhs_scale),
            rhs,
            rhs_scale,
            sizes,
            1,
        )
        out = self.run(lhs, lhs_scale, rhs, rhs_scale, sizes, offset=np.int32(1))
        fp8_oracle.check(out, exact)
        assert not np.asarray(out, np.float32)[:20].any()
        assert not np.asarray(out, np.float32)[100:].any()

    @pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2, 2) if any(b)])
    def test_vmap(self, batched, rng):
        m, k, n = 40, 130, 24
        shapes = [(m, k), (m, 2), (G, n, k), (G, 1, 2), (G,)]
        operands = [
            fp8(rng, (3, *shapes[0])),
            scales(rng, (3, *shapes[1])),
            fp8(rng, (3, *shapes[2])),
            scales(rng, (3, *shapes[3])),
            np.stack([sizes_of.multinomial(rng, m - 5, G) for _ in range(3)]),
        ]
        operands = [x if b else x[0] for x, b in zip(operands, batched, strict=True)]
        function = partial(jgg.scaled_ragged_dot, transpose_rhs=True)
        out = jax.vmap(function, [0 if b else None for b in batched])(*operands)
        for i in range(3):
            one = function(*(x[i] if b else x for x, b in zip(operands, batched, strict=True)))
            np.testing.assert_array_equal(out[i], one)

    def test_shard_map_by_expert(self, rng):
        lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, N, K))
        lhs_scale, rhs_scale = scales(rng, (M, KB)), scales(rng, (G, NB, KB))
        sizes = sizes_of.multinomial(rng, M, G)

        def body(lhs, lhs_scale, rhs, rhs_scale, sizes):
            first = jax.lax.axis_index("x") * rhs.shape[0]
            return jax.lax.psum(
                jgg.scaled_ragged_dot(
                    lhs,
                    lhs_scale,
                    rhs,
                    rhs_scale,
                    sizes,
                    transpose_rhs=True,
                    group_offset=first,
                    preferred_element_type=jnp.float32,
                ),
                "x",
            )

        mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
        specs = (P(), P(), P("x"), P("x"), P())
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
        out = jax.jit(run)(lhs, lhs_scale, rhs, rhs_scale, sizes)
        want = fp8_oracle.noncontracting(
            lhs, lhs_scale, rhs.swapaxes(1, 2), rhs_scale.swapaxes(1, 2), sizes
        )
        fp8_oracle.check(out, want)

    def test_layouts_are_never_guessed(self, rng):
        """With as many rows as blocks of columns, the shape is ambiguous; `lhs_scaling` decides."""
        lhs, rhs = fp8(rng, (4, 512)), fp8(rng, (1, 512, N))
        lhs_scale, sizes = scales(rng, (4, 4)), np.array([4])
        for scaling, full in (("1x128", lhs_scale), ("1x128 column-major", lhs_scale.T)):
            out = self.run(lhs, lhs_scale, rhs, np.float32(2), sizes, lhs_scaling=scaling)
            exact = fp8_oracle.noncontracting(lhs, full, rhs, np.full((1, 1, 1), 2.0), sizes)
            fp8_oracle.check(out, exact)

    @pytest.mark.parametrize("shape", [(M,), (M, 1), (), (KB, 152)])
    def test_other_layouts_are_named(self, shape, rng):
        lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, K, N))
        with pytest.raises(TypeError, match=r"lhs_scale.*\(150, 2\).*got"):
            jgg.scaled_ragged_dot(
                lhs, scales(rng, shape), rhs, np.float32(1), sizes_of.multinomial(rng, M, G)
            )

    @pytest.mark.parametrize("m, k", [(5, 0), (0, 200), (5, 200)])
    @pytest.mark.parametrize("n", [0, 3])
    def test_nothing_to_contract_or_to_write(self, m, k, n, rng):
        lhs, rhs = fp8(rng, (m, k)), fp8(rng, (2, k, n))
        kb, nb = -(-k // 128), -(-n // 128)
        lhs_scale, rhs_scale = scales(rng, (m, kb)), scales(rng, (2, kb, nb))
        sizes = np.array([m, 0])
        for transpose in (False, True):
            out = self.run(lhs, lhs_scale, rhs, rhs_scale, sizes, transpose=transpose)
            assert out.shape == (m, n)
            fp8_oracle.check(out, fp8_oracle.noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes))

    def test_numbers_are_scales(self, rng):
        lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, K, N))
        sizes = sizes_of.multinomial(rng, M, G)
        exact = fp8_oracle.noncontracting(
            lhs, np.full((1, 1), 0.5), rhs, np.full((G, 1, 1), 4.0), sizes
        )
        for x64 in (False, True):
            with jax.enable_x64(x64):
                out = jgg.scaled_ragged_dot(lhs, 0.5, rhs, 4.0, sizes, lhs_scaling="tensor")
            fp8_oracle.check(out, exact)

    def test_powers_of_two_in_eight_bits(self, rng):
        lhs, rhs, sizes = fp8(rng, (M, K)), fp8(rng, (G, K, N)), sizes_of.multinomial(rng, M, G)
        exponents = [rng.integers(-8, 8, shape) for shape in ((M, KB), (G, KB, NB))]
        wide = [np.exp2(e).astype(np.float32) for e in exponents]
        narrow = [jnp.asarray(x).astype(jnp.float8_e8m0fnu) for x in wide]
        got, want = (
            jgg.scaled_ragged_dot(lhs, scale[0], rhs, scale[1], sizes) for scale in (narrow, wide)
        )
        assert np.any(want)
        np.testing.assert_array_equal(got, want)

    def test_no_derivative(self, rng):
        lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, N, K))

        def loss(scale):
            out = jgg.scaled_ragged_dot(
                lhs, scale, rhs, scales(rng, (G,)), np.array([M, 0, 0, 0]), transpose_rhs=True
            )
            return out.sum()

        with pytest.raises(NotImplementedError, match="no derivative.*fp8_ragged_dot"):
            jax.grad(loss)(scales(rng, (M, KB)))


class TestContracting:
    def operands(self, rng, sizes, m=M, k=K, n=40, dtypes=(E4M3, E4M3)):
        rows = [rng.standard_normal((m, width), np.float32) for width in (k, n)]
        lhs = fp8_oracle.quantize_groups(rows[0], sizes, dtypes[0])
        rhs = fp8_oracle.quantize_groups(rows[1], sizes, dtypes[1])
        return (*lhs, *rhs)

    @pytest.mark.parametrize("dtypes", list(product((E4M3, E5M2), repeat=2)))
    def test_values(self, dtypes, rng):
        for sizes in (sizes_of.multinomial(rng, M, G), sizes_of.any_kind(rng, M, G)):
            operands = self.operands(rng, sizes, dtypes=dtypes)
            out = jgg.scaled_ragged_dot_contracting(*operands, sizes, num_rows=M)
            assert out.shape == (G, K, 40) and out.dtype == jnp.float32
            fp8_oracle.check(out, fp8_oracle.contracting(*operands, sizes, M))

    @pytest.mark.parametrize("offset", [-3, 0, 1, 3, 9])
    def test_group_offset(self, offset, rng):
        sizes = sizes_of.multinomial(rng, M - 20, G)
        operands = self.operands(rng, sizes)
        run = partial(jgg.scaled_ragged_dot_contracting, num_rows=M, num_groups=2)
        out = jax.jit(lambda offset: run(*operands, sizes, group_offset=offset))(offset)
        fp8_oracle.check(out, fp8_oracle.contracting(*operands, sizes, M, offset, 2))

    def test_vmap(self, rng):
        sizes = np.stack([sizes_of.multinomial(rng, M, G) for _ in range(3)])
        operands = [np.stack(x) for x in zip(*(self.operands(rng, s) for s in sizes), strict=True)]
        run = partial(jgg.scaled_ragged_dot_contracting, num_rows=M)
        out = jax.vmap(run)(*operands, sizes)
        for i in range(3):
            np.testing.assert_array_equal(out[i], run(*(x[i] for x in operands), sizes[i]))


class TestTile:
    """The parameter `tile` of the primitives names a kernel that a plan would not choose."""

    TILES = pytest.mark.parametrize(
        "tile", [choice.tile for choice in plan_fp8.NONCONTRACTING_KERNELS], ids=str
    )
    PARAMS = dict(
        transpose_rhs=True,
        **IN_BLOCKS,
        preferred_element_type=np.dtype(np.float32),
        fast_accumulation=False,
        implementation=None,
    )

    def operands(self, rng):
        lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, N, K))
        sizes = sizes_of.multinomial(rng, M, G).astype(np.int32)
        return (
            lhs,
            scales(rng, (M, KB)),
            rhs,
            scales(rng, (G, NB, KB)),
            sizes,
            np.zeros(1, np.int32),
        )

    def plan(self, **params):
        operands = self.operands(np.random.default_rng(0))
        avals = [jax.typeof(jnp.asarray(x)) for x in operands]
        return plan_product(plan_fp8.noncontracting, avals, self.PARAMS | params, H200)

    @TILES
    def test_plans_take_it(self, tile):
        assert self.plan(tile=tile).tile == tile
        assert (
            self.plan(tile=None).tile == self.plan().tile == plan_fp8.NONCONTRACTING_KERNELS[0].tile
        )

    def test_another_one_is_refused(self):
        other = jgg.TileConfig(tile_m=128, tile_n=192, cluster=2)
        with pytest.raises(
            ValueError, match="128x192, cluster 2 for .*not compiled.*that run it.*256"
        ):
            self.plan(tile=other)

    @TILES
    def test_the_reference_needs_none(self, tile, rng):
        operands = self.operands(rng)
        run = jax.jit(partial(primitive.scaled_ragged_noncontracting, **self.PARAMS, tile=tile))
        plain = primitive.scaled_ragged_noncontracting(*operands, **self.PARAMS)
        np.testing.assert_array_equal(run(*operands), plain)


class TestErrors:
    LHS, RHS = (jax.ShapeDtypeStruct(shape, E4M3) for shape in ((M, K), (G, K, N)))
    LHS_SCALE, RHS_SCALE = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((M, KB), (G, KB, NB))
    )
    SIZES = jax.ShapeDtypeStruct((G,), jnp.int32)

    @pytest.mark.parametrize(
        "change, error, match",
        [
            (dict(lhs=((M, K), jnp.bfloat16)), TypeError, "lhs.*float8.*bfloat16"),
            (dict(rhs=((G, N, K), E4M3)), TypeError, r"rhs must be \[g, k, n\] with k = 200"),
            (dict(rhs=((K, N), E4M3)), TypeError, r"rhs must have 3 dimensions.*\(200, 144\)"),
            (dict(lhs_scale=((M, 3), jnp.float32)), TypeError, r"lhs_scale.*\(150, 3\)"),
            (dict(lhs_scale=((M, KB), jnp.bfloat16)), TypeError, "lhs_scale.*bfloat16"),
            (dict(rhs_scale=((G, NB + 1, KB), jnp.float32)), TypeError, r"rhs_scale.*\(4, 3, 2\)"),
            (dict(group_sizes=((5,), jnp.int32)), TypeError, "4 matrices.*5 groups"),
            (dict(group_sizes=((G,), jnp.float32)), TypeError, "group_sizes.*float32"),
        ],
    )
    def test_operands(self, change, error, match):
        operands = dict(
            lhs=self.LHS,
            lhs_scale=self.LHS_SCALE,
            rhs=self.RHS,
            rhs_scale=self.RHS_SCALE,
            group_sizes=self.SIZES,
        )
        operands |= {name: jax.ShapeDtypeStruct(*aval) for name, aval in change.items()}
        with pytest.raises(error, match=match):
            jax.eval_shape(jgg.scaled_ragged_dot, *operands.values())

    @pytest.mark.parametrize("shape", [(4, K, 128), (6, K, 64)])
    def test_other_than_enough_blocks_of_128_rows(self, shape):
        lhs = jax.ShapeDtypeStruct(shape, E4M3)
        scale = jax.ShapeDtypeStruct(shape[:2], jnp.float32)
        run = partial(jgg.scaled_ragged_dot_contracting, num_rows=M)
        with pytest.raises(
            TypeError, match=rf"at least 6 for num_rows=150.*{re.escape(str(shape))}"
        ):
            jax.eval_shape(run, lhs, scale, lhs, scale, self.SIZES)

    @pytest.mark.parametrize(
        "options, error, message",
        [
            (dict(num_rows=-1), ValueError, "num_rows must be from 0 to 2.31 - 1, got -1"),
            (dict(num_rows=300.0), TypeError, "num_rows must be an integer, got 300.0"),
            (dict(num_rows="300"), TypeError, "num_rows must be an integer, got '300'"),
            (dict(num_groups=-1), ValueError, "num_groups must be the 4 of group_sizes.*-1"),
            (dict(num_groups=5, group_offset=0), ValueError, "num_groups must be the 4.*got 5"),
            (dict(num_groups=3), ValueError, "fewer with group_offset, got 3"),
            (dict(preferred_element_type=None), TypeError, "preferred_element_type.*None"),
        ],
    )
    def test_numbers(self, options, error, message):
        lhs = jax.ShapeDtypeStruct((6, K, 128), E4M3)
        scale = jax.ShapeDtypeStruct((6, K), jnp.float32)
        run = partial(jgg.scaled_ragged_dot_contracting, **(dict(num_rows=M) | options))
        with pytest.raises(error, match=message):
            jax.eval_shape(run, lhs, scale, lhs, scale, self.SIZES)

    @pytest.mark.parametrize(
        "lhs_scaling, lhs_scale, rhs_scale",
        [("1x128", (M, KB), (G, N)), ("1xk", (M,), (G, KB, NB)), ("1x128", (M, KB), (G, KB, NB))],
    )
    def test_fast_accumulation_of_scales_that_change(self, lhs_scaling, lhs_scale, rhs_scale):
        run = partial(jgg.scaled_ragged_dot, lhs_scaling=lhs_scaling, fast_accumulation=True)
        scales = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (lhs_scale, rhs_scale)]
        with pytest.raises(ValueError, match="fast_accumulation must be False where.* change"):
            jax.eval_shape(run, self.LHS, scales[0], self.RHS, scales[1], self.SIZES)

    def test_scaling(self):
        run = partial(jgg.scaled_ragged_dot, lhs_scaling="rows")
        with pytest.raises(ValueError, match="lhs_scaling must be one of.*1xk.*got 'rows'"):
            jax.eval_shape(run, self.LHS, self.LHS_SCALE, self.RHS, self.RHS_SCALE, self.SIZES)
