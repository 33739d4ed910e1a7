"""A layer over several devices has the results and gradients of one device, bit for bit.

Operands are small integers, so that sums are exact in any order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import expert_parallel as ep
from tests.support.expert_parallel import D, E, K, T, operands, routing

SPLIT = P("expert")
OF_EXPERTS = (SPLIT,) * 3


def mesh_of(**axes) -> Mesh:
    shape = tuple(axes.values())
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(shape))


def parallel(mesh, num_experts=E, tokens=SPLIT, matrices=OF_EXPERTS, stats=None, **options):
    """Returns (x, experts, weights, *matrices) -> y, which appends statistics to `stats`."""
    options = dict(expert_axis="expert", activation="relu") | options

    def on_device(x, experts, weights, *matrices):
        y, of_call = moe.expert_parallel_mlp(
            x, routing(experts, weights, num_experts), *matrices, **options
        )
        return y if stats is None else (y, of_call)

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, *matrices),
        out_specs=tokens if stats is None else (tokens, P()),
    )

    def run(*operands):
        if stats is None:
            return mapped(*operands)
        y, of_call = mapped(*operands)
        jax.debug.callback(stats.append, of_call)
        return y

    return run


@functools.cache
def parallel_with_gradients(mesh, num_experts, options: tuple):
    """Returns one function for equal options, so that tests with equal shapes compile it once."""
    return ep.with_gradients(parallel(mesh, num_experts, **dict(options)))


def check(mesh, given, rng, **options):
    """Asserts that the layer over `mesh` has the results and gradients of one device."""
    cotangent = jnp.asarray(rng.integers(-2, 3, given[0].shape), jnp.float32)
    num_experts = given[3].shape[0]
    expected = ep.one_device_with_gradients(num_experts)(cotangent, *given)
    run = parallel_with_gradients(mesh, num_experts, tuple(options.items()))
    ep.assert_equal(run(cotangent, *given), expected)


FP8 = dict(recipe=jgg.Recipe(), activation="silu")
fp8_of_one_device = ep.with_gradients(ep.one_device(**FP8))


def title(options) -> str:
    """Names a test by its options; functions appear by name."""
    given = (f"{name}={getattr(x, '__name__', x)}" for name, x in options.items())
    return ", ".join(given) or "default"


OPTIONS = [
    dict(),
    dict(strategy="all_gather", combine="ppermute", overlap=True),  # "auto" would exchange rows
    dict(combine="all_to_all"),
    dict(save="rows"),
    dict(save="nothing"),
    dict(chunks=3),
    dict(chunks=2, combine="all_to_all", save="nothing"),
    dict(strategy="all_gather", chunks=2, combine="ppermute", save="nothing"),
    dict(strategy="all_gather", overlap=True, save="rows", max_sms=8),
    dict(implementation=jax.lax.ragged_dot),
    dict(strategy="ragged_all_to_all"),
    dict(strategy="ragged_all_to_all", chunks=2, save="nothing"),
]
RING, EXCHANGE = OPTIONS[1], OPTIONS[-2]
STRATEGIES = pytest.mark.parametrize("strategy", ["all_gather", "ragged_all_to_all"])


class TestIsTheLayerOfOneDevice:
    @pytest.mark.parametrize(
        "devices, options",
        [(1, {}), (8, {}), (1, RING), (2, RING), (1, EXCHANGE), (2, EXCHANGE)],
        ids=str,
    )
    def test_devices(self, devices, options, rng):
        check(mesh_of(expert=devices), operands(rng), rng, **options)

    @pytest.mark.parametrize("options", OPTIONS, ids=title)
    def test_options(self, options, rng):
        check(mesh_of(expert=4), operands(rng), rng, **options)

    @pytest.mark.parametrize("top_k", [1, E])
    def test_choices(self, top_k, rng):
        check(mesh_of(expert=4), operands(rng, top_k=top_k), rng)

    @pytest.mark.parametrize(
        "bias",
        [[9, 8, *[0] * 6], [0, 0, 9, 9, 0, 0, 0, 0], [-9] * 4 + [0] * 4],
        ids=["first device", "one device", "empty devices"],
    )
    @pytest.mark.parametrize("options", [dict(), dict(chunks=3), EXCHANGE], ids=title)
    def test_skew(self, bias, options, rng):
        check(mesh_of(expert=4), operands(rng, bias=bias), rng, **options)

    def test_no_tokens(self, rng):
        check(mesh_of(expert=4), operands(rng, tokens=0), rng)

    def test_experts_without_a_gate(self, rng):
        x, experts, weights, wi_0, _, wo = operands(rng)

        def one(x, wi_0, wo):
            chosen = routing(experts, weights)
            return moe.dropless_mlp(x, chosen, wi_0, None, wo, activation="relu")

        def on_device(x, experts, weights, wi_0, wo):
            chosen = routing(experts, weights)
            return moe.expert_parallel_mlp(
                x, chosen, wi_0, None, wo, expert_axis="expert", activation="relu"
            )[0]

        many = jax.shard_map(
            on_device, mesh=mesh_of(expert=4), in_specs=(SPLIT,) * 5, out_specs=SPLIT
        )
        got = jax.jit(many)(x, experts, weights, wi_0, wo)
        np.testing.assert_array_equal(got, jax.jit(one)(x, wi_0, wo))


class TestMeshes:
    """Layers over meshes of several axes."""

    def test_data_axis(self, rng):
        tokens = P(("data", "expert"))
        check(mesh_of(data=2, expert=2), operands(rng), rng, tokens=tokens)

    def test_experts_along_two_axes(self, rng):
        axes, both = ("a", "b"), P(("a", "b"))
        options = dict(strategy="all_gather", expert_axis=axes, tokens=both, matrices=(both,) * 3)
        for combine in ("all_to_all", "ppermute"):
            check(mesh_of(a=2, b=2), operands(rng), rng, combine=combine, **options)

    @pytest.mark.parametrize(
        "tokens, combine", [(SPLIT, "ppermute"), (P(("expert", "tensor")), "all_to_all")]
    )
    def test_tensor_axis(self, tokens, combine, rng):
        """Tokens may be the same on all devices along the tensor axis, or be divided among them."""
        wi, wo = P("expert", None, "tensor"), P("expert", "tensor")
        options = dict(tensor_axis="tensor", matrices=(wi, wi, wo), tokens=tokens, combine=combine)
        check(mesh_of(expert=2, tensor=2), operands(rng), rng, **options)

    def test_tokens_that_are_the_same_everywhere(self, rng):
        check(mesh_of(expert=4), operands(rng), rng, tokens=P())

    def test_data_expert_and_tensor(self, rng):
        wi, wo = P("expert", None, "tensor"), P("expert", "tensor")
        options = dict(tensor_axis="tensor", matrices=(wi, wi, wo))
        mesh = mesh_of(data=2, expert=2, tensor=2)
        check(mesh, operands(rng), rng, tokens=P(("data", "expert")), **options)

    def test_biases_are_added_once(self, rng):
        x, experts, weights, wi_0, wi_1, wo = operands(rng)
        biases = [
            jnp.asarray(rng.integers(-2, 3, matrices.shape[::2]), jnp.float32)
            for matrices in (wi_0, wi_1, wo)
        ]
        of_one = ep.one_device(biases=tuple(biases))
        expected = jax.jit(of_one)(x, experts, weights, wi_0, wi_1, wo)

        def on_device(x, experts, weights, matrices, biases):
            return moe.expert_parallel_mlp(
                x,
                routing(experts, weights),
                *matrices,
                biases=biases,
                expert_axis="expert",
                tensor_axis="tensor",
                activation="relu",
            )[0]

        wi, wo_spec = P("expert", None, "tensor"), P("expert", "tensor")
        split, narrow = P("expert"), P("expert", "tensor")
        many = jax.shard_map(
            on_device,
            mesh=mesh_of(expert=2, tensor=2),
            in_specs=(split, split, split, (wi, wi, wo_spec), (narrow, narrow, split)),
            out_specs=split,
        )
        got = jax.jit(many)(x, experts, weights, (wi_0, wi_1, wo), tuple(biases))
        np.testing.assert_array_equal(got, expected)


class TestOptions:
    def test_unchecked_shard_map(self, rng):
        """Types name no axes with check_vma=False, so the layer assumes that tokens are split."""
        given = operands(rng)

        def on_device(x, experts, weights, *matrices):
            chosen = routing(experts, weights)
            options = dict(expert_axis="expert", activation="relu")
            return moe.expert_parallel_mlp(x, chosen, *matrices, **options)[0]

        mapped = jax.shard_map(
            on_device,
            mesh=mesh_of(expert=4),
            in_specs=(SPLIT,) * 6,
            out_specs=SPLIT,
            check_vma=False,
        )
        expected = ep.layer_of_one_device(*given)
        np.testing.assert_array_equal(jax.jit(mapped)(*given), expected)

    def test_router_weights_on_either_side(self, rng):
        """Router weights multiply the rows of x here, and the results in all other tests."""
        given, options = operands(rng), dict(apply_router_weight_on_input=True)
        cotangent = jnp.asarray(rng.integers(-2, 3, (T, D)), jnp.float32)
        layers = ep.one_device(**options), parallel(mesh_of(expert=4), **options)
        ep.assert_equal(*(ep.with_gradients(layer)(cotangent, *given) for layer in layers))

    @STRATEGIES
    def test_fp8(self, strategy, rng):
        """FP8 results are only close to one device's: some scales depend on other rows there."""
        given = [
            x if x.dtype == jnp.int32 else x.astype(jnp.bfloat16)
            for x in operands(rng, embed=128, hidden=128)
        ]
        cotangent = jnp.asarray(rng.standard_normal((T, 128)), jnp.bfloat16)
        layer = parallel(mesh_of(expert=2), strategy=strategy, **FP8)
        results = (f(cotangent, *given) for f in (ep.with_gradients(layer), fp8_of_one_device))
        for x, y in zip(*results, strict=True):
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            assert np.linalg.norm(x - y) < 0.06 * np.linalg.norm(y)

    def test_stats(self, rng):
        given = operands(rng, bias=[3, 0, 0, 0, 0, 0, 0, 0])
        stats = []
        jax.jit(parallel(mesh_of(expert=4), stats=stats))(*given)
        jax.effects_barrier()
        rows = np.bincount(np.asarray(given[1]).reshape(-1) // (E // 4), minlength=4)
        np.testing.assert_array_equal(stats[0].rows_per_device, rows)
        np.testing.assert_allclose(stats[0].max_over_mean, rows.max() / rows.mean(), rtol=1e-6)
        assert stats[0].overflow == 0

    @pytest.mark.parametrize("chunks", [1, 2])
    @STRATEGIES
    def test_a_buffer_that_is_too_small_drops_and_counts(self, strategy, chunks, rng):
        """Rows that do not fit are dropped and counted. Half of a balanced device's rows fit."""
        given = operands(rng, bias=[9, 8, 0, 0, 0, 0, 0, 0])
        mesh, stats = mesh_of(expert=4), []
        options = dict(buffer_factor=0.5, stats=stats, chunks=chunks, strategy=strategy)
        got = jax.jit(parallel(mesh, **options))(*given)
        jax.effects_barrier()
        # All tokens choose experts of the first device, which has room for an eighth of the rows.
        assert stats[0].overflow == T * K - T * K // 8
        assert stats[0].rows_per_device.tolist() == [T * K, 0, 0, 0]
        # Rows are sorted by expert and then by token, and the first rows of every chunk are kept.
        experts, weights = (np.array(a) for a in given[1:3])
        of_chunk = np.arange(T).reshape(4, chunks, -1)  # tokens by device and chunk
        for chunk in range(chunks):
            tokens = of_chunk[:, chunk].reshape(-1)
            kept = tokens[: T * K // 8 // chunks]
            dropped = np.setdiff1d(tokens, kept)
            weights[dropped] = 0
            weights[kept] *= experts[kept] == 0
        x, _, _, *matrices = given
        expected = ep.layer_of_one_device(x, experts, jnp.asarray(weights), *matrices)
        np.testing.assert_array_equal(got, expected)

    def test_a_buffer_that_is_large_enough_drops_nothing(self, rng):
        given, stats = operands(rng), []
        options = dict(buffer_factor=4, stats=stats)
        got = jax.jit(parallel(mesh_of(expert=4), **options))(*given)
        jax.effects_barrier()
        assert stats[0].overflow == 0
        np.testing.assert_array_equal(got, ep.layer_of_one_device(*given))


class TestTransformations:
    @STRATEGIES
    def test_vmap(self, strategy, rng):
        several = [operands(rng) for _ in range(3)]
        x, experts, weights = (jnp.stack([g[i] for g in several]) for i in range(3))
        matrices = several[0][3:]
        in_axes = (0, 0, 0, None, None, None)
        got = jax.jit(jax.vmap(parallel(mesh_of(expert=4), strategy=strategy), in_axes))(
            x, experts, weights, *matrices
        )
        for i in range(3):
            expected = ep.layer_of_one_device(x[i], experts[i], weights[i], *matrices)
            np.testing.assert_array_equal(got[i], expected)

    def test_scan_over_rematerialised_layers(self, rng):
        x, experts, weights, *matrices = operands(rng)
        stacked = [jnp.stack([m, m[::-1]]) for m in matrices]

        def layers(layer, x, weights, stacked):
            def body(x, matrices):
                return jnp.sign(layer(x, experts, weights, *matrices)) + x, None

            return jax.lax.scan(jax.checkpoint(body), x, stacked)[0].sum()

        def gradients(layer):
            def loss(x, weights, stacked):
                return layers(layer, x, weights, stacked)

            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, weights, stacked)

        got, expected = gradients(parallel(mesh_of(expert=4))), gradients(ep.one_device())
        jax.tree.map(np.testing.assert_array_equal, got, expected)

    def test_forward_mode(self, rng):
        x, experts, weights, *matrices = operands(rng)
        tangents = operands(rng)

        def tangent(layer):
            def of(x, weights, *matrices):
                return layer(x, experts, weights, *matrices)

            primals = (x, weights, *matrices)
            return jax.jit(lambda *p: jax.jvp(of, p, (tangents[0], *tangents[2:])))(*primals)

        got, expected = tangent(parallel(mesh_of(expert=4))), tangent(ep.one_device())
        jax.tree.map(np.testing.assert_array_equal, got, expected)

    def test_export(self, rng):
        given = operands(rng)
        exported = jax.export.export(jax.jit(parallel(mesh_of(expert=4))))(*given)
        again = jax.export.deserialize(exported.serialize())
        expected = ep.layer_of_one_device(*given)
        mesh = mesh_of(expert=4)
        whole = [jax.device_put(a, jax.NamedSharding(mesh, P())) for a in given]
        np.testing.assert_array_equal(jax.jit(again.call)(*whole), expected)


class TestProcesses:
    """One program runs on devices that belong to several processes."""

    def test_result_and_gradients(self):
        ep.check_processes(2, "cpu", ["all_gather", "ragged_all_to_all"], devices_each=2)


class TestMistakes:
    def run(self, rng, mesh=None, experts=E, **options):
        given = operands(rng, experts=experts)
        return jax.jit(parallel(mesh or mesh_of(expert=4), experts, **options))(*given)

    def test_experts_are_divided_evenly(self, rng):
        given = operands(rng)
        with pytest.raises(TypeError, match=r"4 devices along expert hold 2 .* router has 9"):
            jax.jit(parallel(mesh_of(expert=4), num_experts=9))(*given)

    def test_axes(self, rng):
        with pytest.raises(ValueError, match=r"'model' is no mesh axis here.*expert_parallel\("):
            self.run(rng, expert_axis="model")
        with pytest.raises(ValueError, match="different mesh axes, got 'expert' and 'expert'"):
            self.run(rng, tensor_axis="expert")
        with pytest.raises(TypeError, match="expert_axis.*got 3"):
            self.run(rng, expert_axis=3)
        with pytest.raises(ValueError, match="at least one"):
            self.run(rng, expert_axis=())

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("chunks", 0),
            ("chunks", 5),
            ("buffer_factor", 0),
            ("buffer_factor", "all"),
            ("combine", "psum_scatter"),
            ("save", "y"),
            ("max_sms", 0),
        ],
    )
    def test_options(self, option, value, rng):
        with pytest.raises(ValueError, match=f"{option}.*got {value!r}"):
            self.run(rng, **{option: value})

    def test_chunks_beside_each_other(self, rng):
        with pytest.raises(ValueError, match="overlap must be False or 'auto' with chunks=2"):
            self.run(rng, chunks=2, overlap=True)
