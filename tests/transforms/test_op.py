"""An example operation, made of nothing but an `Op`, as docs/add_an_operation.md says."""

from __future__ import annotations

import dataclasses
import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.interpreters import ad
from jax.test_util import check_grads

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src import lowering
from jax_grouped_gemm._src import op as op_module
from jax_grouped_gemm._src.op import Op, export_disabled_checks, ops
from jax_grouped_gemm._src.plan import AS_ASKED, XLA, Kernel, Plan

LARGEST = 8


@dataclasses.dataclass(frozen=True)
class ScaleProblem:
    """Scaling rows of `columns` elements."""

    columns: int
    op: str = "scale_rows"

    def __str__(self):
        return f"{self.op} of {self.columns} elements"


def plan(avals, params, target):
    """Rows of up to LARGEST elements have a kernel."""
    problem = ScaleProblem(avals[0].shape[-1])
    if params["implementation"] == "xla":
        return Plan(problem, XLA, AS_ASKED)
    if problem.columns > LARGEST:
        return Plan(problem, XLA, f"rows have more than {LARGEST} elements")
    return Plan(problem, Kernel("scale_rows"), grid=target.multiprocessors)


def call(plan, x, scale):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("test.scale_rows.v1", result)(x, scale)


TRACED = []  # the shapes of x for which the reference was traced


@jax.jit
def unchanged(x):
    """Returns x on a CPU, and x + 1 on a GPU."""
    return lax.platform_dependent(x, cuda=lambda x: x + 1, default=lambda x: x)


def reference(x, scale):
    TRACED.append(x.shape)
    return unchanged(x) * scale[..., None]


@pytest.fixture
def scale_rows():
    """Scales rows: [b?, m, n] times [b?, m]. The fixture removes the operation afterwards."""
    op = Op(
        name="scale_rows",
        operand_ranks=(2, 1),
        targets=("test.scale_rows.v1",),
        avals=lambda x, scale, **_: op.result_aval((x, scale), x.shape[-2:], x.dtype),
        planner=plan,
        call=call,
        reference=reference,
    )

    def jvp(primals, tangents, **params):
        (x, scale), (x_dot, scale_dot) = primals, tangents
        pairs = ((x_dot, scale), (x, scale_dot))
        terms = [op.bind(*pair, **params) for pair in pairs if ad.Zero not in map(type, pair)]
        return op.bind(x, scale, **params), functools.reduce(ad.add_tangents, terms)

    def transpose(ct, x, scale, **params):
        if ad.is_undefined_primal(x):
            return op.bind(ct, scale, **params), None
        return None, jnp.sum(ct * x, axis=-1)

    op.def_jvp(jvp)
    op.def_transpose(transpose)
    op.def_batching(lambda operands, dims, **params: op.bind_batched(operands, dims, params))
    yield lambda x, scale, implementation=None: op.bind(x, scale, implementation=implementation)
    del ops[op.primitive]


@pytest.fixture
def operands(rng):
    return rng.standard_normal((5, 4), np.float32), rng.standard_normal(5, np.float32)


def cuda_program(fn, *operands) -> str:
    return jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


class TestRuns:
    def test_the_reference_elsewhere(self, scale_rows, operands):
        x, scale = operands
        np.testing.assert_array_equal(jax.jit(scale_rows)(x, scale), x * scale[:, None])

    def test_eagerly(self, scale_rows, operands):
        x, scale = operands
        np.testing.assert_array_equal(scale_rows(x, scale), x * scale[:, None])

    def test_the_reference_is_traced_once_for_all_programs(self, scale_rows, operands):
        x, scale = operands
        expected = x * scale[:, None]
        np.testing.assert_array_equal(jax.jit(scale_rows)(x, scale), expected)
        traced = len(TRACED)
        twice = jax.jit(lambda *operands: 2 * scale_rows(*operands))
        np.testing.assert_array_equal(twice(x, scale), 2 * expected)
        assert len(TRACED) == traced
        np.testing.assert_array_equal(jax.jit(scale_rows)(x[:3], scale[:3]), expected[:3])

    def test_its_kernel_on_a_gpu(self, scale_rows, operands, extension):
        assert "@test.scale_rows.v1" in cuda_program(scale_rows, *operands)

    def test_the_reference_where_the_plan_says_so(self, scale_rows, caplog):
        x, scale = jnp.ones((5, LARGEST + 1)), jnp.ones(5)
        with caplog.at_level(logging.DEBUG, op_module.logger.name):
            assert "scale_rows.v1" not in cuda_program(scale_rows, x, scale)
        assert f"more than {LARGEST}" in caplog.text

    def test_nothing_else_if_the_kernel_was_asked_for(self, scale_rows):
        x, scale = jnp.ones((5, LARGEST + 1)), jnp.ones(5)
        with pytest.raises(NotImplementedError, match="scale_rows.*more than 8"):
            cuda_program(lambda x, s: scale_rows(x, s, "cuda"), x, scale)
        with pytest.raises(NotImplementedError, match="scale_rows.*platform cpu"):
            jax.jit(lambda x, s: scale_rows(x, s, "cuda"))(x, scale)


class TestTransformations:
    def test_gradients(self, scale_rows, operands):
        check_grads(scale_rows, operands, order=2, modes=("fwd", "rev"), atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, -1)])
    def test_vmap(self, scale_rows, rng, axes):
        def stacked(x, axis):
            return x if axis is None else jnp.stack([x, 2 * x, -x], axis)

        x, scale = rng.standard_normal((5, 4), np.float32), rng.standard_normal(5, np.float32)
        x, scale = stacked(x, axes[0]), stacked(scale, axes[1])
        got = jax.vmap(scale_rows, axes)(x, scale)
        np.testing.assert_array_equal(got, jax.vmap(reference, axes)(x, scale))

    def test_vmap_of_vmap(self, scale_rows, rng):
        x = rng.standard_normal((2, 3, 5, 4), np.float32)
        scale = rng.standard_normal((3, 5), np.float32)
        got = jax.vmap(jax.vmap(scale_rows), (0, None))(x, scale)
        np.testing.assert_array_equal(got, x * scale[None, ..., None])

    def test_shard_map(self, scale_rows, rng):
        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        x = rng.standard_normal((8, 4), np.float32)
        split, whole = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()
        run = jax.shard_map(scale_rows, mesh=mesh, in_specs=(split, whole), out_specs=split)
        scale = rng.standard_normal(2, np.float32)
        np.testing.assert_array_equal(jax.jit(run)(x, scale), x * np.tile(scale, 4)[:, None])

    def test_explicit_axes_split_the_batch_alone(self, scale_rows):
        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
        spec = jax.sharding.PartitionSpec("i")
        x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, spec))
        with pytest.raises(NotImplementedError, match="scale_rows needs dimension 0 .*8@i"):
            scale_rows(x, jnp.ones(8))
        batch = jax.vmap(scale_rows, (0, None))(x.reshape(8, 2, 2), jnp.full(2, 3.0))
        assert jax.typeof(batch).sharding.spec == jax.sharding.PartitionSpec("i", None, None)
        np.testing.assert_array_equal(batch, np.full((8, 2, 2), 3.0))


class TestIsKnownTo:
    def test_explain(self, scale_rows, operands):
        explanation = jgg.explain(jax.grad(lambda x, s: scale_rows(x, s).sum()), *operands)
        first, *lines = str(explanation).splitlines()
        assert first.startswith("A plan for ")
        assert lines == [
            "1. scale_rows of 4 elements",
            "   kernel scale_rows",
            "2. scale_rows of 4 elements",
            "   kernel scale_rows",
            "workspace 0 bytes in all, 0 at a time",
        ]

    @pytest.mark.parametrize("multiprocessors", [78, 114, 132])
    def test_how_large_the_device_is(self, scale_rows, operands, multiprocessors):
        explanation = jgg.explain(scale_rows, *operands, multiprocessors=multiprocessors)
        assert [plan.grid for plan in explanation.plans] == [multiprocessors]

    def test_checkpoint_policies(self, scale_rows, operands):
        x, scale = operands

        def loss(x):
            return jnp.sin(scale_rows(jnp.sin(x), scale)).sum()

        def count(policy):
            gradient = jax.grad(jax.checkpoint(loss, policy=policy))
            return str(jax.make_jaxpr(gradient)(x)).count("scale_rows[")

        assert count(jgg.checkpoint_policies.grouped_matmuls_saveable) == 2
        assert count(jax.checkpoint_policies.nothing_saveable) == 3

    def test_export(self, scale_rows, operands, extension):
        checks = export_disabled_checks()
        assert export.DisabledSafetyCheck.custom_call("test.scale_rows.v1") in checks
        exported = export.export(jax.jit(scale_rows), platforms=["cuda"], disabled_checks=checks)
        assert "test.scale_rows.v1" in exported(*operands).mlir_module()

    @pytest.mark.parametrize("columns", [LARGEST, LARGEST + 1], ids=["kernel", "reference"])
    def test_export_for_several_platforms(self, scale_rows, rng, columns):
        """A function inside `jax.jit` is lowered for each platform, not for the first alone."""
        x, scale = rng.standard_normal((5, columns), np.float32), rng.standard_normal(5, np.float32)
        exported = export.export(
            jax.jit(lambda x, scale: unchanged(scale_rows(x, scale))),
            platforms=["cpu", "cuda"],
            disabled_checks=export_disabled_checks(),
        )(x, scale)
        got = export.deserialize(exported.serialize()).call(x, scale)
        np.testing.assert_array_equal(got, x * scale[:, None])

    def test_export_for_several_platforms_with_an_unknown_jax(self):
        module = types.SimpleNamespace(platforms=("cpu", "cuda"))  # no cached_primitive_lowerings
        ctx = types.SimpleNamespace(platforms=("cuda",), module_context=module)
        with pytest.raises(NotImplementedError, match=r"\(cpu, cuda\).*one platform at a time"):
            lowering.with_own_functions(ctx)
