"""What XLA makes of rank-k updates for an H200, compiled on a machine that need not have one."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from aot import Target
from updates import SYR2K, SYRK

import jax_grouped_gemm as jgg
from jax_grouped_gemm.optim import orthogonalize

TARGET_CONFIG = Path(__file__).parent / "data" / "h200_target_config.txtpb"
BOTH = pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)


@pytest.fixture(scope="module")
def h200(extension) -> Target:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA plugin is not installed")
    return Target(TARGET_CONFIG.read_text())


def assert_only_scales_are_computed(program, matrices: int) -> None:
    """No operand is copied: only alpha and beta, a number for each matrix, are written out."""
    assert all(f" = f32[{matrices}]" in text for text in program.computed_operands())


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("symmetrize", [False, True])
@BOTH
def test_one_kernel_on_the_arrays_as_they_are(update, symmetrize, transpose, h200):
    call = partial(update, symmetrize_output=symmetrize, transpose=transpose)
    program = h200.compile(lambda a, b: call(a, b), array(3, 64, 64), array(3, 64, 64))
    assert program.kernels == {"rank_k": 1}
    assert_only_scales_are_computed(program, 3)
    assert program.temporary_bytes <= 256


def test_one_kernel_for_a_list(h200):
    shapes = [(64, 32), (128, 8), (5, 256, 64)]
    program = h200.compile(
        lambda *a: jgg.grouped_syrk(list(a)), *(array(*shape) for shape in shapes)
    )
    assert program.kernels == {"rank_k": 1}
    assert_only_scales_are_computed(program, 7)


def test_c_is_updated_in_place_if_it_may_be(h200):
    """Where the program itself makes c and has no other use for it, nothing is copied."""
    a = array(3, 64, 64)

    def accumulate(a, c):
        return jgg.grouped_syrk(a, c * 2, beta=0.5)

    program = h200.compile(accumulate, a, array(3, 64, 64, dtype=jnp.float32))
    (call,) = program.calls
    assert "output_to_operand_aliasing" in call.text
    assert not any(instruction.opcode == "copy" for instruction in program.entry)


def test_traced_scales_cost_no_copy_of_the_operands(h200):
    def function(a, alpha):
        return jgg.grouped_syrk(a, alpha=alpha)

    program = h200.compile(function, array(3, 64, 64), array(dtype=jnp.float32))
    assert program.kernels == {"rank_k": 1}
    assert_only_scales_are_computed(program, 3)


def test_float32_runs_the_reference(h200):
    program = h200.compile(jgg.grouped_syrk, array(3, 64, 64, dtype=jnp.float32))
    assert not program.kernels


def test_muon_has_two_kernels_a_step_for_all_matrices(h200):
    shapes = [(128, 256), (256, 128), (4, 64, 64)]
    program = h200.compile(
        lambda *x: orthogonalize(list(x), steps=3),
        *(array(*shape, dtype=jnp.float32) for shape in shapes),
    )
    assert program.kernels == {"rank_k": 6}
