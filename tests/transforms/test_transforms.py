"""The ops under JAX's program transformations: jit, scan, remat, shard_map, export."""

import copy
import pickle
from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.ops import BOTH_OPS, CONTRACTING, NONCONTRACTING, random

pytestmark = pytest.mark.usefixtures("either_form")

M, K, N, G = 32, 12, 16, 8
SIZES = np.array([3, 0, 7, 1, 0, 9, 2, 4], np.int32)  # 26 of 32 rows


def operands(op, rng):
    return [random(rng, shape, np.float32) for shape in op.shapes(M, K, N, G)]


def close(actual, want):
    """Compares up to a different order of float32 additions."""
    np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-5)


class TestJit:
    @pytest.mark.parametrize("differentiate", [False, True])
    def test_new_group_sizes_and_offsets_do_not_trace_again(self, differentiate, rng):
        traces = 0

        def total(lhs, rhs, sizes, offset):
            nonlocal traces
            traces += 1
            return jgg.ragged_dot(lhs, rhs, sizes, group_offset=offset).sum()

        step = jax.jit(jax.grad(total, (0, 1)) if differentiate else total)
        lhs, rhs, _ = operands(NONCONTRACTING, rng)
        for offset in range(4):
            step(lhs, rhs[:4], sizes_of.multinomial(rng, M, G), offset)
        assert traces == 1

    @BOTH_OPS
    def test_eager_calls_compile_once(self, op, rng):
        compilations = []
        lhs, rhs, _ = operands(op, rng)

        def call():
            op.call.__wrapped__(lhs, rhs, sizes_of.multinomial(rng, M, G)).block_until_ready()

        def listen(event, duration, **_):
            if event == "/jax/core/compile/backend_compile_duration":
                compilations.append(event)

        jax.clear_caches()
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            call()
            first = len(compilations)
            call()
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert 0 < first == len(compilations)

    def test_public_functions_can_be_pickled_and_copied(self, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng)
        function = partial(jgg.ragged_dot, implementation="xla")
        for clone in (pickle.loads(pickle.dumps(function)), copy.deepcopy(function)):
            np.testing.assert_array_equal(clone(lhs, rhs, SIZES), function(lhs, rhs, SIZES))

    @BOTH_OPS
    def test_traced_programs_can_be_cached_by_their_parameters(self, op, rng):
        """Equal calls trace to equal equations with hashable parameters."""
        lhs, rhs, _ = operands(op, rng)

        def parameters(**options):
            jaxpr = jax.make_jaxpr(partial(op.call.__wrapped__, **options))(lhs, rhs, SIZES)
            (eqn,) = ragged_eqns(jaxpr.jaxpr)
            return eqn.primitive, tuple(sorted(eqn.params.items()))

        assert hash(parameters()) == hash(parameters()) and parameters() == parameters()
        assert parameters() != parameters(implementation="xla")
        assert parameters() != parameters(preferred_element_type=jnp.bfloat16)


def ragged_eqns(jaxpr) -> list:
    """Returns the equations of ragged matmuls in a jaxpr and in the jaxprs nested in it."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("ragged_"):
            found.append(eqn)
        found += [
            e for inner in jax.extend.core.jaxprs_in_params(eqn.params) for e in ragged_eqns(inner)
        ]
    return found


class TestScan:
    def layers(self, rng):
        x, weights = random(rng, (M, K), np.float32), random(rng, (3, G, K, K), np.float32)
        return (
            x,
            weights / np.sqrt(K),
            np.stack([sizes_of.multinomial(rng, M, G) for _ in range(3)]),
        )

    @staticmethod
    def by_scan(x, weights, sizes):
        def layer(x, parameters):
            return jnp.tanh(jgg.ragged_dot(x, *parameters)), None

        return jax.lax.scan(layer, x, (weights, sizes))[0]

    @staticmethod
    def by_loop(x, weights, sizes):
        for w, s in zip(weights, sizes, strict=True):
            x = jnp.tanh(jgg.ragged_dot(x, w, s))
        return x

    def test_forward(self, rng):
        x, weights, sizes = self.layers(rng)
        got = jax.jit(self.by_scan)(x, weights, sizes)
        for w, s in zip(weights, sizes, strict=True):
            x = np.tanh(oracle.ragged_noncontracting(x, w, s).value)
        close(got, x)

    def test_gradients_of_both_orders(self, rng):
        x, weights, sizes = self.layers(rng)
        direction = [random(rng, a.shape, np.float32) for a in (x, weights)]

        def derivatives(function):
            gradient = jax.grad(lambda x, w: jnp.sum(function(x, w, sizes) ** 2), (0, 1))
            return jax.jit(lambda: jax.jvp(gradient, (x, weights), tuple(direction)))()

        got, want = derivatives(self.by_scan), derivatives(self.by_loop)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


class TestRemat:
    @staticmethod
    def mlp(x, w1, w2):
        hidden = jnp.tanh(jgg.ragged_dot(x, w1, jnp.array(SIZES)))
        return jnp.sum(jnp.tanh(jgg.ragged_dot(hidden, w2, jnp.array(SIZES))) ** 2)

    def weights(self, rng):
        shapes = (M, K), (G, K, N), (G, N, K)
        return [random(rng, shape, np.float32) for shape in shapes]

    def matmuls(self, function, arguments) -> int:
        gradient = jax.grad(function, (0, 1, 2))
        return len(ragged_eqns(jax.make_jaxpr(gradient)(*arguments).jaxpr))

    def test_policy_keeps_our_results_and_plain_remat_does_not(self, rng):
        arguments = self.weights(rng)
        policy = jgg.checkpoint_policies.grouped_matmuls_saveable
        without = self.matmuls(self.mlp, arguments)
        assert without == 6  # two forward, and two cotangents for each of them
        assert self.matmuls(jax.checkpoint(self.mlp, policy=policy), arguments) == without
        assert self.matmuls(jax.checkpoint(self.mlp), arguments) > without

    def test_gradients_are_the_same(self, rng):
        arguments = self.weights(rng)
        policy = jgg.checkpoint_policies.grouped_matmuls_saveable

        @jax.jit
        def gradients(*arguments):
            functions = jax.checkpoint(self.mlp, policy=policy), self.mlp
            return [jax.grad(function, (0, 1, 2))(*arguments) for function in functions]

        jax.tree.map(close, *gradients(*arguments))


def sharded_by_n(lhs, rhs, sizes):
    return jgg.ragged_dot(lhs, rhs, sizes)


def sharded_by_k(lhs, rhs, sizes):
    return jax.lax.psum(jgg.ragged_dot(lhs, rhs, sizes), "x")


def sharded_by_group(lhs, rhs, sizes):
    first = jax.lax.axis_index("x") * rhs.shape[0]
    return jax.lax.psum(jgg.ragged_dot(lhs, rhs, sizes, group_offset=first), "x")


def sizes_of_shard(rows, sizes):
    """Returns how many rows of each group are in this shard of lhs."""
    low = jax.lax.axis_index("x") * rows
    ends = jnp.cumsum(sizes)
    return jnp.clip(ends, low, low + rows) - jnp.clip(ends - sizes, low, low + rows)


def sharded_by_row(lhs, rhs, sizes):
    return jgg.ragged_dot(lhs, rhs, sizes_of_shard(len(lhs), sizes))


def contracting_sharded_by_row(lhs, rhs, sizes):
    local = sizes_of_shard(len(lhs), sizes)
    return jax.lax.psum(CONTRACTING.call.__wrapped__(lhs, rhs, local), "x")


def contracting_sharded_by_k(lhs, rhs, sizes):
    return CONTRACTING.call.__wrapped__(lhs, rhs, sizes)


SHARDINGS = {
    # function: op, lhs, rhs, result
    sharded_by_n: (NONCONTRACTING, P(), P(None, None, "x"), P(None, "x")),
    sharded_by_k: (NONCONTRACTING, P(None, "x"), P(None, "x"), P()),
    sharded_by_group: (NONCONTRACTING, P(), P("x"), P()),
    sharded_by_row: (NONCONTRACTING, P("x"), P(), P("x")),
    contracting_sharded_by_row: (CONTRACTING, P("x"), P("x"), P()),
    contracting_sharded_by_k: (CONTRACTING, P(None, "x"), P(), P(None, "x")),
}


class TestShardMap:
    """Each way of sharding over four devices, with check_vma, gives the results of one device."""

    @pytest.fixture
    def shard_map(self):
        devices = jax.devices("cpu")[:4]
        return partial(jax.shard_map, mesh=jax.sharding.Mesh(devices, ("x",)), check_vma=True)

    @pytest.mark.parametrize("function", SHARDINGS, ids=lambda f: f.__name__)
    def test_forward_and_gradients(self, function, shard_map, rng):
        op, lhs_spec, rhs_spec, out_spec = SHARDINGS[function]
        lhs, rhs, cotangent = operands(op, rng)
        sharded = shard_map(function, in_specs=(lhs_spec, rhs_spec, P()), out_specs=out_spec)

        @jax.jit
        def run(lhs, rhs, sizes, cotangent):
            out, vjp = jax.vjp(lambda lhs, rhs: sharded(lhs, rhs, sizes), lhs, rhs)
            return out, *vjp(cotangent)

        for sizes in (SIZES, sizes_of.zipf(rng, M, G), sizes_of.one_hot(M, G, 5)):
            got = run(lhs, rhs, sizes, cotangent)
            exact = op.exact(lhs, rhs, sizes), *op.exact_cotangents(lhs, rhs, sizes, cotangent)
            oracle.check_all(got, exact)

    def test_a_varying_result_is_not_taken_for_a_replicated_one(self, shard_map, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng)
        for specs in ((P(), P(None, None, "x"), P()), (P("x"), P(), P())):
            wrong = shard_map(jgg.ragged_dot, in_specs=specs, out_specs=P())
            with pytest.raises(ValueError, match="out_specs"):
                jax.eval_shape(wrong, lhs, rhs, SIZES)

    @pytest.mark.parametrize("sharding", ["rows", "groups"])
    def test_inside_scan(self, sharding, shard_map, rng):
        """The scan's carry must keep its varying axes through the forward and backward pass."""
        x, sizes = random(rng, (M, K), np.float32), SIZES
        weights = random(rng, (3, G, K, K), np.float32) / np.sqrt(K)
        matmul = {"rows": sharded_by_row, "groups": sharded_by_group}[sharding]

        def layers(matmul, x, weights):
            def layer(x, w):
                return jnp.tanh(matmul(x, w, jnp.array(sizes))), None

            return jax.lax.scan(layer, x, weights)[0]

        x_spec, w_spec = {"rows": (P("x"), P()), "groups": (P(), P(None, "x"))}[sharding]
        sharded = shard_map(partial(layers, matmul), in_specs=(x_spec, w_spec), out_specs=x_spec)

        def results(function):
            def loss(x, weights):
                out = function(x, weights)
                return jnp.sum(out**2), out

            return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, weights)

        jax.tree.map(close, results(sharded), results(partial(layers, jgg.ragged_dot)))


class TestExport:
    def exported(self, function, *arguments):
        return jax.export.export(
            jax.jit(function),
            platforms=("cuda", "cpu"),
            disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
        )(*arguments)

    @BOTH_OPS
    def test_round_trip(self, op, rng):
        lhs, rhs, cotangent = operands(op, rng)
        inputs = [jnp.asarray(a, jnp.bfloat16) for a in (lhs, rhs)]
        program = self.exported(op.call.__wrapped__, *inputs, SIZES)
        loaded = jax.export.deserialize(program.serialize(vjp_order=1))
        for sizes in (SIZES, sizes_of.zipf(rng, M, G)):
            oracle.check(loaded.call(*inputs, sizes), op.exact(*inputs, sizes))

    @BOTH_OPS
    def test_gradients_of_a_loaded_program(self, op, rng):
        lhs, rhs, cotangent = operands(op, rng)
        program = self.exported(op.call.__wrapped__, lhs, rhs, SIZES)
        loaded = jax.export.deserialize(program.serialize(vjp_order=1))
        _, vjp = jax.vjp(lambda lhs, rhs: loaded.call(lhs, rhs, SIZES), lhs, rhs)
        oracle.check_all(vjp(jnp.array(cotangent)), op.exact_cotangents(lhs, rhs, SIZES, cotangent))

    def test_the_cuda_program_calls_our_kernels(self, extension, rng):
        lhs, rhs, cotangent = (jnp.asarray(a, jnp.bfloat16) for a in operands(NONCONTRACTING, rng))

        def step(lhs, rhs, sizes, cotangent):
            out, vjp = jax.vjp(lambda lhs, rhs: jgg.ragged_dot(lhs, rhs, sizes), lhs, rhs)
            return out, vjp(cotangent)

        module = self.exported(step, lhs, rhs, SIZES, cotangent).mlir_module()
        assert module.count("@jax_grouped_gemm.ragged_noncontracting.v4") == 2
        assert module.count("@jax_grouped_gemm.ragged_contracting.v4") == 1

    def test_without_our_checks_export_refuses_the_kernels(self, extension, rng):
        lhs, rhs, _ = (jnp.asarray(a, jnp.bfloat16) for a in operands(NONCONTRACTING, rng))
        with pytest.raises(ValueError, match="jax_grouped_gemm.ragged_noncontracting.v4"):
            jax.export.export(jax.jit(jgg.ragged_dot), platforms=("cuda", "cpu"))(lhs, rhs, SIZES)
