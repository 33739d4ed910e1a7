"""Operands of FP8 weight gradients, which are quantised while they are copied or computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.activations import ACTIVATIONS
from jax_grouped_gemm._src.fp8.formats import IN_BLOCKS, view_of
from jax_grouped_gemm._src.fp8.quantize import primitive as quantizers
from jax_grouped_gemm._src.fp8.quantize import reference
from jax_grouped_gemm._src.fp8.scaled import call
from jax_grouped_gemm._src.fp8.scaled import primitive as scaled
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenLayer
from jax_grouped_gemm._src.mlp.fp8.hidden.primitive import hidden_gradients, ragged_hidden_gradients
from tests.support import fp8_oracle, mlp
from tests.support.dtypes import BF16, E4M3, E5M2, F32
from tests.support.fp8_mlp_on_gpu import elementwise_operands

FORMATS = pytest.mark.parametrize(
    "recipe",
    [
        jgg.Recipe(),
        jgg.Recipe(gradient_dtype=E5M2, power_of_two_scales=True),
        jgg.Recipe(forward_dtype=E5M2),
    ],
)


def assert_same_bits(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.float32(one), np.float32(other))


@pytest.mark.parametrize("source", [BF16, jnp.float16, F32])
@pytest.mark.parametrize("rows, columns", [(1, 8), (255, 100), (1000, 203), (3000, 1536)])
def test_largest_of_columns(rows, columns, source, rng):
    x = np.asarray(rng.standard_normal((rows, columns)), source)
    x[0, :3], x[rows // 2, 1] = np.nan, -np.inf
    for window in ([0, rows], [rows // 3, rows // 2 + 1], [5, 5]):
        got = quantizers.column_maxima(x, np.asarray(window, np.int32), implementation="cuda")
        kept = np.zeros(x.shape, np.float32)
        rows_kept = slice(*window)
        kept[rows_kept] = np.abs(np.where(np.isfinite(x[rows_kept]), x[rows_kept], 0))
        want = [kept[i : i + 256].max(axis=0) for i in range(0, rows, 256)]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("source", [BF16, jnp.float16, F32])
@pytest.mark.parametrize("columns", [128, 100, 203, 1536])
@pytest.mark.parametrize("tokens", [300, 600], ids=["quantised before", "as they are copied"])
def test_gathered_rows_are_what_the_reference_computes(tokens, columns, source, rng):
    """The reference runs on the CPU, because a GPU's division is not rounded as IEEE asks."""
    rows = 1000
    x = np.asarray(rng.standard_normal((tokens, columns)), source)
    x[7, :3], x[8, 1] = np.nan, np.inf
    where = np.asarray(rng.integers(-2, tokens + 2, rows), np.int32)
    for sizes in ([rows], [0, 1, 400, 599], [7, 0, 130, 60], [1] * 200, [0, 0]):
        for dtype, power_of_two in ((E4M3, False), (E5M2, True)):
            params = dict(dtype=np.dtype(dtype), power_of_two=power_of_two)
            with jax.default_device(jax.devices("cpu")[0]):
                (maxima,) = reference.column_maxima(jnp.asarray(x), jnp.array([0, tokens]))
                scale = reference.column_scales(maxima, **params)
                operands = x, where, np.asarray(scale), np.asarray(sizes, np.int32)
                (want,) = reference.quantize_gathered(*map(jnp.asarray, operands), **params)
            run = partial(quantizers.quantize_gathered, **params, implementation="cuda")
            got = jax.jit(run)(*operands)
            owned = owned_blocks(sizes, rows)
            np.testing.assert_array_equal(np.float32(got)[:owned], np.float32(want)[:owned])


@pytest.mark.parametrize("out", [BF16, jnp.float16, F32])
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("even", ["lhs", "rhs", "both"])
def test_products_with_a_scale_a_column(even, types, out, rng):
    for rows, k, n, sizes in [
        (700, 256, 384, [300, 0, 130, 270]),
        (1000, 136, 264, [1, 2, 500, 400]),
        (5000, 72, 1000, [5000]),
        (300, 640, 64, [0, 0, 0]),
        (2000, 520, 776, [128, 256, 64, 1000, 3, 200]),
    ]:
        sizes = np.asarray(sizes, np.int32)
        pairs = []
        for name, width, dtype in zip(("lhs", "rhs"), (k, n), types, strict=True):
            x = jnp.asarray(rng.standard_normal((rows, width)), BF16)
            values, scales = jgg.quantize_ragged(x, sizes, dtype=dtype)[2:]
            if even in (name, "both"):
                scales = jnp.asarray(rng.uniform(2, 8, (1, width)) / jnp.finfo(dtype).max, F32)
            pairs += [values, scales]
        params = dict(num_rows=rows, num_groups=len(sizes), preferred_element_type=np.dtype(out))
        run = partial(scaled.scaled_ragged_contracting, **params, implementation="cuda")
        got = jax.jit(run)(*pairs, sizes, np.zeros(1, np.int32))
        blocks = len(pairs[0])
        exact = [
            np.broadcast_to(x, (blocks, x.shape[1])) if x.ndim == 2 else x
            for x in map(np.asarray, pairs)
        ]
        fp8_oracle.check(got, fp8_oracle.contracting(*exact, sizes, rows))


@pytest.mark.parametrize("out", [BF16, jnp.float16])
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
def test_both_gradients_of_one_launch_are_those_of_two(types, out, rng):
    """Gradients agree bit for bit, also for a window of groups and for tiles that are not full.

    The two tiles of a cluster belong to the same product, or to one product each.
    """
    for rows, k, n, sizes in [
        (700, 256, 136, [300, 0, 130, 270]),
        (1000, 520, 64, [1, 2, 500, 400]),
        (2000, 72, 256, [128, 256, 64, 1000, 3, 200]),
        (5000, 264, 120, [5000]),
        (300, 640, 200, [0, 0, 0]),
    ]:
        lhs, scales = fp8_columns(rng, rows, k, sizes, types[0])
        scales = jnp.asarray(rng.uniform(2, 8, (1, k)) / jnp.finfo(types[0]).max, F32)
        first, second = (fp8_columns(rng, rows, n, sizes, types[1]) for _ in range(2))
        for groups, offset in ((len(sizes), 0), (2, len(sizes) - 1), (3, -1)):
            indices = np.asarray(sizes, np.int32), np.asarray([offset], np.int32)
            params = dict(
                num_rows=rows,
                num_groups=groups,
                preferred_element_type=np.dtype(out),
                implementation="cuda",
            )
            paired = jax.jit(partial(scaled.paired_scaled_contracting, **params))
            alone = jax.jit(partial(scaled.scaled_ragged_contracting, **params))
            operands = lhs, scales, *first, *second, *indices
            assert call.PAIRED_CONTRACTING_TARGET in paired.lower(*operands).as_text()
            got = paired(*operands)
            want = [alone(lhs, scales, *rhs, *indices) for rhs in (first, second)]
            assert_same_bits(got, want)


class TestSlices:
    """Operands that are slices of a larger array."""

    @staticmethod
    def contract(lhs, rhs, sizes, **options):
        return jax.jit(
            partial(
                scaled.scaled_ragged_contracting,
                num_rows=300,
                num_groups=len(sizes),
                preferred_element_type=np.dtype(BF16),
                implementation="cuda",
                **options,
            )
        )(*lhs, *rhs, jnp.asarray(sizes, jnp.int32), jnp.zeros(1, jnp.int32))

    def test_products_of_rows_by_rows(self, rng):
        sizes = [100, 0, 150]
        lhs, rhs = (fp8_columns(rng, 300, columns, sizes, E4M3) for columns in (136, 264))
        before, after = (jnp.full(n, jnp.nan, E4M3) for n in (144, 16))
        flat = jnp.concatenate([before, rhs[0].ravel(), after])
        place = (len(before), *rhs[0].shape)
        got = self.contract(lhs, (flat, rhs[1]), sizes, view=place)
        assert_same_bits([got], [self.contract(lhs, rhs, sizes)])

    def test_products_of_rows(self, rng):
        sizes = jnp.asarray([100, 0, 150], jnp.int32)
        x, w = (jnp.asarray(rng.standard_normal(s), BF16) for s in ((300, 256), (3, 256, 136)))
        rows = jgg.quantize_blockwise(x)
        weights = jgg.quantize_weights(w)
        flat = jnp.concatenate([jnp.full(32, jnp.nan, E4M3), rows[0].ravel()])
        run = partial(
            scaled.scaled_ragged_noncontracting,
            transpose_rhs=True,
            **IN_BLOCKS,
            preferred_element_type=np.dtype(BF16),
            implementation="cuda",
        )
        others = rows[1], *weights[2:], sizes, jnp.zeros(1, jnp.int32)
        got = jax.jit(partial(run, view=(32, 300, 256)))(flat, *others)
        assert_same_bits([got], [jax.jit(run)(rows[0], *others)])

    @pytest.mark.parametrize("first, fewer", [(16, 0), (-16, 0), (2**62, 0), (0, 1)])
    def test_what_is_not_inside_is_refused(self, first, fewer, rng):
        lhs, rhs = (fp8_columns(rng, 300, columns, [300], E4M3) for columns in (136, 264))
        flat = rhs[0].ravel()[fewer:]
        with pytest.raises(jax.errors.JaxRuntimeError, match="is not inside a flat array"):
            place = (first, *rhs[0].shape)
            jax.block_until_ready(self.contract(lhs, (flat, rhs[1]), [300], view=place))


def fp8_columns(rng, rows, columns, sizes, dtype):
    x = jnp.asarray(rng.standard_normal((rows, columns)), BF16)
    return jgg.quantize_ragged(x, np.asarray(sizes, np.int32), dtype=dtype)[2:]


def owned_blocks(sizes, rows) -> int:
    """Returns the number of blocks that have rows of groups. Nothing reads other blocks."""
    owned = np.diff(np.minimum(np.cumsum(sizes), rows), prepend=0)
    return int((-(-owned // 128)).sum())


@FORMATS
@pytest.mark.parametrize("activation", mlp.FUSED)
def test_transposed_gradients_are_those_of_separate_kernels(activation, recipe, rng):
    """Quantised results agree bit for bit, also with empty groups, partial blocks, unowned rows."""
    for rows, columns in [(300, 256), (1000, 768), (130, 200), (700, 136)]:
        layer = HiddenLayer(ACTIVATIONS[activation], columns, True, recipe)
        operands = elementwise_operands(rng, layer, rows, BF16)
        for sizes in ([rows], [0, 1, rows - 1], [7, 0, 130, 60], [rows // 3] * 2, [0, 0]):
            sizes = jnp.asarray(sizes, jnp.int32)
            got = jax.jit(partial(ragged_hidden_gradients, layer, implementation="cuda"))(
                *operands, sizes
            )
            want = jax.jit(partial(hidden_gradients, layer, implementation="cuda"))(*operands)
            owned, blocks = min(int(sizes.sum()), rows), owned_blocks(sizes, rows)

            def assert_same_rows(got, want, count):
                assert_same_bits([x[:count] for x in got], [x[:count] for x in want])  # noqa: B023

            assert_same_rows(got.projections, want.projections, owned)
            joined = jax.jit(
                partial(ragged_hidden_gradients, layer, implementation="cuda", joined=True)
            )(*operands, sizes)
            for name, count in dict(projections=owned, gate=blocks, up=blocks).items():
                found = getattr(joined, name)
                values = view_of(found.values, found.view)
                assert_same_rows((values, found.scales), getattr(got, name), count)
            assert_same_rows(joined.hidden, got.hidden, blocks)
            assert_same_bits([joined.weights], [got.weights])
            # The kernels add up the same terms in different orders, and terms cancel.
            bound = 2e-6 * np.abs(np.asarray(want.weights)).max()
            weights = jnp.where(jnp.arange(rows) < owned, want.weights, 0)
            np.testing.assert_allclose(got.weights, weights, rtol=1e-5, atol=bound)
            for name, fp8 in (
                ("gate", recipe.gradient_dtype),
                ("up", recipe.gradient_dtype),
                ("hidden", recipe.forward_dtype),
            ):
                assert_same_rows(
                    getattr(got, name),
                    jgg.quantize_ragged(
                        getattr(want, name),
                        sizes,
                        dtype=fp8,
                        power_of_two_scales=recipe.power_of_two_scales,
                        implementation="cuda",
                    )[2:],
                    blocks,
                )
