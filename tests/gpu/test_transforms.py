"""The kernels under JAX's transformations, and which implementation runs when none is named."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F32
from tests.support.ops import BOTH_OPS, NONCONTRACTING, random

M, K, N, G = 776, 136, 136, 8


def operands(op, rng, dtype=BF16):
    return [random(rng, shape, dtype) for shape in op.shapes(M, K, N, G)]


def assert_same(actual, want, roundings: int):
    """Compares programs that round to bfloat16 `roundings` times, in different orders."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert np.linalg.norm(b) > 0
        assert np.linalg.norm(a - b) <= roundings * 2.0**-8 * np.linalg.norm(b)


class TestImplementation:
    def test_the_kernels_are_available(self):
        assert jgg.is_available()
        assert jgg.unavailable_reason() is None

    @BOTH_OPS
    def test_default_is_the_kernel(self, op, rng):
        lhs, rhs, _ = operands(op, rng)
        sizes = sizes_of.multinomial(rng, M, G)
        program = op.call.lower(lhs, rhs, sizes).compile()
        assert f'custom_call_target="jax_grouped_gemm.ragged_{op}.v4"' in program.as_text()
        default, kernel = (
            np.asarray(op.call(lhs, rhs, sizes, implementation=i)) for i in (None, "cuda")
        )
        assert default.tobytes() == kernel.tobytes()

    @BOTH_OPS
    @pytest.mark.parametrize("dtype", [BF16, F32])
    def test_reference(self, op, dtype, rng):
        lhs, rhs, cotangent = operands(op, rng, dtype)
        with jax.default_matmul_precision("highest"):
            for sizes in (sizes_of.any_kind(rng, M, G) for _ in range(5)):
                out = op.call(lhs, rhs, sizes, implementation="xla")
                oracle.check(out, op.exact(lhs, rhs, sizes))
                got = op.cotangents(lhs, rhs, sizes, cotangent, implementation="xla")
                oracle.check_all(got, op.exact_cotangents(lhs, rhs, sizes, cotangent))

    @pytest.mark.parametrize("precision", ["high", "highest"])
    def test_float32_of_high_precision_is_not_tf32(self, precision, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng, F32)
        sizes = sizes_of.multinomial(rng, M, G)
        out = jax.jit(partial(jgg.ragged_dot, precision=precision))(lhs, rhs, sizes)
        exact = oracle.ragged_noncontracting(lhs, rhs, sizes).value
        # TF32 rounds each operand to 11 bits and would be 100 times further off.
        assert np.linalg.norm(out - exact) <= 5e-6 * np.linalg.norm(exact)

    @BOTH_OPS
    def test_complex_with_cuda_asked_for_raises(self, op, rng):
        lhs, rhs, _ = operands(op, rng, jnp.complex64)
        with pytest.raises(NotImplementedError, match="complex64"):
            op.call(lhs, rhs, np.full(G, 5, np.int32), implementation="cuda")


class TestDifferentiation:
    @BOTH_OPS
    def test_forward_mode(self, op, rng):
        """The derivative is a sum of two products. The products and the sum are rounded."""
        lhs, rhs, _ = operands(op, rng)
        directions = operands(op, rng)[:2]
        sizes = sizes_of.multinomial(rng, M - 50, G)
        call = partial(op.call, implementation="cuda", preferred_element_type=F32)
        _, tangent = jax.jvp(
            lambda lhs, rhs: call(lhs, rhs, sizes), (lhs, rhs), tuple(map(jnp.asarray, directions))
        )
        want = op.exact(directions[0], rhs, sizes).value + op.exact(lhs, directions[1], sizes).value
        assert np.linalg.norm(tangent - want) <= 1e-5 * np.linalg.norm(want)

    @BOTH_OPS
    def test_second_order_as_the_reference(self, op, rng):
        lhs, rhs, _ = (jnp.asarray(a) for a in operands(op, rng))
        directions = tuple(jnp.asarray(a) for a in operands(op, rng)[:2])
        sizes = sizes_of.multinomial(rng, M - 50, G)

        def hessian_vector_product(implementation):
            def loss(lhs, rhs):
                out = op.call(lhs, rhs, sizes, implementation=implementation)
                return jnp.sum(jnp.sin(0.1 * out.astype(F32)))

            return jax.jit(lambda: jax.jvp(jax.grad(loss, (0, 1)), (lhs, rhs), directions)[1])()

        assert_same(hessian_vector_product("cuda"), hessian_vector_product("xla"), 6)


class TestStructure:
    def layers(self, rng):
        x = random(rng, (M, K), BF16)
        weights = (rng.standard_normal((4, G, K, K)) / np.sqrt(K)).astype(BF16)
        sizes = np.stack([sizes_of.multinomial(rng, M, G) for _ in range(4)])
        return x, weights, sizes

    @staticmethod
    def loss(implementation, wrap, x, weights, sizes):
        def layer(x, parameters):
            w, s = parameters
            return jnp.tanh(jgg.ragged_dot(x, w, s, implementation=implementation)), None

        return jnp.mean(jax.lax.scan(wrap(layer), x, (weights, sizes))[0].astype(F32) ** 2)

    @pytest.mark.parametrize("remat", [False, True])
    def test_scan_and_remat_as_the_reference(self, remat, rng):
        policy = jgg.checkpoint_policies.grouped_matmuls_saveable
        wrap = partial(jax.checkpoint, policy=policy) if remat else lambda layer: layer
        arguments = self.layers(rng)

        def results(implementation):
            loss = partial(self.loss, implementation, wrap)
            return jax.jit(jax.value_and_grad(loss, (0, 1)))(*arguments)

        assert_same(results("cuda"), results("xla"), 8)

    def test_shard_map(self, rng):
        """Forward and gradients run on a mesh of one GPU, with replication checks."""
        lhs, rhs, cotangent = operands(NONCONTRACTING, rng)
        sizes = sizes_of.multinomial(rng, M, G)
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))

        @partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
        def sharded(lhs, rhs, sizes):
            return jgg.ragged_dot(lhs, rhs, sizes, implementation="cuda")

        @jax.jit
        def step(lhs, rhs, sizes, cotangent):
            out, vjp = jax.vjp(lambda lhs, rhs: sharded(lhs, rhs, sizes), lhs, rhs)
            return out, *vjp(cotangent)

        exact = oracle.noncontracting_cotangents(lhs, rhs, sizes, cotangent)
        oracle.check_all(
            step(lhs, rhs, sizes, cotangent),
            (oracle.ragged_noncontracting(lhs, rhs, sizes), *exact),
        )

    def test_exported_program_runs_the_kernel(self, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng)
        sizes = sizes_of.multinomial(rng, M - 9, G)
        program = jax.export.export(
            jax.jit(partial(jgg.ragged_dot, implementation=None)),
            platforms=("cuda", "cpu"),
            disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
        )(lhs, rhs, sizes)
        loaded = jax.export.deserialize(program.serialize())
        kernel = jgg.ragged_dot(lhs, rhs, sizes, implementation="cuda")
        assert np.asarray(loaded.call(lhs, rhs, sizes)).tobytes() == np.asarray(kernel).tobytes()
