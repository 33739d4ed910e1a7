"""XLA's program for the ops on an H200, compiled in full on a machine that need not have one."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.extension import unsuitable_device_reason
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged.tiles import (
    NARROW_STREAM_K_TILE,
    NARROW_TILE,
    PINGPONG_TILE,
    STREAM_K_TILE,
    SWAPPED_FLOAT32_TILE,
)
from tests.support.aot import ALIGNMENT, FREE, H200, Program, Target
from tests.support.ops import BOTH_OPS, CONTRACTING, NONCONTRACTING

M, K, N, G = 256, 128, 192, 4

ALL_MAJORS = pytest.mark.parametrize(
    "majors",
    [dict(transpose_lhs=a, transpose_rhs=b) for a in (False, True) for b in (False, True)],
    ids=lambda majors: "".join("t" if t else "n" for t in majors.values()),
)
# Kernels read operands of these majors as they are, and write cotangents of the same majors.
RAGGED_MAJOR = pytest.mark.parametrize(
    "op, transpose_rhs",
    [(NONCONTRACTING, False), (NONCONTRACTING, True), (CONTRACTING, False)],
    ids=repr,
)


def shapes(op, dtype=jnp.bfloat16, *, m=M, k=K, n=N, g=G, transpose_lhs=False, transpose_rhs=False):
    """Returns lhs, rhs, sizes and cotangent of `op`, with operands stored in the given majors."""
    lhs, rhs, out = op.shapes(m, k, n, g)
    if transpose_lhs:
        lhs = lhs[::-1]
    if transpose_rhs:
        rhs = (*rhs[:-2], rhs[-1], rhs[-2])
    sizes = jax.ShapeDtypeStruct((g,), jnp.int32)
    lhs, rhs, out = (jax.ShapeDtypeStruct(s, dtype) for s in (lhs, rhs, out))
    return lhs, rhs, sizes, out


def forward(op, **options):
    return partial(op.call.__wrapped__, **options)


def cotangents(op, wrt=(0, 1), **options):
    """Returns a function of cotangents alone: XLA drops the forward result, which is not used."""

    def function(lhs, rhs, sizes, cotangent):
        _, vjp = jax.vjp(lambda lhs, rhs: forward(op, **options)(lhs, rhs, sizes), lhs, rhs)
        return [vjp(cotangent)[i] for i in wrt]

    return function


def assert_only_workspaces(program: Program, workspace_bytes: int) -> None:
    """Asserts that all temporary memory is planned workspaces, and tables of two pointers.

    XLA keeps such a table for the pair (out, workspace) that each call returns.
    """
    for call in program.calls:
        assert f"u8[{workspace_bytes}]" in call.type
    one = ALIGNMENT + -(-workspace_bytes // ALIGNMENT) * ALIGNMENT
    assert workspace_bytes <= program.temporary_bytes <= len(program.calls) * one


def planned_workspace(op, dtype=jnp.bfloat16, *, m=M, **options) -> int:
    """Returns the workspace that a forward product of `op` needs according to `explain`."""
    *arguments, _ = shapes(op, dtype, m=m)
    (planned,) = jgg.explain(forward(op, **options), *arguments).plans
    return planned.workspace_bytes


@BOTH_OPS
def test_the_tiles_that_a_plan_can_choose_are_those_compiled(op, schedules):
    compiled = [config for config in schedules.kernel_configs() if config["op"] == f"ragged_{op}"]
    tiles = (DEFAULT_TILE, NARROW_TILE)
    if repr(op) == "contracting":
        tiles = (DEFAULT_TILE, PINGPONG_TILE, NARROW_TILE)
    assert [dict(op=f"ragged_{op}", **tile.sizes()) for tile in tiles] == compiled


class TestForward:
    @RAGGED_MAJOR
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_is_one_kernel_and_nothing_else(self, op, transpose_rhs, dtype, h200):
        majors = dict(transpose_rhs=transpose_rhs)
        *arguments, _ = shapes(op, dtype, **majors)
        program = h200.compile(forward(op, **majors), *arguments)
        assert program.kernels == {f"ragged_{op}": 1}
        assert program.opcodes <= FREE
        assert_only_workspaces(program, planned_workspace(op))

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    @pytest.mark.parametrize(
        "op, majors, computed",
        [
            (NONCONTRACTING, dict(transpose_lhs=True), 1),
            (CONTRACTING, dict(transpose_lhs=True), 1),
            (CONTRACTING, dict(transpose_rhs=True), 1),
            (CONTRACTING, dict(transpose_lhs=True, transpose_rhs=True), 2),
        ],
    )
    def test_contiguous_rows_are_transposed_first(self, op, majors, computed, dtype, h200):
        *arguments, _ = shapes(op, dtype, **majors)
        program = h200.compile(forward(op, implementation="cuda", **majors), *arguments)
        assert program.kernels == {f"ragged_{op}": 1}
        assert len(program.computed_operands()) == computed

    @RAGGED_MAJOR
    @pytest.mark.parametrize("precision", [None, jax.lax.Precision.HIGHEST])
    def test_of_float32_is_one_call_with_its_parts_in_the_workspace(
        self, op, transpose_rhs, precision, h200
    ):
        majors = dict(transpose_rhs=transpose_rhs)
        options = dict(precision=precision, tile=DEFAULT_TILE)
        *arguments, _ = shapes(op, jnp.float32, **majors)
        program = h200.compile(forward(op, **options, **majors), *arguments)
        assert program.kernels == {f"ragged_{op}": 1}
        assert program.opcodes <= FREE
        workspace_bytes = planned_workspace(op, jnp.float32, **options)
        assert_only_workspaces(program, workspace_bytes)

    @BOTH_OPS
    @pytest.mark.parametrize("tile", (DEFAULT_TILE, NARROW_TILE), ids=str)
    def test_tile_reaches_the_call(self, op, tile, h200):
        *arguments, _ = shapes(op)
        program = h200.compile(forward(op, tile=tile), *arguments)
        (call,) = program.calls
        for name, size in tile.sizes().items():
            assert f"{name} = {size} : i32" in call.text
        assert 'kind = "cooperative"' in call.text

    @BOTH_OPS
    @pytest.mark.parametrize("n, tile", [(128, NARROW_TILE), (16384, DEFAULT_TILE)], ids=str)
    def test_few_tiles_are_narrow(self, op, n, tile, h200):
        *arguments, _ = shapes(op, n=n)
        (call,) = h200.compile(forward(op), *arguments).calls
        assert f"tile_n = {tile.tile_n} : i32" in call.text

    @pytest.mark.parametrize(
        ("op", "tile", "kind", "dtypes"),
        [
            (NONCONTRACTING, STREAM_K_TILE, "stream_k", (jnp.bfloat16, jnp.bfloat16)),
            (NONCONTRACTING, NARROW_STREAM_K_TILE, "stream_k", (jnp.bfloat16, jnp.bfloat16)),
            (NONCONTRACTING, SWAPPED_FLOAT32_TILE, "swapped", (jnp.float32, jnp.float32)),
            (CONTRACTING, PINGPONG_TILE, "pingpong", (jnp.bfloat16, jnp.float32)),
        ],
        ids=str,
    )
    def test_kind_reaches_the_call(self, op, tile, kind, dtypes, h200):
        dtype, result = dtypes
        *arguments, _ = shapes(op, dtype)
        program = h200.compile(forward(op, tile=tile, preferred_element_type=result), *arguments)
        (call,) = program.calls
        assert f'kind = "{kind}"' in call.text

    def test_a_tile_is_for_one_product(self, h200):
        """The plans of the cotangents choose their own tiles, because these are other products."""
        tile = STREAM_K_TILE
        program = h200.compile(cotangents(NONCONTRACTING, tile=tile), *shapes(NONCONTRACTING))
        assert len(program.calls) == 2
        for call in program.calls:
            assert '"stream_k"' not in call.text

    @BOTH_OPS
    def test_float32_result_is_written_by_the_kernel(self, op, h200):
        *arguments, _ = shapes(op)
        program = h200.compile(forward(op, preferred_element_type=jnp.float32), *arguments)
        assert program.kernels == {f"ragged_{op}": 1}
        assert program.opcodes <= FREE

    @BOTH_OPS
    def test_other_16_bit_result_is_rounded_once_from_float32(self, op, h200):
        *arguments, _ = shapes(op)
        program = h200.compile(forward(op, preferred_element_type=jnp.float16), *arguments)
        (call,) = program.calls
        assert call.type.startswith("(f32[")
        assert program.opcodes <= FREE | {"fusion", "convert"}

    def test_group_offset_and_window_need_nothing_more(self, h200):
        lhs, rhs, sizes, _ = shapes(NONCONTRACTING)
        rhs = jax.ShapeDtypeStruct((2, K, N), rhs.dtype)
        offset = jax.ShapeDtypeStruct((1,), jnp.int32)
        program = h200.compile(NONCONTRACTING.call.__wrapped__, lhs, rhs, sizes, offset)
        assert program.kernels == {"ragged_noncontracting": 1}
        assert program.opcodes <= FREE

    @pytest.mark.parametrize("transpose_rhs", [False, True])
    def test_of_ragged_dot(self, transpose_rhs, h200):
        *arguments, _ = shapes(NONCONTRACTING, transpose_rhs=transpose_rhs)
        function = partial(jgg.ragged_dot, transpose_rhs=transpose_rhs, implementation="cuda")
        program = h200.compile(function, *arguments)
        assert program.kernels == {"ragged_noncontracting": 1}
        assert program.opcodes <= FREE


class TestGradients:
    KERNELS = {
        # The cotangent of each operand takes one kernel.
        NONCONTRACTING: ["ragged_noncontracting", "ragged_contracting"],
        CONTRACTING: ["ragged_noncontracting", "ragged_noncontracting"],
    }

    @RAGGED_MAJOR
    def test_are_two_kernels_and_nothing_else(self, op, transpose_rhs, h200):
        majors = dict(transpose_rhs=transpose_rhs)
        program = h200.compile(cotangents(op, **majors), *shapes(op, **majors))
        assert program.kernels == Counter(self.KERNELS[op])
        assert program.opcodes <= FREE
        assert_only_workspaces(program, planned_workspace(op))

    @RAGGED_MAJOR
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_read_every_operand_as_it_is(self, op, transpose_rhs, dtype, h200):
        majors = dict(transpose_rhs=transpose_rhs)
        program = h200.compile(cotangents(op, **majors), *shapes(op, dtype, **majors))
        assert program.kernels == Counter(self.KERNELS[op])
        assert not program.computed_operands()

    @BOTH_OPS
    @pytest.mark.parametrize("operand", [0, 1])
    def test_of_one_operand_is_one_kernel(self, op, operand, h200):
        program = h200.compile(cotangents(op, wrt=(operand,)), *shapes(op))
        assert program.kernels == {self.KERNELS[op][operand]: 1}
        assert program.opcodes <= FREE

    @RAGGED_MAJOR
    def test_of_second_order_copy_no_operand(self, op, transpose_rhs, h200):
        """Derivatives of both cotangents by lhs, rhs and the cotangent copy no operand."""
        majors = dict(transpose_rhs=transpose_rhs)

        def second(lhs, rhs, sizes, cotangent, lhs_direction, rhs_direction):
            def first(lhs, rhs, cotangent):
                return cotangents(op, **majors)(lhs, rhs, sizes, cotangent)

            _, vjp = jax.vjp(first, lhs, rhs, cotangent)
            return vjp([lhs_direction, rhs_direction])

        lhs, rhs, sizes, cotangent = shapes(op, **majors)
        program = h200.compile(second, lhs, rhs, sizes, cotangent, lhs, rhs)
        assert program.kernels.total() == 4
        assert not program.computed_operands()

    def test_of_a_float32_result(self, h200):
        options = dict(preferred_element_type=jnp.float32)
        lhs, rhs, sizes, out = shapes(NONCONTRACTING)
        cotangent = jax.ShapeDtypeStruct(out.shape, jnp.float32)
        program = h200.compile(cotangents(NONCONTRACTING, **options), lhs, rhs, sizes, cotangent)
        assert program.kernels == Counter(self.KERNELS[NONCONTRACTING])
        # The cotangent is rounded to the dtype that the forward pass multiplied, in one pass.
        assert not re.search(r" (transpose|copy)\(", program.hlo)
        assert len(program.computed_operands()) == 1


class TestUnalignedRows:
    """TMA needs rows of a multiple of 16 bytes, so XLA pads other rows before the kernel."""

    @BOTH_OPS
    @ALL_MAJORS
    @pytest.mark.parametrize("k, n", [(37, 64), (64, 51), (37, 51)])
    def test_padded_operands_take_the_kernel(self, op, majors, k, n, h200):
        *arguments, _ = shapes(op, k=k, n=n, **majors)
        program = h200.compile(forward(op, implementation="cuda", **majors), *arguments)
        assert program.kernels == {f"ragged_{op}": 1}
        (call,) = program.calls
        for dtype, dimensions in re.findall(r"(bf16|f16|f32)\[([\d,]+)\]", call.text):
            pitch = int(dimensions.split(",")[-1]) * {"bf16": 2, "f16": 2, "f32": 4}[dtype]
            assert pitch % 16 == 0, call.text

    @BOTH_OPS
    def test_odd_number_of_contiguous_ragged_rows_takes_the_kernel(self, op, h200):
        *arguments, _ = shapes(op, m=M - 3, transpose_lhs=True)
        program = h200.compile(forward(op, transpose_lhs=True, implementation="cuda"), *arguments)
        assert program.kernels == {f"ragged_{op}": 1}

    @BOTH_OPS
    @pytest.mark.parametrize("m, k, n", [(M - 3, K, N), (1, 40, 136), (M, 264, 8)])
    def test_rows_off_the_tile_but_aligned_are_not_padded(self, op, m, k, n, h200):
        *arguments, _ = shapes(op, m=m, k=k, n=n)
        program = h200.compile(forward(op), *arguments)
        assert program.kernels == {f"ragged_{op}": 1}
        assert program.opcodes <= FREE


class TestNoKernel:
    @BOTH_OPS
    def test_complex_operands_take_the_reference(self, op, h200):
        *arguments, _ = shapes(op, jnp.complex64)
        assert not h200.compile(forward(op), *arguments).kernels

    @BOTH_OPS
    def test_complex_operands_with_cuda_asked_for_raise(self, op, h200):
        *arguments, _ = shapes(op, jnp.complex64)
        with pytest.raises(NotImplementedError, match="complex64"):
            h200.compile(forward(op, implementation="cuda"), *arguments)

    @BOTH_OPS
    def test_mixed_dtypes_take_the_reference(self, op, h200):
        lhs, rhs, sizes, _ = shapes(op)
        rhs = jax.ShapeDtypeStruct(rhs.shape, jnp.float32)
        assert not h200.compile(forward(op), lhs, rhs, sizes).kernels

    @BOTH_OPS
    def test_reference_asked_for(self, op, h200):
        *arguments, _ = shapes(op)
        assert not h200.compile(forward(op, implementation="xla"), *arguments).kernels

    @pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
    def test_only_hopper_is_suitable(self, capability, h200):
        major, minor = capability.split(".")
        config = H200.replace(
            "cuda_compute_capability { major: 9 }",
            f"cuda_compute_capability {{ major: {major} minor: {minor} }}",
        )
        device = Target(config).mesh.devices[0]
        assert device.compute_capability == capability
        reason = unsuitable_device_reason(device)
        if capability == "9.0":
            assert reason is None
        else:
            assert capability in reason

    @BOTH_OPS
    def test_nothing_to_multiply_is_no_kernel(self, op, h200):
        """Empty products launch no kernel, and raise no error with `implementation="cuda"`."""
        for empty in ("m", "k", "n"):
            *arguments, _ = shapes(op, **{empty: 0})
            assert not h200.compile(forward(op, implementation="cuda"), *arguments).kernels

    @BOTH_OPS
    def test_cuda_asked_for_on_the_cpu_raises(self, op):
        *arguments, _ = shapes(op)
        with pytest.raises(NotImplementedError, match="(?i)cpu"):
            jax.jit(forward(op, implementation="cuda")).lower(*arguments)


class TestTransforms:
    # Every way in which lhs, rhs and group_sizes can be batched.
    IN_AXES = [axes for axes in np.ndindex(2, 2, 2) if any(axes)]

    @BOTH_OPS
    @pytest.mark.parametrize("batched", IN_AXES, ids=lambda b: "".join(map(str, b)))
    def test_vmap_is_one_kernel(self, op, batched, h200):
        in_axes = tuple(0 if b else None for b in batched)
        *arguments, _ = shapes(op)
        arguments = [
            jax.ShapeDtypeStruct((3, *a.shape), a.dtype) if b else a
            for a, b in zip(arguments, batched, strict=True)
        ]
        program = h200.compile(jax.vmap(op.call.__wrapped__, in_axes=in_axes), *arguments)
        assert program.kernels == {f"ragged_{op}": 1}

    @BOTH_OPS
    @pytest.mark.parametrize("batched", [(1, 1, 0), (1, 1, 1), (0, 0, 1), (0, 1, 1)])
    def test_vmap_by_the_kernels_batch_dimension_copies_nothing(self, op, batched, h200):
        in_axes = tuple(0 if b else None for b in batched)
        *arguments, _ = shapes(op)
        arguments = [
            jax.ShapeDtypeStruct((3, *a.shape), a.dtype) if b else a
            for a, b in zip(arguments, batched, strict=True)
        ]
        program = h200.compile(jax.vmap(op.call.__wrapped__, in_axes=in_axes), *arguments)
        (call,) = program.calls
        for argument in arguments[:2]:
            assert f"bf16[{','.join(map(str, argument.shape))}]" in call.text
        assert not program.computed_operands()

    def test_scan_over_layers_has_one_kernel(self, h200):
        def layers(x, weights, sizes):
            return jax.lax.scan(lambda x, w: (jgg.ragged_dot(x, w, sizes), None), x, weights)[0]

        x, _, sizes, _ = shapes(NONCONTRACTING, k=K, n=K)
        weights = jax.ShapeDtypeStruct((5, G, K, K), x.dtype)
        assert h200.compile(layers, x, weights, sizes).kernels == {"ragged_noncontracting": 1}

    def test_expert_parallel_shard_map(self, h200):
        """Each of four devices multiplies by its own experts: one kernel and one all-reduce."""
        target = Target(H200, devices=4)

        def body(lhs, rhs, sizes):
            first = jax.lax.axis_index("x") * rhs.shape[0]
            return jax.lax.psum(jgg.ragged_dot(lhs, rhs, sizes, group_offset=first), "x")

        specs = [P(), P("x"), P()]
        *arguments, _ = shapes(NONCONTRACTING, g=8)
        function = jax.shard_map(body, mesh=target.mesh, in_specs=tuple(specs), out_specs=P())
        program = target.compile(function, *arguments, specs=specs)
        assert program.kernels == {"ragged_noncontracting": 1}
        (call,) = program.calls
        assert f"bf16[2,{K},{N}]" in call.text
        assert not re.search(r"\ball-(gather|to-all)", program.hlo)
