"""The last wave is cut along K: the kernels' schedule, run on the CPU, and plans."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged import primitive as ragged
from jax_grouped_gemm._src.ragged import reference
from jax_grouped_gemm._src.ragged.problem import (
    WORTHWHILE_STEPS,
    stream_k_waves,
    sums_bytes,
)
from jax_grouped_gemm._src.ragged.tiles import NARROW_STREAM_K_TILE, STREAM_K_TILE
from tests.schedules.test_ragged import (
    FIELDS,
    TILE_K,
    Problem,
    check_noncontracting,
    random_problem,
)
from tests.support.aot import ALIGNMENT, FREE
from tests.support.ops import CONTRACTING, NONCONTRACTING

HANDS_OVER = -1
TILE = STREAM_K_TILE
CLUSTERS = H200.multiprocessors // TILE.cluster


def records(rows: np.ndarray, names: str) -> np.recarray:
    return np.rec.fromarrays(rows.T, names=names.split())


def check_assignment(pieces: np.recarray, units: int, steps: int, clusters: int) -> None:
    """Checks that each step is there once, and each sum reaches the cluster that waits for it."""
    assert (pieces.steps > 0).all() and (pieces.first >= 0).all()
    edges = np.zeros((units, steps + 1), int)
    np.add.at(edges, (pieces.unit, pieces.first), 1)
    np.add.at(edges, (pieces.unit, pieces.first + pieces.steps), -1)
    assert (np.cumsum(edges, axis=1)[:, :-1] == 1).all()

    gives = pieces.partials == HANDS_OVER
    assert (gives == (pieces.first > 0)).all()
    assert np.bincount(pieces.cluster[gives], minlength=clusters).max(initial=0) <= 1
    handed_over = {}
    for cluster, own in itertools.groupby(pieces, key=lambda piece: piece.cluster):
        own = list(own)
        assert all(a.unit < b.unit for a, b in itertools.pairwise(own))
        # A cluster hands its own sum over before it waits for other sums.
        roles = [np.sign(piece.partials) for piece in own if piece.partials]
        assert roles in ([], [-1], [1], [-1, 1])
        for piece in own:
            end = piece.first + piece.steps
            for distance in range(1, piece.partials + 1):
                # A cluster waits only for clusters before it, whose sums are already in the table.
                unit, first, count = handed_over.pop(cluster - distance)
                assert (unit, first) == (piece.unit, end)
                end += count
            if piece.partials == HANDS_OVER:
                handed_over[cluster] = piece.unit, piece.first, piece.steps
            else:
                assert end == steps
    assert not handed_over


def check_balance(pieces: np.recarray, units: int, steps: int, clusters: int) -> None:
    """Checks that no cluster has more steps than with whole units, or than plans predict."""
    longest = np.bincount(pieces.cluster, pieces.steps).max(initial=0)
    whole = -(-units // clusters) * steps
    cut = (pieces.partials == HANDS_OVER).any()
    assert longest <= whole - (WORTHWHILE_STEPS if cut else 0)
    assert longest == pytest.approx(steps * stream_k_waves(units, steps, clusters))


@pytest.mark.parametrize("clusters", [1, 2, 3, 4, 5, 6, 7, 8, 11, CLUSTERS])
@pytest.mark.parametrize("steps", [1, 2, 15, 17, 20, 22, 25, 32, 33, 48, 63, 64, 67, 112, 225])
def test_every_number_of_units(clusters, steps, schedules):
    cuts = 0
    for units in range(3 * clusters + 2):
        pieces = records(
            schedules.assignment(units, steps, clusters), "cluster unit first steps partials"
        )
        check_assignment(pieces, units, steps, clusters)
        check_balance(pieces, units, steps, clusters)
        cuts += (pieces.partials == HANDS_OVER).any()
    # A single unit can be cut into as many parts as there are clusters, four at most.
    parts = min(clusters, 4)
    assert (cuts > 0) == (steps - -(-steps // parts) >= WORTHWHILE_STEPS)


@pytest.mark.parametrize("clusters", [1, 2, 3, 7, 64, 264])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 23, 32, 33, 45])
def test_even_shares(clusters, steps, schedules):
    """Kernels whose time goes into reading cut units, except short ones for a third of clusters."""
    bounds = clusters, clusters + 1, clusters // 3, clusters // 3 + 1
    for units in [*range(20), *bounds, *np.random.randint(20, 2000, 5)]:
        pieces = records(
            schedules.even_assignment(units, steps, clusters), "cluster unit first steps partials"
        )
        check_assignment(pieces, units, steps, clusters)
        own = np.bincount(pieces.cluster, pieces.steps)
        is_whole = steps <= 32 and units <= clusters <= 3 * units
        least = min(clusters, max(units * steps // 4, min(units, 1)))
        assert len(own) == (units if is_whole else least)
        assert own.size == 0 or own.max() - own.min() <= 1


def test_longest_contracted_dimension(schedules):
    """The arithmetic must not overflow where K is the largest int."""
    steps = -(-(2**31 - 1) // TILE_K)
    for units in range(1, CLUSTERS):
        pieces = records(
            schedules.assignment(units, steps, CLUSTERS), "cluster unit first steps partials"
        )
        pieces = np.sort(pieces, order=["unit", "first"]).view(np.recarray)
        ends = np.concatenate([[0], pieces.first + pieces.steps])
        starts_unit = pieces.first == 0
        assert (pieces.first[~starts_unit] == ends[:-1][~starts_unit]).all()
        assert (ends[:-1][starts_unit] % steps == 0).all() and ends[-1] == steps
        assert starts_unit.sum() == units


@pytest.mark.parametrize(
    "op, step, tile",
    [("ragged", 64, TILE), ("ragged", 64, NARROW_STREAM_K_TILE), ("scaled_ragged", 128, TILE)],
    ids=str,
)
class TestTiles:
    """Pieces of tiles are right for any group sizes, on which the number of tiles depends."""

    def pieces(self, op, step, schedules, problem: Problem, clusters: int) -> np.recarray:
        """Returns the pieces of a problem. K is scaled so that every kernel has as many steps."""
        options = dataclasses.asdict(problem)
        del options["op"], options["align"], options["clusters"]
        options["k"] = options["k"] * step // TILE_K
        rows = getattr(schedules, f"{op}_noncontracting_pieces")(
            np.ascontiguousarray(np.atleast_2d(options.pop("group_sizes")), np.int32),
            np.ascontiguousarray(np.atleast_1d(options.pop("group_offset")), np.int32),
            clusters=clusters,
            **options,
        )
        names = ["cluster of the grid" if name == "unit" else name for name in FIELDS]
        names.remove("owner")
        return np.rec.fromarrays(rows.T, names=[*names, "first_step", "partials", "slot"])

    def whole_tiles(self, problem: Problem, pieces: np.recarray) -> np.recarray:
        """Returns the tiles that are stored, with the number of steps that each tile sums up."""
        stored = pieces[pieces.partials != HANDS_OVER].copy()
        for tile in stored:
            for distance in range(1, tile.partials + 1):
                cluster = tile["cluster of the grid"] - distance
                others = (pieces["cluster of the grid"] == cluster) & (
                    pieces["rank"] == tile["rank"]
                )
                (given,) = pieces[others & (pieces.partials == HANDS_OVER)]
                for name in ("batch", "group", "begin", "extent", "m", "n", "share"):
                    assert given[name] == tile[name]
                assert given.first_step == tile.first_step + tile.k_tiles
                assert given.slot == tile.slot + distance - 1
                tile.k_tiles += given.k_tiles
        return stored

    def test_random_problems(self, op, step, tile, schedules, rng):
        num_cut = 0
        for _ in range(800):
            problem = random_problem(rng, "ragged_noncontracting", [tile.sizes()])
            k = TILE_K * int(rng.choice([1, 20, 33, 100])) + int(rng.integers(-3, 1))
            problem = dataclasses.replace(problem, align=1, k=k)
            clusters = int(rng.choice([1, 2, 3, 5, 8, 24, CLUSTERS]))
            try:
                pieces = self.pieces(op, step, schedules, problem, clusters)
                ranks = pieces[0::2], pieces[1::2]
                for name in ("cluster of the grid", "k_tiles", "first_step", "partials"):
                    np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
                stored = self.whole_tiles(problem, pieces)
                num_over = (pieces.partials == HANDS_OVER).sum()
                assert num_over == stored.partials.sum()
                check_noncontracting(problem, stored)
            except AssertionError as error:
                raise AssertionError(f"{problem}, {clusters} clusters: {error}") from error
            num_cut += num_over > 0
        assert num_cut > 50

    def test_rows_without_an_owner_go_to_idle_clusters_first(self, op, step, tile, schedules):
        # Five units that a group owns, cut into 15 ranges, and three that no group owns.
        problem = Problem(
            "ragged_noncontracting",
            np.array([5 * 256]),
            np.array(0),
            1,
            1,
            8 * 256,
            6400,
            tile.tile_n,
            **tile.sizes(),
        )
        pieces = self.pieces(op, step, schedules, problem, 18)
        unowned = pieces[pieces.k_tiles == 0]
        assert sorted(set(unowned["cluster of the grid"])) == [15, 16, 17]


class TestPlan:
    def plan(
        self, op=NONCONTRACTING, dtype=jnp.bfloat16, tile=TILE, m=2112, k=4096, n=4096, **options
    ):
        lhs, rhs, _ = op.shapes(m, k, n, 8)
        bind = {
            NONCONTRACTING: ragged.ragged_noncontracting,
            CONTRACTING: partial(ragged.ragged_contracting, num_groups=8),
        }[op]
        params = (
            dict(
                transpose_lhs=False,
                transpose_rhs=False,
                preferred_element_type=np.dtype(dtype),
                precision=None,
                implementation=None,
                tile=tile,
            )
            | options
        )
        if params["transpose_lhs"]:
            lhs = lhs[::-1]
        (found,) = jgg.explain(
            partial(bind, **params),
            jax.ShapeDtypeStruct(lhs, dtype),
            jax.ShapeDtypeStruct(rhs, dtype),
            jax.ShapeDtypeStruct((8,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ).plans
        return found

    def test_default_where_it_pays(self):
        found = self.plan(tile=None)
        assert found.tile == TILE and found.chosen_by == "default"
        assert "stream-k, grid" in str(found)

    @pytest.mark.parametrize(
        "options",
        [
            dict(m=8 * 200),  # few rows a group
            dict(k=2048),  # few steps
            dict(m=8 * 4096),  # many waves
            dict(dtype=jnp.float32),
            dict(op=CONTRACTING),
        ],
    )
    def test_off_elsewhere(self, options):
        found = self.plan(tile=None, **options)
        assert found.tile == DEFAULT_TILE
        assert "stream-k" not in str(found)

    @pytest.mark.parametrize("tile", [TILE, NARROW_STREAM_K_TILE], ids=str)
    def test_workspace_is_what_the_kernel_takes(self, tile, schedules):
        found = self.plan(tile=tile)
        assert found.tile == tile and "stream-k (overridden)" in str(found)
        assert found.workspace_bytes == schedules.stream_k_workspace_bytes(
            **tile.sizes(), blocks=H200.multiprocessors
        )

    def test_utilization_counts_the_part_of_the_last_wave(self):
        # First 5 waves of 66 units and one of 54, which is too full to be cut; then 2 and one of 4.
        whole = DEFAULT_TILE
        assert self.plan(m=8 * 768).utilization == self.plan(m=8 * 768, tile=whole).utilization
        whole, cut = (self.plan(m=8 * 256, n=17 * 256, tile=t) for t in (whole, TILE))
        assert whole.utilization == pytest.approx(136 / (3 * 66))
        assert cut.utilization == pytest.approx(136 / (2.25 * 66))
        # A step takes 64 elements of k, whatever k is.
        longer = self.plan(m=8 * 256, n=17 * 256, k=2**14, tile=TILE)
        assert longer.utilization == cut.utilization

    def test_few_units_still_fill_the_grid(self):
        whole = self.plan(m=8 * 100, n=256, tile=DEFAULT_TILE)
        assert whole.grid < self.plan(m=8 * 100, n=256).grid

    @pytest.mark.parametrize(
        "options, why",
        [
            (dict(op=CONTRACTING), "not for weight gradients"),
            (dict(dtype=jnp.float32), "not compiled"),
            (dict(tile=dataclasses.replace(TILE, tile_n=64)), "not compiled"),
        ],
    )
    def test_raises_where_there_is_no_kernel(self, options, why):
        with pytest.raises(ValueError, match=rf"cluster 2, stream-k for ragged_.*which is {why}"):
            self.plan(**options)

    def test_every_tile_is_compiled(self, schedules):
        op = "ragged_noncontracting_stream_k"
        compiled = [config for config in schedules.kernel_configs() if config["op"] == op]
        tiles = STREAM_K_TILE, NARROW_STREAM_K_TILE
        planned = [dict(op=op, **tile.sizes()) for tile in tiles]
        assert compiled == planned

    def test_the_reference_ignores_it(self, rng):
        lhs, rhs = (rng.standard_normal(s).astype(jnp.bfloat16) for s in ((40, 16), (2, 16, 24)))
        sizes, offset = np.array([9, 21], np.int32), np.zeros(1, np.int32)
        params = dict(
            transpose_lhs=False,
            transpose_rhs=False,
            preferred_element_type=np.dtype(np.float32),
            precision=None,
        )

        def call(lhs, rhs):
            return ragged.ragged_noncontracting(
                lhs, rhs, sizes, offset, implementation="xla", tile=TILE, **params
            )

        out, vjp = jax.vjp(call, lhs, rhs)
        np.testing.assert_array_equal(
            out, reference.ragged_noncontracting(lhs, rhs, sizes, offset, **params)
        )
        assert [x.shape for x in vjp(out)] == [lhs.shape, rhs.shape]

    def test_cotangents_plan_their_own_tiles(self):
        def call(lhs, rhs, sizes, offset):
            return ragged.ragged_noncontracting(
                lhs,
                rhs,
                sizes,
                offset,
                transpose_lhs=False,
                transpose_rhs=False,
                preferred_element_type=np.dtype(jnp.bfloat16),
                precision=None,
                implementation=None,
                tile=TILE,
            )

        def cotangents(lhs, rhs, sizes, offset):
            out, vjp = jax.vjp(lambda lhs, rhs: call(lhs, rhs, sizes, offset), lhs, rhs)
            return vjp(out)

        plans = jgg.explain(
            cotangents,
            *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 2048), (8, 2048, 512))),
            *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((8,), (1,))),
        ).plans
        assert [p.tile.stream_k for p in plans] == [True, False, False]


class TestCompiledForAnH200:
    @pytest.mark.parametrize("transpose_rhs", [False, True])
    def test_is_one_kernel_and_nothing_else(self, transpose_rhs, h200):
        product = partial(
            ragged.ragged_noncontracting,
            transpose_lhs=False,
            transpose_rhs=transpose_rhs,
            preferred_element_type=np.dtype(jnp.bfloat16),
            precision=None,
            implementation="cuda",
            tile=TILE,
        )
        program = h200.compile(
            product,
            *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 2048), (8, 2048, 2048))),
            *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((8,), (1,))),
        )
        assert program.kernels == {"ragged_noncontracting": 1}
        assert program.opcodes <= FREE
        workspace = sums_bytes(TILE.tile_m, TILE.tile_n, H200.multiprocessors)
        assert workspace <= program.temporary_bytes <= workspace + 2 * ALIGNMENT
        assert 'kind = "stream_k"' in program.calls[0].text


class TestPrediction:
    def test_waves(self):
        waves = partial(stream_k_waves, clusters=66)
        assert waves(66, 100) == 1 and waves(132, 100) == 2
        assert waves(67, 100) == 1.25 and waves(17, 100) == pytest.approx(0.34)
        # 20 steps are too short to be worth cutting, and 60 units nearly fill the last wave.
        assert waves(67, 20) == 2 and waves(66 + 60, 100) == 2
