"""The float32 products that take the kernel for few rows, and their program on an H200."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.ragged.tiles import SWAPPED_FLOAT32_TILE
from tests.aot.test_ragged_dot import assert_only_workspaces, cotangents, forward, shapes
from tests.support.ops import CONTRACTING, NONCONTRACTING
from tests.support.plans import how

G = 4
MAJORS = pytest.mark.parametrize("transpose_rhs", [False, True])


def plans(function, *arguments):
    return jgg.explain(function, *arguments).plans


@MAJORS
@pytest.mark.parametrize(
    "rows, tile",
    [(1, SWAPPED_FLOAT32_TILE), (64, SWAPPED_FLOAT32_TILE), (65, SWAPPED_FLOAT32_TILE)],
)
def test_is_chosen_by_the_rows_of_a_group(rows, tile, transpose_rhs):
    *arguments, _ = shapes(NONCONTRACTING, jnp.float32, m=rows * G, transpose_rhs=transpose_rhs)
    (plan,) = plans(forward(NONCONTRACTING, transpose_rhs=transpose_rhs), *arguments)
    assert plan.tile == tile


@pytest.mark.parametrize(
    "op, dtype, options",
    [
        (NONCONTRACTING, jnp.bfloat16, {}),
        (CONTRACTING, jnp.float32, {}),
    ],
)
def test_others_have_the_other_kernels(op, dtype, options):
    *arguments, _ = shapes(op, dtype, m=8 * G, **options)
    (plan,) = plans(forward(op, **options), *arguments)
    assert plan.tile != SWAPPED_FLOAT32_TILE


@pytest.mark.parametrize(
    "precision, said",
    [
        ("default", "3 products of bfloat16 parts, as accurate as TF32"),
        ("highest", "6 products of bfloat16 parts, as accurate as float32"),
    ],
)
def test_says_how_it_multiplies(precision, said):
    *arguments, _ = shapes(NONCONTRACTING, jnp.float32, m=8 * G)
    (plan,) = plans(forward(NONCONTRACTING, precision=precision), *arguments)
    assert said in str(plan)


@MAJORS
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_is_one_call_without_parts_in_memory(transpose_rhs, precision, h200):
    options = dict(transpose_rhs=transpose_rhs, precision=precision)
    *arguments, _ = shapes(NONCONTRACTING, jnp.float32, m=8 * G, transpose_rhs=transpose_rhs)
    program = h200.compile(forward(NONCONTRACTING, **options), *arguments)
    assert program.kernels == {"ragged_noncontracting": 1}
    assert_only_workspaces(program, workspace_bytes=16)


@MAJORS
def test_cotangents_of_rows_have_it_too(transpose_rhs, h200):
    arguments = shapes(NONCONTRACTING, jnp.float32, m=8 * G, transpose_rhs=transpose_rhs)
    function = cotangents(NONCONTRACTING, wrt=(0,), transpose_rhs=transpose_rhs)
    program = h200.compile(function, *arguments)
    (call,) = program.calls
    assert f"tile_m = {SWAPPED_FLOAT32_TILE.tile_m} : i32" in call.text


def test_can_be_asked_for():
    arguments = shapes(NONCONTRACTING, jnp.float32, m=100 * G)[:3]
    with jgg.use_tiles(forward=SWAPPED_FLOAT32_TILE):
        (plan,) = plans(jgg.ragged_dot, *arguments)
    assert plan.tile == SWAPPED_FLOAT32_TILE


def test_contiguous_rows_are_transposed_for_it():
    arguments = shapes(NONCONTRACTING, jnp.float32, m=8 * G)[:3]
    lhs = jax.ShapeDtypeStruct(arguments[0].shape[::-1], jnp.float32)
    call = partial(NONCONTRACTING.call.__wrapped__, transpose_lhs=True)
    (plan,) = plans(call, lhs, *arguments[1:])
    assert (plan.tile, how(plan)) == (SWAPPED_FLOAT32_TILE, "copies")
