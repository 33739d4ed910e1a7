"""Both ragged products of float32 operands on the tensor cores, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F32
from tests.support.float32_errors import PRECISIONS, PRODUCT_ERROR
from tests.support.ops import BOTH_OPS, CONTRACTING, MAJORS, NONCONTRACTING, OPS, random, swap

M, K, N, G = 776, 264, 520, 8
# An empty group, groups shorter and longer than a tile, and a tail.
SIZES = np.array([130, 0, 1, 255, 64, 63, 200, 7], np.int32)
TAIL = slice(int(SIZES.sum()), M)


@pytest.fixture(autouse=True)
def passes():
    """Uses the kernels that follow a splitting pass, for products of any number of rows."""
    with jgg.use_tiles(forward=DEFAULT_TILE, dgrad=DEFAULT_TILE):
        yield


def operands(op, rng, m=M, k=K, n=N, g=G):
    return [random(rng, shape, F32) for shape in op.shapes(m, k, n, g)]


def run(op, lhs, rhs, sizes, offset=None, *, transpose_lhs=False, transpose_rhs=False, **options):
    """Returns the kernel's result for operands stored in the given majors."""
    return op.call(
        swap(lhs, transpose_lhs),
        swap(rhs, transpose_rhs),
        sizes,
        offset,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        implementation="cuda",
        **options,
    )


def check(op, lhs, rhs, sizes, offset=None, *, precision="highest", **options):
    out = run(op, lhs, rhs, sizes, offset, precision=precision, **options)
    exact = op.exact(lhs, rhs, sizes, 0 if offset is None else offset)
    oracle.check(out, exact, product_error=PRODUCT_ERROR[precision])
    return out


def cotangents(op, lhs, rhs, sizes, cotangent, *, transpose_lhs, transpose_rhs, precision):
    """Returns the cotangents of both operands, in the majors that are not transposed."""
    flags = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
    got = op.cotangents(
        *stored, sizes, cotangent, implementation="cuda", precision=precision, **flags
    )
    return swap(got[0], transpose_lhs), swap(got[1], transpose_rhs)


@BOTH_OPS
@MAJORS
@PRECISIONS
class TestMajors:
    def test_results(self, op, transpose_lhs, transpose_rhs, precision, rng):
        lhs, rhs, _ = operands(op, rng)
        options = dict(
            transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, precision=precision
        )
        for sizes in (
            sizes_of.multinomial(rng, M, G),
            sizes_of.zipf(rng, M - 77, G),
            sizes_of.tile_edges(rng, M, G),
        ):
            assert check(op, lhs, rhs, sizes, **options).dtype == F32
            out = check(op, lhs, rhs, sizes, preferred_element_type=BF16, **options)
            assert out.dtype == BF16

    def test_any_group_sizes(self, op, transpose_lhs, transpose_rhs, precision, rng):
        lhs, rhs, _ = operands(op, rng, k=72, n=136)
        options = dict(
            transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, precision=precision
        )
        for _ in range(30):
            check(op, lhs, rhs, sizes_of.any_kind(rng, M, G), **options)

    def test_gradients(self, op, transpose_lhs, transpose_rhs, precision, rng):
        lhs, rhs, cotangent = operands(op, rng)
        options = dict(
            transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, precision=precision
        )
        for sizes in (sizes_of.multinomial(rng, M, G), sizes_of.tile_edges(rng, M, G)):
            got = cotangents(op, lhs, rhs, sizes, cotangent, **options)
            exact = op.exact_cotangents(lhs, rhs, sizes, cotangent)
            oracle.check_all(got, exact, product_error=PRODUCT_ERROR[precision])

    @pytest.mark.parametrize("m, k, n", [(333, 37, 51), (333, 1, 64), (333, 64, 1), (332, 36, 52)])
    def test_rows_off_16_bytes(self, op, transpose_lhs, transpose_rhs, precision, m, k, n, rng):
        lhs, rhs, _ = operands(op, rng, m=m, k=k, n=n)
        options = dict(
            transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, precision=precision
        )
        for _ in range(3):
            check(op, lhs, rhs, sizes_of.any_kind(rng, m, G), **options)


class TestAccuracy:
    @BOTH_OPS
    @pytest.mark.parametrize("depth", [128, 1024, 4096])
    def test_no_worse_than_a_float32_dot(self, op, depth, rng):
        """Compares the mean square and the maximum of the error relative to |lhs| |rhs|.

        The bound of the maximum leaves room for chance.
        """
        m, k = (2048, depth) if op is NONCONTRACTING else (depth, 2048)
        lhs, rhs, _ = operands(op, rng, m=m, k=k, n=1024, g=1)
        exact = op.exact(lhs, rhs, [m])
        ours = run(op, lhs, rhs, np.array([m], np.int32), precision="highest")
        dot = jnp.matmul(
            lhs if op is NONCONTRACTING else lhs.T,
            rhs[0] if op is NONCONTRACTING else rhs,
            precision="highest",
        )

        def errors(out):
            relative = np.abs(np.asarray(out).astype(np.float64) - exact.value) / exact.magnitude
            return np.array([relative.max(), np.sqrt(np.mean(relative**2))])

        assert (errors(ours) <= [1.2, 1] * errors(dot.reshape(exact.value.shape))).all()

    @BOTH_OPS
    def test_default_is_as_accurate_as_tf32(self, op, rng):
        lhs, rhs, _ = operands(op, rng)
        exact = op.exact(lhs, rhs, SIZES)
        out = run(op, lhs, rhs, SIZES, precision="default")

        def truncated(x):  # what cuBLAS makes of its operands
            return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

        error = np.linalg.norm(np.asarray(out) - exact.value)
        tf32 = op.exact(truncated(lhs), truncated(rhs), SIZES).value
        assert error <= np.linalg.norm(tf32 - exact.value)

    @BOTH_OPS
    @MAJORS
    def test_high_is_highest(self, op, transpose_lhs, transpose_rhs, rng):
        lhs, rhs, _ = operands(op, rng)
        flags = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        high, highest = (
            np.asarray(run(op, lhs, rhs, SIZES, precision=p, **flags)) for p in ("high", "highest")
        )
        assert high.tobytes() == highest.tobytes()


class TestRange:
    """Results are right for every exponent, if the elements of a group are within 2^27."""

    @BOTH_OPS
    @PRECISIONS
    @pytest.mark.parametrize(
        "lhs_exponent, rhs_exponent",
        [(-140, 125), (125, -140), (125, -120), (-100, -40), (-60, 60), (60, 60), (0, -144)],
    )
    def test_scales(self, op, lhs_exponent, rhs_exponent, precision, rng):
        lhs, rhs, _ = operands(op, rng)
        lhs = np.ldexp(np.clip(lhs, -3, 3), lhs_exponent).astype(np.float32)
        rhs = np.ldexp(np.clip(rhs, -3, 3), rhs_exponent).astype(np.float32)
        check(op, lhs, rhs, SIZES, precision=precision)

    @BOTH_OPS
    @PRECISIONS
    def test_each_group_has_its_own_scale(self, op, precision, rng):
        lhs, rhs, _ = operands(op, rng)
        ends = np.cumsum(SIZES)
        for group, exponent in enumerate(rng.integers(-50, 50, G)):
            rows = slice(ends[group] - SIZES[group], ends[group])
            lhs[rows] = np.ldexp(lhs[rows], exponent)
            own = rows if op is CONTRACTING else group
            rhs[own] = np.ldexp(rhs[own], rng.integers(-50, 50))
        check(op, lhs, rhs, SIZES, precision=precision)

    @BOTH_OPS
    @PRECISIONS
    def test_magnitudes_within_a_group(self, op, precision, rng):
        lhs, rhs, _ = operands(op, rng)
        for x in (lhs, rhs):
            x[...] = np.copysign(2.0 ** rng.uniform(-13, 13, x.shape), x)
        check(op, lhs, rhs, SIZES, precision=precision)

    @BOTH_OPS
    @pytest.mark.parametrize("precision, bits", [("default", 39), ("highest", 50)])
    def test_elements_fade_below_the_largest_of_their_group(self, op, precision, bits, rng):
        """As documented, errors depend on a group's largest elements, not on |lhs| |rhs| alone."""
        lhs, rhs, _ = operands(op, rng)
        for x in (lhs, rhs):
            x[...] = np.copysign(2.0 ** rng.uniform(-60, 0, x.shape), x)
        exact = op.exact(lhs, rhs, SIZES)
        out = np.asarray(run(op, lhs, rhs, SIZES, precision=precision)).astype(np.float64)
        fading = op.exact(np.ones_like(lhs), np.abs(rhs), SIZES).magnitude
        fading += op.exact(np.abs(lhs), np.ones_like(rhs), SIZES).magnitude
        # The product of two elements that are both in low parts is dropped.
        fading += 2.0**-27 * exact.depth
        error = (PRODUCT_ERROR[precision] + 2.0**-23 * exact.depth) * exact.magnitude
        assert (np.abs(out - exact.value) <= error + 2.0**-bits * fading).all()

    @BOTH_OPS
    @PRECISIONS
    def test_too_large_results_are_infinite(self, op, precision, rng):
        lhs, rhs, _ = (np.abs(a) + np.float32(0.5) for a in operands(op, rng))
        scale = np.float32(2.0**100)
        out = np.asarray(run(op, lhs * scale, rhs * scale, SIZES, precision=precision))
        exact = op.exact(lhs, rhs, SIZES).value
        np.testing.assert_array_equal(out, np.where(exact > 0, np.inf, 0))

    @BOTH_OPS
    @PRECISIONS
    def test_large_operands_that_cancel_are_zero(self, op, precision, rng):
        lhs, rhs, _ = operands(op, rng)
        lhs[...], rhs[...] = 1e38, 1e38
        contracted = 1 if op is NONCONTRACTING else 0
        sizes = np.array([M], np.int32) if op is CONTRACTING else SIZES
        np.moveaxis(lhs, contracted, 0)[::2] *= -1
        out = run(op, lhs, rhs, sizes, precision=precision)
        np.testing.assert_array_equal(np.asarray(out), 0)


class TestNonFinite:
    @BOTH_OPS
    @PRECISIONS
    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_is_what_the_sum_of_products_is(self, op, precision, value, rng):
        """Non-finite elements make exactly those results non-finite that they contribute to."""
        lhs, rhs, _ = operands(op, rng)
        for x in (lhs, rhs):
            x.flat[rng.integers(0, x.size, 5)] = value
        check(op, lhs, rhs, SIZES, precision=precision)

    @BOTH_OPS
    @MAJORS
    @PRECISIONS
    @pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
    def test_never_reaches_another_group(
        self, op, transpose_lhs, transpose_rhs, precision, poison, rng
    ):
        """No value of a group, or of the tail, changes a bit of the results of other groups."""
        flags = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, precision=precision)
        arrays = operands(op, rng)

        def all_three(lhs, rhs, cotangent):
            out = np.asarray(run(op, lhs, rhs, SIZES, **flags))
            return out, *cotangents(op, lhs, rhs, SIZES, cotangent, **flags)

        clean = all_three(*arrays)
        ends = np.cumsum(SIZES)
        for group in (*range(0, G, 3), None):
            rows = TAIL if group is None else slice(ends[group] - SIZES[group], ends[group])
            poisoned = [a.copy() for a in arrays]
            for array in poisoned:
                if len(array) == M:
                    array[rows] = poison
                elif group is not None:
                    array[group] = poison
            for a, b in zip(all_three(*poisoned), clean, strict=True):
                a, b = a.copy(), b.copy()
                own = rows if len(a) == M else group
                if group is not None:
                    a[own] = b[own] = 0
                assert a.tobytes() == b.tobytes()


class TestWindowsAndBatches:
    @BOTH_OPS
    @PRECISIONS
    def test_group_offset(self, op, precision, rng):
        local, groups = (3, 8) if op is NONCONTRACTING else (8, 8)
        lhs, rhs, _ = operands(op, rng, k=64, n=72, g=local)
        for offset in (-(2**31), -local, -2, 0, 1, groups - 1, groups, 2**31 - 1):
            for sizes in (sizes_of.multinomial(rng, M, groups), sizes_of.any_kind(rng, M, groups)):
                check(op, lhs, rhs, sizes, np.int32(offset), precision=precision)

    # Every way in which lhs, rhs, group_sizes and group_offset can be batched.
    @BOTH_OPS
    @PRECISIONS
    @pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2) if any(b)])
    def test_batches(self, op, precision, batched, rng):
        batch, groups = 3, 6
        lhs_shape, rhs_shape, _ = op.shapes(M, 72, 136, groups)
        shapes = lhs_shape, rhs_shape, (groups,), ()
        shapes = [(batch, *s) if b else s for b, s in zip(batched, shapes, strict=True)]
        lhs, rhs = (random(rng, shape, F32) for shape in shapes[:2])
        sizes = rng.integers(-20, 2 * M // groups, shapes[2], dtype=np.int32)
        offset = rng.integers(-2, groups + 1, shapes[3], dtype=np.int32)

        @jax.jit
        def mapped(*operands):
            call = partial(op.call, implementation="cuda", precision=precision)
            return jax.vmap(call, in_axes=[0 if b else None for b in batched])(*operands)

        out = mapped(lhs, rhs, sizes, offset)
        exact = op.exact(lhs, rhs, sizes, offset)
        oracle.check(out, exact, product_error=PRODUCT_ERROR[precision])

    @pytest.mark.parametrize("groups", [1, 32, 33, 129, 512])
    def test_number_of_groups(self, groups, rng):
        for op in OPS:
            lhs, rhs, _ = operands(op, rng, k=64, n=72, g=groups)
            for _ in range(4):
                check(op, lhs, rhs, sizes_of.any_kind(rng, M, groups))


class TestSurroundings:
    @BOTH_OPS
    @MAJORS
    @PRECISIONS
    def test_every_element_is_written(self, op, transpose_lhs, transpose_rhs, precision, rng):
        """Result and workspace take over memory full of NaN, so unwritten elements would be NaN."""
        options = dict(
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            precision=precision,
            implementation="cuda",
        )

        @partial(jax.jit, donate_argnums=3, keep_unused=True)
        def into(lhs, rhs, sizes, memory):
            return op.call(lhs, rhs, sizes, **options)

        lhs, rhs, out = operands(op, rng)
        stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
        for _ in range(6):
            sizes = sizes_of.any_kind(rng, M, G)
            memory = jnp.full(out.shape, jnp.nan, F32)
            jax.block_until_ready([jnp.full((M, K), jnp.nan, F32) for _ in range(8)])
            result = into(*stored, sizes, memory)
            exact = op.exact(lhs, rhs, sizes)
            oracle.check(result, exact, product_error=PRODUCT_ERROR[precision])

    @BOTH_OPS
    @PRECISIONS
    def test_same_inputs_give_the_same_bits(self, op, precision, rng):
        lhs, rhs, _ = operands(op, rng)
        sizes = sizes_of.any_kind(rng, M, G)
        first = np.asarray(run(op, lhs, rhs, sizes, precision=precision)).tobytes()
        for _ in range(20):
            again = np.asarray(run(op, lhs, rhs, sizes, precision=precision))
            assert again.tobytes() == first

    def test_recorded_in_a_cuda_graph(self, rng, tmp_path):
        """XLA replays the graph with other group sizes every time."""
        lhs, rhs, cotangent = operands(NONCONTRACTING, rng)
        table = np.stack([sizes_of.any_kind(rng, M, G) for _ in range(20)])

        def step(lhs, rhs, cotangent, table, index):
            sizes = jax.lax.dynamic_index_in_dim(table, index, keepdims=False)
            call = partial(NONCONTRACTING.call, implementation="cuda", precision="highest")
            out, vjp = jax.vjp(lambda lhs, rhs: call(lhs, rhs, sizes), lhs, rhs)
            return out, *vjp(cotangent)

        options = {"xla_gpu_graph_min_graph_size": 1, "xla_dump_to": str(tmp_path)}
        lowered = jax.jit(step).lower(lhs, rhs, cotangent, table, 0)
        program = lowered.compile(compiler_options=options)
        thunks = [path.read_text() for path in tmp_path.glob("*thunk*")]
        assert any("kCommandBuffer" in text for text in thunks), "XLA recorded nothing"
        inputs = [jnp.asarray(a) for a in (lhs, rhs, cotangent, table)]
        results = [program(*inputs, jnp.int32(i)) for i in range(len(table))]
        for sizes, result in zip(table, results, strict=True):
            exact = oracle.noncontracting_cotangents(lhs, rhs, sizes, cotangent)
            exact = (oracle.ragged_noncontracting(lhs, rhs, sizes), *exact)
            oracle.check_all(result, exact, product_error=PRODUCT_ERROR["highest"])

    @BOTH_OPS
    def test_second_order(self, op, rng):
        """Forward-over-reverse derivatives agree with those of the reference."""
        lhs, rhs, _ = (jnp.asarray(a) for a in operands(op, rng))
        directions = tuple(jnp.asarray(a) for a in operands(op, rng)[:2])

        def product_of(implementation):
            def loss(lhs, rhs):
                out = op.call(lhs, rhs, SIZES, precision="highest", implementation=implementation)
                return jnp.sum(jnp.sin(0.1 * out))

            return jax.jit(lambda: jax.jvp(jax.grad(loss, (0, 1)), (lhs, rhs), directions)[1])()

        for a, b in zip(product_of("cuda"), product_of("xla"), strict=True):
            assert jnp.linalg.norm(a - b) <= 1e-5 * jnp.linalg.norm(b)

    def test_many_tiles_for_each_processor(self, rng):
        m, k, n = 8192, 200, 4096
        lhs, rhs, _ = operands(NONCONTRACTING, rng, m=m, k=k, n=n)
        check(NONCONTRACTING, lhs, rhs, sizes_of.zipf(rng, m - 1000, G))
        lhs, rhs, _ = operands(CONTRACTING, rng, m=2048, k=1104, n=2048)
        check(CONTRACTING, lhs, rhs, sizes_of.zipf(rng, 2048 - 300, G))
