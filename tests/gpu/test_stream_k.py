"""The kernel that cuts its last wave of tiles along K, and its exchange of partial sums."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.plan import TileConfig
from jax_grouped_gemm._src.ragged import call as ragged_call
from jax_grouped_gemm._src.ragged import primitive
from jax_grouped_gemm._src.ragged.problem import sums_bytes
from jax_grouped_gemm._src.ragged.tiles import NARROW_STREAM_K_TILE, STREAM_K_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F16, F32
from tests.support.ops import NONCONTRACTING, random, swap

TILE = STREAM_K_TILE
UNIT = 256  # rows that a cluster computes at a time
CLUSTERS = H200.multiprocessors // TILE.cluster
# Most group sizes give less than one wave, all of which is cut.
M, K, N, G = 1500, 3400, 776, 6


@pytest.fixture(params=[STREAM_K_TILE, NARROW_STREAM_K_TILE], ids=str)
def tile(request) -> TileConfig:
    """The tiles of kernels that cut their last wave."""
    return request.param


def product(lhs, rhs, sizes, offset=None, *, transpose_rhs=False, out_dtype=None, tile=TILE):
    return primitive.ragged_noncontracting(
        lhs,
        rhs,
        sizes,
        np.zeros(1, np.int32) if offset is None else offset,
        transpose_lhs=False,
        transpose_rhs=transpose_rhs,
        preferred_element_type=np.dtype(out_dtype or lhs.dtype),
        precision=None,
        implementation="cuda",
        tile=tile,
    )


jitted = jax.jit(product, static_argnames=("transpose_rhs", "out_dtype", "tile"))


@partial(jax.jit, static_argnames="tile", donate_argnums=4, keep_unused=True)
def with_workspace(lhs, rhs, sizes, offset, memory, tile):
    """Returns the result and the workspace, which takes over the bytes of the donated `memory`."""
    call = jax.ffi.ffi_call(
        ragged_call.NONCONTRACTING_TARGET,
        [
            jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[-1]), lhs.dtype),
            jax.ShapeDtypeStruct(memory.shape, memory.dtype),
        ],
    )
    attributes = {name: np.int32(size) for name, size in tile.sizes().items()}
    attributes |= dict(kind="stream_k", zeroes_unowned=True)
    majors = dict(transpose_lhs=False, transpose_rhs=False)
    return call(lhs, rhs, sizes, offset, terms=np.int32(0), **attributes, **majors)


def operands(rng, m=M, k=K, n=N, g=G, dtype=BF16):
    lhs, rhs, _ = NONCONTRACTING.shapes(m, k, n, g)
    return random(rng, lhs, dtype), random(rng, rhs, dtype)


def is_cut(schedules, sizes, local_groups, m, k, n, tile) -> bool:
    """Returns whether the kernel hands sums over on a device with the processors of an H200."""
    pieces = schedules.ragged_noncontracting_pieces(
        np.ascontiguousarray(np.atleast_2d(sizes), np.int32),
        np.zeros(1, np.int32),
        batches=1,
        local_groups=local_groups,
        m=m,
        k=k,
        n=n,
        clusters=CLUSTERS,
        **tile.sizes(),
    )
    partials = pieces[:, 12]
    return bool((partials < 0).any())


def cut_sizes(schedules, rng, count: int, tile=TILE) -> list[np.ndarray]:
    """Returns group sizes of `M` rows for which the last wave is cut."""
    lists = (sizes_of.any_kind(rng, M, G) for _ in range(1000))
    cut = (s for s in lists if is_cut(schedules, s, G, M, K, N, tile))
    return list(itertools.islice(cut, count))


# A unit of the last wave has 4, 3, 2, 3/2 or 4/3 clusters, or is not cut. These numbers of units
# are the limits between the cases.
UNITS = [1, 2, 16, 17, 22, 23, 33, 34, 44, 45, 49, 50, 65, 66, 67, 83]


@pytest.mark.parametrize("units", UNITS)
def test_number_of_units(units, tile, schedules, rng):
    m, k, n = UNIT, 4160, tile.tile_n * units
    lhs, rhs = operands(rng, m, k, n, 1)
    sizes = np.array([m], np.int32)
    assert is_cut(schedules, sizes, 1, m, k, n, tile) == (units % CLUSTERS not in (0, 50, 65))
    out = jitted(lhs, rhs, sizes, tile=tile)
    oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes))


@pytest.mark.parametrize(
    "n, tile",
    [(N, TILE), (2600, TILE), (72, NARROW_STREAM_K_TILE), (1300, NARROW_STREAM_K_TILE)],
    ids=str,
)
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("dtype, out_dtype", [(BF16, None), (BF16, F32), (F16, None), (F16, F32)])
def test_any_group_sizes(dtype, out_dtype, transpose_rhs, n, tile, schedules, rng):
    """Tiles are cut in the first wave and in later waves."""
    lhs, rhs = operands(rng, n=n, dtype=dtype)
    stored = swap(rhs, transpose_rhs)
    num_cut = 0
    for _ in range(12):
        sizes = sizes_of.any_kind(rng, M, G)
        num_cut += is_cut(schedules, sizes, G, M, K, n, tile)
        options = dict(transpose_rhs=transpose_rhs, out_dtype=out_dtype, tile=tile)
        out = jitted(lhs, stored, sizes, **options)
        assert out.dtype == (out_dtype or dtype)
        oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes))
    assert num_cut > 0


@pytest.mark.parametrize("k", [8, 64, 1408, 1416, 2048, 8200, 60000])
def test_contracted_dimension(k, tile, rng):
    """K ranges from one step, which is not cut, to very many. Some K are not whole steps."""
    lhs, rhs = operands(rng, 700, k, 520, 3)
    for sizes in (sizes_of.multinomial(rng, 700, 3), sizes_of.tile_edges(rng, 700, 3)):
        out = jitted(lhs, rhs, sizes, tile=tile)
        oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes))


@pytest.mark.parametrize("m, n", [(1, 8), (63, 264), (64, 256), (65, 520), (129, 264), (385, 776)])
def test_tiles_that_are_not_full(m, n, tile, rng):
    """Consumers without rows hand nothing over. A cluster may have a tile past the last column."""
    lhs, rhs = operands(rng, m, 4096, n, 2)
    for sizes in ([m, 0], [m // 2, m - m // 2], [m // 3, m // 3]):
        sizes = np.array(sizes, np.int32)
        out = jitted(lhs, rhs, sizes, tile=tile)
        oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes))


def test_group_offset(tile, rng):
    """Unowned rows have their own tiles, and become zero."""
    local, groups = 3, 9
    lhs, rhs = operands(rng, g=local)
    for offset in range(-local - 1, groups + 2):
        sizes = sizes_of.multinomial(rng, M - int(rng.integers(0, 700)), groups)
        out = jitted(lhs, rhs, sizes, np.array([offset], np.int32), tile=tile)
        oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes, offset))


def test_batches(rng):
    batch = 3
    lhs = random(rng, (batch, 600, K), BF16)
    rhs = random(rng, (batch, 4, K, 520), BF16)
    for _ in range(5):
        sizes = np.stack([sizes_of.any_kind(rng, 600, 4) for _ in range(batch)])
        out = jax.jit(jax.vmap(product))(lhs, rhs, sizes)
        oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes))


def test_neighbours_do_not_leak(tile, rng):
    """NaN in the tail or in one group reaches no other result, not even through exchanged sums."""
    lhs, rhs = operands(rng)
    sizes = np.array([300, 200, 1, 500, 0, 300], np.int32)
    run = partial(jitted, tile=tile)
    clean = np.asarray(run(lhs, rhs, sizes))
    poisoned = lhs.copy()
    poisoned[sizes.sum() :] = np.nan
    np.testing.assert_array_equal(run(poisoned, rhs, sizes), clean)
    poisoned[300:500] = np.inf
    out = np.asarray(run(poisoned, rhs, sizes))
    assert not np.isfinite(out[300:500].astype(np.float32)).any()
    np.testing.assert_array_equal(
        np.delete(out, np.s_[300:500], 0), np.delete(clean, np.s_[300:500], 0)
    )


def test_same_inputs_give_the_same_bits(tile, schedules, rng):
    lhs, rhs = (jnp.asarray(x) for x in operands(rng))
    for sizes in cut_sizes(schedules, rng, 4, tile):
        first = np.asarray(jitted(lhs, rhs, sizes, tile=tile)).tobytes()
        for result in [jitted(lhs, rhs, sizes, tile=tile) for _ in range(50)]:
            assert np.asarray(result).tobytes() == first


class TestWorkspace:
    """The workspace may hold anything when a launch begins, even sums of the launch before."""

    def memory(self, rng, tile, kind: str) -> np.ndarray:
        blocks = H200.multiprocessors
        # A block that reads these stale sums gets NaN.
        memory = np.full(sums_bytes(tile.tile_m, tile.tile_n, blocks), 255, np.uint8)
        hints = memory[4 * tile.tile_m * tile.tile_n * blocks :].view(np.uint32)
        hints[:] = {
            "ones": 2**32 - 1,
            "zeros": 0,
            "random": rng.integers(0, 2**32, hints.size, dtype=np.uint32),
            "every entry of the table": rng.integers(0, 2**16, hints.size, dtype=np.uint32),
        }[kind]
        return memory

    @pytest.mark.parametrize("kind", ["ones", "zeros", "random", "every entry of the table"])
    def test_poisoned(self, kind, tile, schedules, rng):
        lhs, rhs = operands(rng)
        offset = np.zeros(1, np.int32)
        for sizes in cut_sizes(schedules, rng, 5, tile):
            memory = jnp.asarray(self.memory(rng, tile, kind))
            address = memory.unsafe_buffer_pointer()
            out, workspace = with_workspace(lhs, rhs, sizes, offset, memory, tile)
            assert workspace.unsafe_buffer_pointer() == address
            oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes))

    def test_of_the_launch_before(self, tile, schedules, rng):
        """The workspace holds the previous launch's sums and hints, which are of other operands."""
        memory = jnp.asarray(self.memory(rng, tile, "ones"))
        lists = cut_sizes(schedules, rng, 3, tile)
        offset, results = np.zeros(1, np.int32), []
        inputs = [operands(rng) for _ in range(3)]
        on_device = [tuple(map(jnp.asarray, pair)) for pair in inputs]
        order = [(i, j) for _ in range(10) for i in range(3) for j in range(3)]
        address = memory.unsafe_buffer_pointer()
        for i, j in order:
            out, memory = with_workspace(*on_device[i], lists[j], offset, memory, tile)
            assert memory.unsafe_buffer_pointer() == address
            results.append(out)
        exact = {(i, j): oracle.ragged_noncontracting(*inputs[i], lists[j]) for i, j in order[:9]}
        for key, out in zip(order, results, strict=True):
            oracle.check(out, exact[key])

    def test_a_small_one_makes_a_small_grid(self, tile, rng):
        """The kernel runs on as many clusters as the workspace has room for."""
        lhs, rhs = operands(rng)
        sizes = sizes_of.multinomial(rng, M, G)
        exact = oracle.ragged_noncontracting(lhs, rhs, sizes)
        for clusters in (1, 2, 7, 40):
            blocks = clusters * tile.cluster
            memory = jnp.full(sums_bytes(tile.tile_m, tile.tile_n, blocks), 255, jnp.uint8)
            out, _ = with_workspace(lhs, rhs, sizes, np.zeros(1, np.int32), memory, tile)
            oracle.check(out, exact)

    def test_too_small_for_a_cluster(self, tile, rng):
        lhs, rhs = operands(rng)
        with pytest.raises(Exception, match="partial sums of one cluster take"):
            sizes, offset = np.full(G, 9, np.int32), np.zeros(1, np.int32)
            memory = jnp.zeros(16, jnp.uint8)
            out, _ = with_workspace(lhs, rhs, sizes, offset, memory, tile)
            out.block_until_ready()


class TestCommandBuffers:
    """Replays of a CUDA graph launch with the same parameters and workspace every time."""

    @staticmethod
    def chain(lhs, rhs, table, index):
        sizes = jax.lax.dynamic_index_in_dim(table, index, keepdims=False)
        return [
            product(lhs * jnp.asarray(scale, lhs.dtype), rhs, sizes)
            for scale in (1.0, 2.0, 0.5, 4.0)
        ]

    @pytest.mark.parametrize("options", [{}, {"xla_gpu_graph_min_graph_size": 1}])
    def test_replays(self, options, schedules, rng, tmp_path):
        lhs, rhs = operands(rng)
        table = np.stack(cut_sizes(schedules, rng, 6))
        options = {**options, "xla_dump_to": str(tmp_path)}
        program = jax.jit(self.chain).lower(lhs, rhs, table, 0).compile(compiler_options=options)
        thunks = [path.read_text() for path in tmp_path.glob("*thunk*")]
        assert any("kCommandBuffer" in text for text in thunks), "XLA recorded nothing"
        inputs = [jnp.asarray(a) for a in (lhs, rhs, table)]
        order = [i % len(table) for i in range(40)]
        results = [program(*inputs, jnp.int32(i)) for i in order]
        exact = [
            [oracle.ragged_noncontracting(scale * lhs, rhs, sizes) for scale in (1, 2, 0.5, 4)]
            for sizes in table
        ]
        for i, result in zip(order, results, strict=True):
            oracle.check_all(result, exact[i])


class TestConcurrency:
    """Launches that run at the same time share the table of announcements, but no workspace."""

    @pytest.mark.parametrize("m", [200, M])
    def test_branches_of_a_graph(self, m, rng):
        """Small products run at the same time, and large ones overlap where they begin and end."""
        branches = 6
        lhs = random(rng, (m, K), BF16)
        rhs = [random(rng, (G, K, N), BF16) for _ in range(branches)]
        tables = np.array(
            [[sizes_of.any_kind(rng, m, G) for _ in range(branches)] for _ in range(5)]
        )

        def independent(lhs, rhs, tables):
            return [product(lhs, x, sizes) for x, sizes in zip(rhs, tables, strict=True)]

        options = {
            "xla_gpu_graph_min_graph_size": 1,
            "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
        }
        inputs = jnp.asarray(lhs), [jnp.asarray(x) for x in rhs]
        sizes = [[jnp.asarray(x) for x in table] for table in tables]
        program = jax.jit(independent).lower(*inputs, sizes[0]).compile(compiler_options=options)
        order = [i % len(tables) for i in range(30)]
        results = [program(*inputs, sizes[i]) for i in order]
        exact = [
            [oracle.ragged_noncontracting(lhs, rhs[i], table[i]) for i in range(branches)]
            for table in tables
        ]
        for i, result in zip(order, results, strict=True):
            oracle.check_all(result, exact[i])
