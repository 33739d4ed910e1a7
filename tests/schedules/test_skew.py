"""The tiles of weight gradients of unequal groups are cut: the kernels' schedule, run on the CPU,
and plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged.problem import LEAST_BYTES, skew_is_possible, sums_bytes
from jax_grouped_gemm._src.ragged.tiles import NARROW_TILE, PINGPONG_TILE
from tests.schedules.test_ragged import LHS, RHS, TILE_CHANGE, TILE_K, Problem, random_problem
from tests.support import group_sizes as sizes_of
from tests.support.plans import contracting_plan

HANDS_OVER = -1
CLUSTERS = H200.multiprocessors // DEFAULT_TILE.cluster
KERNEL_TILE = DEFAULT_TILE.sizes()
END = 2**31 - 1  # stands for the end of a chain
LEAST_PIECE = 8
PIECE_FIELDS = (
    "owner rank batch group begin extent head m n k_tiles share first_step partials slot".split()
)


def ranges_of(
    schedules, chains: int, length: int, clusters: int, longest: int | None = None
) -> np.recarray:
    """Returns the ranges of chains of one tile each, or of tiles of up to `longest` steps."""
    rows = schedules.chain_ranges(chains, length, length if longest is None else longest, clusters)
    return np.rec.fromarrays(rows.T, names="cluster chain begin end part".split())


def check_chains(ranges: np.recarray, chains: int, length: int, clusters: int) -> None:
    """Checks that parts have each step of a chain once, and later parts have earlier clusters."""
    assert len(ranges) == 0 or ranges.chain.max() < chains
    by_chain = np.sort(ranges, order=["chain", "begin"]).view(np.recarray)
    assert sorted(set(by_chain.chain)) == list(range(chains))
    firsts = np.r_[True, np.diff(by_chain.chain) > 0]
    lasts = np.r_[firsts[1:], True]
    assert (by_chain.begin[firsts] == 0).all() and (by_chain.end[lasts] == END).all()
    np.testing.assert_array_equal(by_chain.begin[~firsts], by_chain.end[~lasts])
    assert (by_chain.end > by_chain.begin).all() and (by_chain.begin < max(length, 1)).all()
    # Parts are numbered in the order of the chain, so that each has a place for its sum.
    starts = np.maximum.accumulate(np.where(firsts, np.arange(len(firsts)), 0))
    np.testing.assert_array_equal(by_chain.part, np.arange(len(firsts)) - starts)
    later = by_chain.cluster[~firsts]
    assert (later < by_chain.cluster[~lasts]).all()
    for _, own in itertools.groupby(ranges, key=lambda r: r.cluster):
        own = list(own)
        # A cluster computes last the range for which it may have to wait.
        assert all(r.end == END for r in own[:-1])
        assert all(a.chain < b.chain for a, b in itertools.pairwise(own))


def longest(ranges: np.recarray, length: int, clusters: int) -> int:
    steps = np.minimum(ranges.end, length) - ranges.begin
    return int(np.bincount(ranges.cluster, steps, minlength=clusters).max(initial=0))


@pytest.mark.parametrize("clusters", [1, 2, 3, 4, 5, 7, 8, 11, 57, CLUSTERS, 72, 144])
@pytest.mark.parametrize("length", [0, 1, 31, 64, 65, 100, 333, 514, 1026, 4099])
def test_every_number_of_chains(clusters, length, schedules):
    for chains in range(1, 2 * clusters + 3):
        ranges = ranges_of(schedules, chains, length, clusters)
        check_chains(ranges, chains, length, clusters)
        assert longest(ranges, length, clusters) <= -(-chains // clusters) * length


@pytest.mark.parametrize("length", [514, 1026])
def test_shares_are_nearly_equal(length, schedules):
    """The busiest cluster has little more than the mean, for any number of chains."""
    for chains in range(4, 8 * CLUSTERS):
        ranges = ranges_of(schedules, chains, length, CLUSTERS)
        loss = longest(ranges, length, CLUSTERS) - chains * length / CLUSTERS
        assert loss <= max(0.12 * length, 10)


def test_longest_chains(schedules):
    """Nothing overflows in chains of the largest length."""
    length = 2**24 - 1
    for clusters in (57, CLUSTERS, 144):
        for chains in range(1, clusters):
            check_chains(ranges_of(schedules, chains, length, clusters), chains, length, clusters)


def pieces_of(
    schedules, problem: Problem, length: int, longest: int, **options: bool
) -> np.recarray:
    rows = schedules.ragged_contracting_pieces(
        np.ascontiguousarray(np.atleast_2d(problem.group_sizes), np.int32),
        np.ascontiguousarray(np.atleast_1d(problem.group_offset), np.int32),
        batches=problem.batches,
        local_groups=problem.local_groups,
        m=problem.m,
        k=problem.k,
        n=problem.n,
        tile_m=problem.tile_m,
        tile_n=problem.tile_n,
        cluster=problem.cluster,
        clusters=problem.clusters,
        length=length,
        longest=longest,
        **options,
    )
    return np.rec.fromarrays(rows.T, names=PIECE_FIELDS)


def chain_of(problem: Problem) -> tuple[int, int]:
    """Returns the steps of all groups and of the longest group, with the cost of tile changes."""
    start, end = np.moveaxis(problem.windows(), -1, 0)
    steps = (-(-(end - start) // TILE_K) + TILE_CHANGE)[end > start]
    return int(steps.sum()), int(steps.max(initial=0))


def check_pieces(problem: Problem, pieces: np.recarray, most_sums: int) -> int:
    """Checks that each step of a tile is computed once, and sums arrive without a deadlock.

    Returns the number of sums that are handed over.
    """
    first, second = pieces[0::2], pieces[1::2]
    assert (first["rank"] == 0).all() and (second["rank"] == 1).all()
    same = "owner batch group begin extent head k_tiles share partials slot".split()
    for field in same:
        np.testing.assert_array_equal(first[field], second[field])
    np.testing.assert_array_equal(
        second.m - first.m, np.where(first.share == RHS, problem.tile_m, 0)
    )
    np.testing.assert_array_equal(
        second.n - first.n, np.where(first.share == LHS, problem.tile_n, 0)
    )
    assert (pieces["head"] == 0).all() and (pieces.first_step == 0).all()
    assert (pieces.k_tiles > 0).all()
    np.testing.assert_array_equal(pieces.k_tiles, -(-pieces.extent // TILE_K))

    windows = problem.windows()
    start, end = np.moveaxis(windows[first.batch, first.group], -1, 0)
    begins = first.begin == start
    ends = first.begin + first.extent == end
    gives = first.partials == HANDS_OVER
    np.testing.assert_array_equal(gives, ~begins)
    assert ((first.begin - start) % TILE_K == 0).all()
    assert (first.k_tiles[~(begins & ends)] >= LEAST_PIECE).all()
    assert (first.partials[begins & ends] == 0).all()

    # Every element of every result that has rows is stored once.
    covered = np.zeros(
        (
            problem.batches,
            problem.local_groups,
            -(-problem.k // problem.tile_m),
            -(-problem.n // problem.tile_n),
        ),
        int,
    )
    stored = pieces[(pieces.partials != HANDS_OVER) & (pieces.n < problem.n)]
    at = stored.batch, stored.group, stored.m // problem.tile_m, stored.n // problem.tile_n
    np.add.at(covered, at, 1)
    has_rows = windows[..., 0] < windows[..., 1]
    np.testing.assert_array_equal(
        covered, np.broadcast_to(has_rows[..., None, None], covered.shape).astype(int)
    )

    # A cluster adds the sums of the later steps of its own tile, in their order.
    slots = first.slot[gives]
    assert len(set(slots)) == len(slots)
    assert ((0 <= slots) & (slots < most_sums)).all()
    giver = {piece.slot: piece for piece in first[gives]}
    for piece, group_end in zip(first, end, strict=True):
        reached = piece.begin + piece.extent
        if piece.partials == HANDS_OVER:
            continue
        for i in range(piece.partials):
            other = giver.pop(piece.slot + i)
            for field in ("batch", "group", "m", "n", "share"):
                assert other[field] == piece[field]
            assert other.begin == reached
            assert other.owner < piece.owner
            reached += other.extent
        assert reached == group_end
    assert not giver

    # A cluster hands everything over before it waits for the first time.
    for _, own in itertools.groupby(first, key=lambda p: p.owner):
        roles = [p.partials for p in own if p.partials]
        assert all(role == HANDS_OVER for role in roles[:-1])
    return len(slots)


def units_of(problem: Problem) -> int:
    """Returns how many units of work a group has. A unit is a pair of tiles along M if possible."""
    rows, columns = -(-problem.k // problem.tile_m), -(-problem.n // problem.tile_n)
    pairs, odd = divmod(rows, 2)
    return pairs * columns + odd * -(-columns // 2)


def test_random_problems(schedules, rng):
    num_cut = 0
    for _ in range(1500):
        problem = random_problem(rng, "ragged_contracting", [KERNEL_TILE, NARROW_TILE.sizes()])
        scale = int(rng.choice([1, 20, 100, 100]))
        problem = replace(
            problem,
            m=problem.m * scale,
            group_sizes=np.clip(problem.group_sizes, -1, problem.m) * scale,
            align=1,
            clusters=int(rng.choice([1, 2, 3, 5, 8, 24, CLUSTERS])),
        )
        length, most = chain_of(problem)
        # The kernel only estimates the length, so try other lengths as well.
        length = int(rng.choice([length, length, length // 2, 2 * length]))
        most = int(rng.choice([most, most // 8, 8 * most]))
        try:
            pieces = pieces_of(schedules, problem, length, most)
            most_sums = schedules.most_chain_sums(units_of(problem), problem.clusters)
            num_cut += check_pieces(problem, pieces, most_sums) > 0
        except AssertionError as error:
            raise AssertionError(f"{problem}, length {length}: {error}") from error
    assert num_cut > 100


@pytest.mark.parametrize("units", [1, 2, 7, 8, 9, 11, 16, 24, 33, 34, 48, 56, 65, 66, 67, 90, 132])
def test_every_number_of_units(units, schedules, rng):
    m, groups = 65536, 16
    for sizes in (
        sizes_of.one_hot(m, groups, 3),
        sizes_of.zipf(rng, m, groups),
        sizes_of.multinomial(rng, m, groups),
        np.array([m // 2, 0, 0, m // 2] + [0] * 12, np.int32),
        np.array([m - 1000, *[0] * 14, 1000], np.int32),
    ):
        problem = Problem(
            "ragged_contracting",
            sizes,
            np.array(0),
            1,
            groups,
            m=m,
            k=256,
            n=256 * units,
            clusters=CLUSTERS,
            **KERNEL_TILE,
        )
        length, most = chain_of(problem)
        pieces = pieces_of(schedules, problem, length, most)
        check_pieces(
            problem, pieces, schedules.most_chain_sums(units_of(problem), problem.clusters)
        )
        loads = np.bincount(pieces.owner[::2], pieces.k_tiles[::2], minlength=CLUSTERS)
        ranges = ranges_of(schedules, units, length, CLUSTERS, most)
        # Pieces are as long as the ranges, except that one side of a cut may take a few steps more.
        assert loads.max() <= longest(ranges, length, CLUSTERS) + 2 * LEAST_PIECE


@pytest.mark.parametrize("columns", [72, 128, 500])
def test_few_tiles_of_many_groups(columns, schedules, rng):
    """No cluster has many more steps than its share, or than the shortest useful piece. Adding sums
    takes no longer than the steps."""
    for _ in range(20):
        sizes = sizes_of.zipf(rng, 32768, 64)
        problem = Problem(
            "ragged_contracting",
            sizes,
            np.array(0),
            1,
            len(sizes),
            m=32768,
            k=104,
            n=columns,
            clusters=CLUSTERS,
            **NARROW_TILE.sizes(),
        )
        length, most = chain_of(problem)
        pieces = pieces_of(schedules, problem, length, most)
        check_pieces(problem, pieces, schedules.most_chain_sums(units_of(problem), CLUSTERS))
        loads = np.bincount(pieces.owner[::2], pieces.k_tiles[::2], minlength=CLUSTERS)
        additions = pieces.partials.max()
        even = length * units_of(problem) / CLUSTERS
        assert loads.max() <= max(even, (5 * most) ** 0.5) + 2 * LEAST_PIECE
        assert 2.5 * additions <= loads.max() + LEAST_PIECE


def worthwhile_length(schedules, sizes, units, *, m=None, room=10**6, clusters=CLUSTERS) -> int:
    sizes = np.asarray(sizes, np.int32)
    return schedules.worthwhile_chain_length(
        sizes[None],
        np.zeros(1, np.int32),
        batches=1,
        local_groups=len(sizes),
        m=int(sizes.sum()) if m is None else m,
        units=units,
        zeros_cost=4,
        most_sums=room,
        clusters=clusters,
    )


class TestDecision:
    """The kernel decides from the group sizes whether tiles are cut at all."""

    @pytest.mark.parametrize(
        "groups, m, units", [(128, 65536, 24), (8, 32768, 224), (8, 8192, 896)]
    )
    def test_equal_and_usual_sizes_stay_whole(self, groups, m, units, schedules, rng):
        assert worthwhile_length(schedules, sizes_of.uniform(m, groups), units) == 0
        assert worthwhile_length(schedules, sizes_of.multinomial(rng, m, groups), units) == 0

    @pytest.mark.parametrize("units", [1, 24, 48, 56, 67, 224])
    @pytest.mark.parametrize("groups, m", [(128, 65536), (8, 32768)])
    def test_one_hot_group(self, units, groups, m, schedules, rng):
        sizes = sizes_of.one_hot(m, groups, rng.integers(groups))
        assert worthwhile_length(schedules, sizes, units) == m // TILE_K + TILE_CHANGE

    def test_two_hot_groups_count_together(self, schedules):
        """One hot group leaves few clusters idle in its only wave; two groups take two waves."""
        sizes = np.array([0, 20000, 0, 0, 20000, 0])
        assert worthwhile_length(schedules, sizes, 60) == 0
        assert worthwhile_length(schedules, sizes, 40) == 2 * (-(-20000 // TILE_K) + TILE_CHANGE)

    def test_zeros_are_worth_it(self, schedules):
        """Cuts pay even in full waves if most groups are empty: idle warps then write the zeros."""
        assert worthwhile_length(schedules, sizes_of.one_hot(32768, 256, 7), CLUSTERS) > 0
        assert worthwhile_length(schedules, [32768], CLUSTERS) == 0

    def test_one_group_of_few_tiles(self, schedules):
        assert worthwhile_length(schedules, [8192], 40) > 0

    def test_few_rows(self, schedules):
        assert worthwhile_length(schedules, sizes_of.one_hot(4095, 4, 2), 24) == 0
        assert worthwhile_length(schedules, sizes_of.one_hot(4096, 4, 2), 24) > 0

    def test_no_room(self, schedules):
        sizes = sizes_of.one_hot(65536, 128, 5)
        room = schedules.most_chain_sums(24, CLUSTERS)
        assert worthwhile_length(schedules, sizes, 24, room=room) > 0
        assert worthwhile_length(schedules, sizes, 24, room=0) == 0

    def test_hostile_sizes(self, schedules, rng):
        """For hostile sizes the pieces are right, whether the kernel makes chains or not."""
        for _ in range(200):
            groups = int(rng.choice([1, 3, 40]))
            sizes = sizes_of.hostile(rng, 20000, groups)
            problem = Problem(
                "ragged_contracting",
                sizes,
                np.array(rng.integers(-3, 3)),
                1,
                groups,
                m=20000,
                k=700,
                n=1300,
                clusters=CLUSTERS,
                **KERNEL_TILE,
            )
            units = units_of(problem)
            length = worthwhile_length(schedules, sizes, units, m=20000)
            pieces = pieces_of(schedules, problem, length, chain_of(problem)[1])
            check_pieces(problem, pieces, schedules.most_chain_sums(units, CLUSTERS))


class TestPlan:
    plan = staticmethod(partial(contracting_plan, m=65536, k=768, n=2048, groups=128))

    @pytest.mark.parametrize("k, n", [(768, 2048), (2048, 1536), (300, 700), (128, 256)])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_room_for_all_sums(self, k, n, dtype, schedules):
        for tile in (DEFAULT_TILE, NARROW_TILE):
            found = self.plan(k=k, n=n, dtype=dtype, tile=tile)
            problem = Problem(
                "", np.zeros(1), np.zeros(1), 1, 1, m=1, k=k, n=n, clusters=1, **tile.sizes()
            )
            sums = schedules.most_chain_sums(units_of(problem), CLUSTERS)
            blocks = sums * tile.cluster
            assert found.workspace_bytes == sums_bytes(128, tile.tile_n, blocks) > 10**6
            assert str(found.workspace_bytes) in str(found)

    def test_tiles_in_turn_are_cut_in_wide_ones(self):
        turns, wide, narrow = (
            self.plan(out_dtype=jnp.float32, tile=tile)
            for tile in (PINGPONG_TILE, DEFAULT_TILE, NARROW_TILE)
        )
        assert turns.workspace_bytes == wide.workspace_bytes != narrow.workspace_bytes

    def test_all_processors_whatever_the_tiles(self):
        assert self.plan(k=128, n=256, groups=1).grid == H200.multiprocessors

    @pytest.mark.parametrize(
        "options",
        [
            dict(m=64 * 64 - 1),
            dict(groups=1025),
            dict(dtype=jnp.float32),
            dict(k=66 * 256, n=256),  # nothing left over
        ],
    )
    def test_no_room_where_nothing_is_cut(self, options):
        found, usual = self.plan(**options), self.plan()
        assert found.workspace_bytes != usual.workspace_bytes
        if options.get("dtype") is None:
            assert found.workspace_bytes == LEAST_BYTES

    @pytest.mark.parametrize("rows", [4095, 4096, 10**6])
    @pytest.mark.parametrize("units", [1, 40, 2**16 - 1, 2**16])
    @pytest.mark.parametrize("groups", [2, 1024, 1025])
    def test_the_kernel_agrees_where_sizes_matter(self, rows, units, groups, schedules):
        """Plans have room for sums wherever the kernel cuts tiles for some group sizes."""
        sizes = sizes_of.one_hot(rows, groups, 1)
        cut = worthwhile_length(schedules, sizes, units) > 0
        possible = skew_is_possible(rows=rows, units=units, groups=groups)
        assert possible or not cut
        if rows == 10**6 and units == 40:
            assert cut == possible
