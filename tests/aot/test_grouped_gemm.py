"""XLA's program for lists of products on an H200, compiled on a machine that need not have one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import BF16

# Only the last problem keeps all multiprocessors busy for more than a round.
SHAPES = [(128, 64, 256), (64, 8, 8), (16, 512, 24), (3, 32, 16, 40), (2048, 64, 4096)]
FORMS = pytest.mark.parametrize(
    "transpose_lhs, transpose_rhs", [(a, b) for a in (False, True) for b in (False, True)]
)


def arrays(shapes, transpose_lhs=False, transpose_rhs=False, dtype=BF16):
    """Returns the lhs and rhs of products whose shapes are (m, k, n) or (g, m, k, n)."""

    def stored(g, rows, columns, transpose):
        return jax.ShapeDtypeStruct(
            (*g, *((columns, rows) if transpose else (rows, columns))), dtype
        )

    lhs = [stored(g, m, k, transpose_lhs) for *g, m, k, n in shapes]
    rhs = [stored(g, k, n, transpose_rhs) for *g, m, k, n in shapes]
    return lhs, rhs


def compiled(h200, function, *lists):
    """Compiles a function of lists of arrays."""
    flat, tree = jax.tree.flatten(lists)
    return h200.compile(lambda *x: function(*jax.tree.unflatten(tree, x)), *flat)


@FORMS
@pytest.mark.parametrize("scheduler", ["device", "host_precomputed"])
def test_one_kernel_on_the_arrays_as_they_are(transpose_lhs, transpose_rhs, scheduler, h200):
    """Nothing is transposed or copied, and no scale is written. A given schedule is a constant."""
    options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    call = partial(jgg.grouped_gemm, scheduler=scheduler, alpha=0.5, **options)
    program = compiled(h200, call, *arrays(SHAPES, **options))
    assert program.kernels == {"grouped_gemm": 1}
    assert not program.computed_operands()
    assert program.temporary_bytes <= 256
    constants = [x.type for x in program.entry if x.opcode == "constant"]
    assert any(x.startswith("s32[") for x in constants) == (scheduler == "host_precomputed")


def test_a_launch_for_every_79_problems_and_layout(h200):
    count = 85
    lhs, rhs = arrays([(64, 8 * i, 64) for i in range(1, count + 1)])
    program = compiled(h200, jgg.grouped_gemm, lhs, rhs)
    assert program.kernels == {"grouped_gemm": 2}
    assert not program.computed_operands()
    square = arrays([(64, 64, 64)] * 4)
    layouts = [False, True, True, False]
    program = compiled(h200, partial(jgg.grouped_gemm, transpose_rhs=layouts), *square)
    assert program.kernels == {"grouped_gemm": 2}
    assert not program.computed_operands()


def test_gradients_transpose_nothing(h200):
    def loss(lhs, rhs, weights):
        outs = jgg.grouped_gemm(lhs, rhs, preferred_element_type=jnp.float32)
        return sum(jnp.vdot(out, w) for out, w in zip(outs, weights, strict=True))

    shapes = [(128, 64, 256), (64, 8, 8)]
    lhs, rhs = arrays(shapes)
    weights = [jax.ShapeDtypeStruct((m, n), jnp.float32) for m, _, n in shapes]
    program = compiled(h200, jax.grad(loss, (0, 1)), lhs, rhs, weights)
    # The products themselves are not needed.
    assert program.kernels == {"grouped_gemm": 2}
    assert "transpose" not in program.opcodes
    # XLA computes only the cotangents for the kernels: it rounds them to bfloat16.
    assert all(" = bf16[" in text for text in program.computed_operands())
    assert len(program.computed_operands()) == len(shapes)


def test_c_is_updated_in_place_if_it_may_be(h200):
    """c is not copied, because the program itself computes c and has no other use for it."""
    lhs, rhs = arrays([(64, 32, 128)])

    def accumulate(lhs, rhs, c):
        return jgg.grouped_gemm(lhs, rhs, [x * 2 for x in c], beta=0.5)

    program = compiled(h200, accumulate, lhs, rhs, [jax.ShapeDtypeStruct((64, 128), jnp.float32)])
    (call,) = [x for x in program.calls]
    assert call.text.count("output_to_operand_aliasing") == 1
    assert not any(instruction.opcode == "copy" for instruction in program.entry)


def test_traced_scales_cost_no_copy_of_the_operands(h200):
    lhs, rhs = arrays(SHAPES)
    program = compiled(
        h200,
        lambda lhs, rhs, alpha: jgg.grouped_gemm(lhs, rhs, alpha=alpha),
        lhs,
        rhs,
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    assert program.kernels == {"grouped_gemm": 1}
    # Only the scales are computed: one number for each matrix.
    assert all(" = f32[7]" in text for text in program.computed_operands())


def test_rows_off_16_bytes_are_padded(h200):
    program = compiled(h200, jgg.grouped_gemm, *arrays([(64, 10, 64), (64, 64, 64)]))
    assert program.kernels == {"grouped_gemm": 1}
    # Only the first problem is padded: rows of lhs have k = 10 elements, and rhs gets the same k.
    assert len(program.computed_operands()) == 2


def test_products_of_nothing_launch_nothing(h200):
    program = compiled(h200, jgg.grouped_gemm, *arrays([(0, 8, 8), (8, 0, 8), (8, 8, 0)]))
    assert not program.kernels


ODD_SHAPES = [(37, 51, 29), (1, 1, 1), (3, 130, 7, 5)]


@FORMS
@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.complex128])
def test_fp64_kernel_on_the_arrays_as_they_are(dtype, transpose_lhs, transpose_rhs, h200):
    """The kernel takes operands of any size without padding, and scales are constants."""
    options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    with jax.enable_x64(True):
        call = partial(jgg.grouped_gemm, alpha=0.5, precision="highest", **options)
        program = compiled(h200, call, *arrays(ODD_SHAPES, **options, dtype=dtype))
    assert program.kernels == {"grouped_gemm_fp64": 1}
    assert not program.computed_operands()
    assert program.temporary_bytes <= 512
    assert not {"copy", "transpose", "pad", "slice"} & set(program.opcodes)
    (call,) = program.calls
    for name, value in options.items():
        assert f"{name} = {str(value).lower()}" in call.text


def test_fp64_c_is_updated_in_place_if_it_may_be(h200):
    def accumulate(lhs, rhs, c, alpha):
        return jgg.grouped_gemm(lhs, rhs, [x * 2 for x in c], alpha=alpha, beta=0.5j)

    with jax.enable_x64(True):
        lhs, rhs = arrays(ODD_SHAPES, dtype=np.complex128)
        c = [jax.ShapeDtypeStruct((*g, m, n), np.complex128) for *g, m, k, n in ODD_SHAPES]
        alpha = jax.ShapeDtypeStruct((), np.float64)
        program = compiled(h200, accumulate, lhs, rhs, c, alpha)
    assert program.kernels == {"grouped_gemm_fp64": 1}
    (call,) = program.calls
    assert "output_to_operand_aliasing" in call.text
    assert not any(instruction.opcode == "copy" for instruction in program.entry)


def test_fp64_launches(h200):
    """A list of over 128 problems takes several calls. The call of a long stack launches twice."""
    with jax.enable_x64(True):
        program = compiled(h200, jgg.grouped_gemm, *arrays([(9, 9, 9)] * 129, dtype=np.float64))
        assert program.kernels == {"grouped_gemm_fp64": 2}
        program = compiled(h200, jgg.grouped_gemm, *arrays([(129, 9, 9, 9)], dtype=np.float64))
        assert program.kernels == {"grouped_gemm_fp64": 1}


def test_fp64_gradients_transpose_nothing(h200):
    def loss(lhs, rhs, weights):
        outs = jgg.grouped_gemm(lhs, rhs, transpose_rhs=True)
        return sum(jnp.vdot(out, w) for out, w in zip(outs, weights, strict=True))

    with jax.enable_x64(True):
        lhs, rhs = arrays(ODD_SHAPES, transpose_rhs=True, dtype=np.float64)
        weights = [jax.ShapeDtypeStruct((*g, m, n), np.float64) for *g, m, _, n in ODD_SHAPES]
        program = compiled(h200, jax.grad(loss, (0, 1)), lhs, rhs, weights)
    assert program.kernels == {"grouped_gemm_fp64": 2}
    assert not {"transpose", "pad"} & set(program.opcodes)


@FORMS
@pytest.mark.parametrize("precision, terms", [(None, 1), ("highest", 3)])
def test_float32_kernel_on_the_arrays_as_they_are(
    precision, terms, transpose_lhs, transpose_rhs, h200
):
    """The custom call splits operands into parts itself, in a workspace that XLA allocates."""
    options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    call = partial(jgg.grouped_gemm, precision=precision, alpha=0.5, **options)
    lists = arrays(SHAPES, **options, dtype=jnp.float32)
    program = compiled(h200, call, *lists)
    assert program.kernels == {"grouped_gemm_f32": 1}
    assert not program.computed_operands()
    assert not {"copy", "transpose", "pad", "slice"} & set(program.opcodes)
    assert f"terms = {terms} : i32" in program.calls[0].text
    (plan,) = jgg.explain(call, *lists).plans
    (launch,) = plan.launches
    assert launch.parts_bytes <= program.temporary_bytes <= launch.parts_bytes + 768


def test_float32_c_is_updated_in_place_if_it_may_be(h200):
    def accumulate(lhs, rhs, c):
        c = [x * 2 for x in c]
        return jgg.grouped_gemm(lhs, rhs, c, beta=0.5, scheduler="device", precision="highest")

    lhs, rhs = arrays(SHAPES[:2], dtype=jnp.float32)
    c = [jax.ShapeDtypeStruct((m, n), jnp.float32) for m, _, n in SHAPES[:2]]
    program = compiled(h200, accumulate, lhs, rhs, c)
    assert program.kernels == {"grouped_gemm_f32": 1}
    (call,) = program.calls
    # Each result, which the workspace precedes, has the memory of its c.
    for result, operand in ((1, 4), (2, 5)):
        assert f"{{{result}}}: ({operand}, {{}})" in call.text
    assert not any(instruction.opcode == "copy" for instruction in program.entry)


def test_float32_launches_share_their_memory(h200):
    """Every 79 problems have a launch, whose parts reuse the memory of the previous launch."""
    lists = arrays([(64, 64, 64)] * 158, dtype=jnp.float32)
    program = compiled(h200, jgg.grouped_gemm, *lists)
    assert program.kernels == {"grouped_gemm_f32": 2}
    (plan,) = jgg.explain(jgg.grouped_gemm, *lists).plans
    assert program.temporary_bytes < 0.75 * sum(x.parts_bytes for x in plan.launches)


def test_float32_gradients_transpose_nothing(h200):
    def loss(lhs, rhs, weights):
        outs = jgg.grouped_gemm(lhs, rhs, precision="highest")
        return sum(jnp.vdot(out, w) for out, w in zip(outs, weights, strict=True))

    shapes = [(128, 64, 256), (64, 8, 8)]
    lhs, rhs = arrays(shapes, dtype=jnp.float32)
    weights = [jax.ShapeDtypeStruct((m, n), jnp.float32) for m, _, n in shapes]
    program = compiled(h200, jax.grad(loss, (0, 1)), lhs, rhs, weights)
    assert program.kernels == {"grouped_gemm_f32": 2}
    assert "transpose" not in program.opcodes


def test_complex64_runs_the_reference(h200):
    program = compiled(h200, jgg.grouped_gemm, *arrays([(64, 64, 64)], dtype=np.complex64))
    assert not program.kernels
