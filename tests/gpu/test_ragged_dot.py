"""Both ragged products against float64.

Noncontracting: out[r] = lhs[r] @ rhs[group of r].
Contracting: out[i] = lhs[rows of i].T @ rhs[rows of i].
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.ragged.tiles import NARROW_STREAM_K_TILE, NARROW_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F16, F32
from tests.support.ops import (
    BOTH_OPS,
    CONTRACTING,
    MAJORS,
    NONCONTRACTING,
    contracting,
    random,
    swap,
)

# Rows, columns and results of groups have three tiles or more, of which the last ones are not full.
M, K, N, G = 776, 264, 520, 8


def operands(op, rng, m=M, k=K, n=N, g=G, dtype=BF16):
    """Returns lhs, rhs and a cotangent."""
    return [random(rng, shape, dtype) for shape in op.shapes(m, k, n, g)]


def check(op, lhs, rhs, sizes, offset=None, *, transpose_lhs=False, transpose_rhs=False, **options):
    """Runs the kernel on operands stored in the given majors."""
    out = op.call(
        swap(lhs, transpose_lhs),
        swap(rhs, transpose_rhs),
        sizes,
        offset,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        implementation="cuda",
        **options,
    )
    oracle.check(out, op.exact(lhs, rhs, sizes, 0 if offset is None else offset))
    return out


def check_cotangents(op, lhs, rhs, sizes, cotangent, **majors):
    """Runs the kernels of both derivatives."""
    stored = (swap(x, majors[f"transpose_{name}"]) for name, x in (("lhs", lhs), ("rhs", rhs)))
    got = op.cotangents(*stored, sizes, cotangent, implementation="cuda", **majors)
    got = (
        swap(x, majors[f"transpose_{name}"]) for name, x in zip(("lhs", "rhs"), got, strict=True)
    )
    oracle.check_all(tuple(got), op.exact_cotangents(lhs, rhs, sizes, cotangent))


@BOTH_OPS
class TestTypes:
    @MAJORS
    @pytest.mark.parametrize("out_dtype", [None, BF16, F16, F32])
    @pytest.mark.parametrize("dtype", [BF16, F16])
    def test_results(self, op, dtype, out_dtype, transpose_lhs, transpose_rhs, tile, rng):
        lhs, rhs, _ = operands(op, rng, dtype=dtype)
        majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        for sizes in sizes_of.typical(rng, M, G):
            out = check(op, lhs, rhs, sizes, preferred_element_type=out_dtype, **majors, tile=tile)
            assert out.dtype == (out_dtype or dtype)

    @MAJORS
    @pytest.mark.parametrize("dtype", [BF16, F16])
    def test_gradients(self, op, dtype, transpose_lhs, transpose_rhs, rng):
        lhs, rhs, cotangent = operands(op, rng, dtype=dtype)
        majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        for sizes in (sizes_of.multinomial(rng, M, G), sizes_of.tile_edges(rng, M, G)):
            check_cotangents(op, lhs, rhs, sizes, cotangent, **majors)


class TestGroupSizes:
    @BOTH_OPS
    @MAJORS
    def test_any(self, op, transpose_lhs, transpose_rhs, tile, rng):
        """Kernels end a group's rows differently for each pair of majors, so sizes are many."""
        # Noncontracting tiles have several steps along k. Contracting products have one or two
        # tiles a group.
        lhs, rhs, _ = operands(op, rng, k=72 if op is CONTRACTING else K, n=136)
        majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        for _ in range(75):
            check(op, lhs, rhs, sizes_of.any_kind(rng, M, G), **majors, tile=tile)

    @MAJORS
    @pytest.mark.parametrize("first", [0, 1, 7, 63])
    def test_every_length_up_to_two_steps(self, first, transpose_lhs, transpose_rhs, tile, rng):
        """Groups have 1 to 130 rows, and their first rows have many alignments."""
        lhs, rhs, _ = operands(CONTRACTING, rng, m=1320, k=64, n=64, g=18)
        majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        lengths = rng.permutation(np.arange(1, 131))
        for some in lengths.reshape(-1, 10):
            sizes = np.concatenate([[first], some, [0, 0, 1, 0, 5, 64, 3]]).astype(np.int32)
            check(CONTRACTING, lhs, rhs, sizes, **majors, tile=tile)

    @BOTH_OPS
    @pytest.mark.parametrize("transpose_rhs", [False, True])
    @pytest.mark.parametrize("n", [8, 16, 40, 64, 72, 88, 104, 128])
    def test_few_columns(self, op, n, transpose_rhs, tile, rng):
        """Weights are narrower than two boxes, and the number of tiles of rows is odd."""
        lhs, rhs, _ = operands(op, rng, m=1300, k=392, n=n, g=5)
        tiles = [tile]
        if op is NONCONTRACTING and tile == NARROW_TILE:
            tiles.append(NARROW_STREAM_K_TILE)
        for one in tiles:
            for sizes in ([100, 300, 0, 520, 380], [129, 1, 64, 65, 900], [0, 0, 1300, 0, 0]):
                sizes = np.asarray(sizes, np.int32)
                check(op, lhs, rhs, sizes, transpose_rhs=transpose_rhs, tile=one)

    @pytest.mark.parametrize("dtype", [BF16, F16])
    @pytest.mark.parametrize("k", [8, 64, 72, 128, 136])
    def test_one_to_three_steps(self, k, dtype, tile, rng):
        """Tiles of at most two steps have a kernel of their own."""
        lhs, rhs, cotangent = operands(NONCONTRACTING, rng, k=k, n=1288, dtype=dtype)
        for sizes in sizes_of.typical(rng, M, G):
            check(NONCONTRACTING, lhs, rhs, sizes, tile=tile)
        check_cotangents(
            NONCONTRACTING, lhs, rhs, sizes, cotangent, transpose_lhs=False, transpose_rhs=False
        )

    @BOTH_OPS
    def test_all_patterns_of_empty_ones(self, op, tile, rng):
        lhs, rhs, _ = operands(op, rng, k=72, n=136)
        for sizes in sizes_of.zero_patterns(rng, M, G):
            check(op, lhs, rhs, sizes, tile=tile)

    @BOTH_OPS
    @pytest.mark.parametrize("hot", range(G))
    def test_one_hot(self, op, hot, tile, rng):
        lhs, rhs, _ = operands(op, rng, n=136)
        check(op, lhs, rhs, sizes_of.one_hot(M, G, hot), tile=tile)

    @BOTH_OPS
    @pytest.mark.parametrize("groups", [1, 2, 31, 32, 33, 64, 65, 129, 512])
    def test_number(self, op, groups, tile, rng):
        """Kernels look up 32 groups at a time, so these counts are around multiples of 32."""
        lhs, rhs, _ = operands(op, rng, k=64, n=72, g=groups)
        for _ in range(6):
            check(op, lhs, rhs, sizes_of.any_kind(rng, M, groups), tile=tile)
        check(op, lhs, rhs, sizes_of.one_hot(M - 1, groups, groups - 1), tile=tile)


class TestGroupOffset:
    @pytest.mark.parametrize("transpose_rhs", [False, True])
    @pytest.mark.parametrize("local, groups", [(3, 8), (3, 70), (40, 70), (1, 1)])
    def test_noncontracting(self, local, groups, transpose_rhs, tile, rng):
        """rhs holds `local` of the groups. Windows start before, between and after all groups."""
        lhs, rhs, _ = operands(NONCONTRACTING, rng, k=64, n=72, g=local)
        options = dict(transpose_rhs=transpose_rhs, tile=tile)
        far = [-(2**31), -(2**31) + 1, 2**31 - 1]
        near = np.concatenate([np.arange(-local - 1, 3), groups + np.arange(-local - 1, 2)])
        for offset in (*far, *np.unique(near), *rng.integers(0, groups, 8)):
            for sizes in (sizes_of.multinomial(rng, M, groups), sizes_of.any_kind(rng, M, groups)):
                check(NONCONTRACTING, lhs, rhs, sizes, np.int32(offset), **options)

    @pytest.mark.parametrize("groups", [1, 8, 70])
    def test_contracting(self, groups, tile, rng):
        """Matrix i of the result is that of group offset + i, or zero if there is no such group."""
        lhs, rhs, _ = operands(CONTRACTING, rng, k=64, n=72, g=groups)
        far = [-(2**31), 2**31 - 1]
        for offset in (*far, -groups - 1, -groups, -1, 0, 1, groups - 1, groups, groups + 1):
            for sizes in (sizes_of.multinomial(rng, M, groups), sizes_of.any_kind(rng, M, groups)):
                check(CONTRACTING, lhs, rhs, sizes, np.int32(offset), tile=tile)

    @pytest.mark.parametrize("local", [3, 40])
    def test_gradient_of_a_window(self, local, rng):
        """The cotangent of the weights has only the groups of the window, not all 70."""
        groups, op = 70, NONCONTRACTING
        lhs, rhs, cotangent = operands(op, rng, k=64, n=72, g=local)
        for offset in (-local, -2, 0, 1, 29, 31, groups - local, groups - 1, groups):
            sizes = sizes_of.any_kind(rng, M, groups)
            options = dict(implementation="cuda")
            got = op.cotangents(lhs, rhs, sizes, cotangent, np.int32(offset), **options)
            oracle.check_all(got, op.exact_cotangents(lhs, rhs, sizes, cotangent, offset))


@BOTH_OPS
class TestShapes:
    @pytest.mark.parametrize("m", [0, 1, 7, 64, 127, 129, 257])
    def test_number_of_rows(self, op, m, tile, rng):
        lhs, rhs, _ = operands(op, rng, m=m, k=72)
        full = np.full(G, 3, np.int32)
        kinds = sizes_of.uniform(m, G), sizes_of.any_kind(rng, m, G), sizes_of.one_hot(m, G, 3)
        for sizes in (*kinds, full):
            check(op, lhs, rhs, sizes, tile=tile)

    @MAJORS
    @pytest.mark.parametrize("k, n", [(8, 8), (40, 136), (136, 40), (2880, 264), (64, 2880)])
    def test_dimensions_off_the_tile(self, op, k, n, transpose_lhs, transpose_rhs, tile, rng):
        lhs, rhs, _ = operands(op, rng, k=k, n=n)
        majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        check(op, lhs, rhs, sizes_of.multinomial(rng, M - 100, G), **majors, tile=tile)

    @MAJORS
    @pytest.mark.parametrize(
        "m, k, n", [(333, 37, 51), (333, 1, 64), (333, 64, 1), (256, 129, 300), (1, 40, 40)]
    )
    def test_rows_off_16_bytes(self, op, m, k, n, transpose_lhs, transpose_rhs, tile, rng):
        lhs, rhs, cotangent = operands(op, rng, m=m, k=k, n=n)
        majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        any_kind = (sizes_of.any_kind(rng, m, G) for _ in range(2))
        for sizes in (sizes_of.multinomial(rng, m, G), *any_kind):
            check(op, lhs, rhs, sizes, preferred_element_type=F32, **majors, tile=tile)
        check_cotangents(op, lhs, rhs, sizes, cotangent, **majors)

    # Every way in which lhs, rhs, group_sizes and group_offset can be batched.
    @pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2) if any(b)])
    @pytest.mark.parametrize("transpose", [False, True])
    def test_batches(self, op, batched, transpose, tile, rng):
        batch, local, groups = 3, 4, 6
        shapes = *op.shapes(M, 72, 136, local)[:2], (groups,), ()
        shapes = [(batch, *s) if b else s for b, s in zip(batched, shapes, strict=True)]
        lhs, rhs = (random(rng, shape, BF16) for shape in shapes[:2])
        sizes = rng.integers(-20, 2 * M // groups, shapes[2], dtype=np.int32)
        offset = rng.integers(-2, groups + 1, shapes[3], dtype=np.int32)
        majors = dict(transpose_lhs=transpose, transpose_rhs=transpose)

        @jax.jit
        def run(*operands):
            call = partial(op.call, implementation="cuda", tile=tile, **majors)
            return jax.vmap(call, in_axes=[0 if b else None for b in batched])(*operands)

        out = run(swap(lhs, transpose), swap(rhs, transpose), sizes, offset)
        oracle.check(out, op.exact(lhs, rhs, sizes, offset))


class TestManyTiles:
    @pytest.mark.parametrize(
        "op, m, k, n", [(NONCONTRACTING, 8192, 200, 4096), (CONTRACTING, 2048, 1104, 2048)], ids=str
    )
    def test_for_each_processor(self, op, m, k, n, tile, rng):
        """Each processor has several tiles, and some tiles are not full."""
        lhs, rhs, _ = operands(op, rng, m=m, k=k, n=n)
        for sizes in (sizes_of.multinomial(rng, m, G), sizes_of.zipf(rng, 7 * m // 8, G)):
            check(op, lhs, rhs, sizes, tile=tile)

    @MAJORS
    @pytest.mark.parametrize("out_dtype", [BF16, F32])
    def test_of_zeros_among_others(self, out_dtype, transpose_lhs, transpose_rhs, tile, rng):
        """Each processor has tiles of groups in the window, of other groups, and of no group."""
        m, groups, local = 8192, 200, 90
        lhs, rhs, _ = operands(NONCONTRACTING, rng, m=m, g=local)
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, tile=tile)
        options |= dict(preferred_element_type=out_dtype)
        for kind in (sizes_of.multinomial, sizes_of.zipf):
            offset = rng.integers(1, groups - local, dtype=np.int32)
            check(NONCONTRACTING, lhs, rhs, kind(rng, m - 700, groups), offset, **options)

    @MAJORS
    @pytest.mark.parametrize("out_dtype", [BF16, F32])
    def test_of_any_length(self, out_dtype, transpose_lhs, transpose_rhs, tile, rng):
        """Tiles have from no step to dozens of steps, so that tiles begin in every stage."""
        m, groups = 8192, 85
        lhs, rhs, _ = operands(CONTRACTING, rng, m=m)
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, tile=tile)
        options |= dict(preferred_element_type=out_dtype)
        lengths = np.array([0, 0, 1, 3, 20, 64, 65, 130, 320, 700], np.int32)
        some = rng.choice(lengths, groups, p=[0.2, 0.3, *[0.06] * 7, 0.08])
        for sizes in (some, sizes_of.zipf(rng, m, groups)):
            check(CONTRACTING, lhs, rhs, sizes, **options)


class TestPastTwoToThe31Elements:
    """Addresses need more than 32 bits."""

    def test_of_rows(self, tile, rng):
        """The last rows show whether addresses are right."""
        m, k, n = 2**18 + 2**15, 64, 2**13
        lhs, rhs = random(rng, (m, k), BF16), random(rng, (2, k, n), BF16)
        sizes = np.array([m - 300, 200], np.int32)
        out = NONCONTRACTING.call(lhs, rhs, sizes, implementation="cuda", tile=tile)
        last = 512
        exact = oracle.ragged_noncontracting(lhs[-last:], rhs, [last - 300, 200])
        oracle.check(out[-last:], exact)
        oracle.check(out[:last], oracle.ragged_noncontracting(lhs[:last], rhs, [last, 0]))

    def test_of_groups(self, tile, rng):
        """The last group shows whether addresses are right."""
        m, k, n, groups = 300, 2**13, 2**13, 33
        lhs, rhs = random(rng, (m, k), BF16), random(rng, (m, n), BF16)
        sizes = np.zeros(groups, np.int32)
        sizes[0], sizes[-1] = 100, 150
        out = contracting(lhs, rhs, sizes, implementation="cuda", tile=tile)
        for part in (slice(0, 512), slice(-512, None)):
            exact = oracle.ragged_contracting(lhs[:, part], rhs[:, part], [100, 150])
            oracle.check(jnp.stack([out[0, part, part], out[-1, part, part]]), exact)
        assert not jnp.any(out[1:-1])
