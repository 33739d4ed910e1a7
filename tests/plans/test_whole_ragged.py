"""The ragged products and lists that plans leave to XLA because it is faster for them."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src import fallback
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged import plan as ragged_plan
from jax_grouped_gemm._src.ragged import whole
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F16, F32, F64
from tests.support.ops import CONTRACTING, OPS, random, swap
from tests.support.plans import how

pytestmark = pytest.mark.plans_as_users_get_them

# Groups, rows, k and n of products. For the first list, XLA took less than .8 of the kernel's time
# on an H200. For the second list it took longer. tests/benchmarks/test_fit.py has all of them.
FASTER_IN_XLA = [
    ("forward", (2, 8, 1856, 2816), BF16),
    ("dgrad", (1, 512, 1600, 5312), BF16),
    ("wgrad", (2, 64, 384, 512), BF16),
    ("forward", (2, 4, 128, 4864), F32),
    ("dgrad", (1, 1, 960, 3400), F32),
    # XLA makes 48 MiB of copies, as it does for `jax.lax.ragged_dot`.
    ("wgrad", (128, 256, 320, 64), F32),
]
FASTER_IN_OURS = [
    ("forward", (8, 4096, 2048, 1024), BF16),
    ("forward", (1, 8192, 4096, 4096), BF16),
    ("dgrad", (16, 8192, 952, 6656), BF16),
    ("wgrad", (128, 128, 448, 128), BF16),
    ("forward", (4, 512, 296, 448), F32),
    ("wgrad", (32, 512, 896, 384), F32),
    # k is large and no multiple of 64, so XLA pads the operands that it cuts.
    ("forward", (8, 256, 2552, 576), BF16),
]


def plan(op, sizes, dtype, **options):
    g, m, k, n = sizes
    x, w, dy = (jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (g, k, n), (m, n)))
    group_sizes = jax.ShapeDtypeStruct((g,), jnp.int32)

    def product(x, w, group_sizes):
        return jgg.ragged_dot(x, w, group_sizes, **options)

    if op == "forward":
        return jgg.explain(product, x, w, group_sizes).plans[0]

    def gradient(x, w, dy, group_sizes):
        _, vjp = jax.vjp(lambda x, w: product(x, w, group_sizes), x, w)
        return vjp(dy)[op == "wgrad"]

    plans = jgg.explain(gradient, x, w, dy, group_sizes).plans
    (found,) = (plan for plan in plans if plan.product == op)
    return found


@pytest.mark.parametrize("op, sizes, dtype", FASTER_IN_XLA)
def test_xla_multiplies_what_it_was_measured_to_multiply_faster(op, sizes, dtype):
    found = plan(op, sizes, dtype)
    assert how(found) == "xla_all_rows" and "XLA's products of all rows" in str(found)


@pytest.mark.parametrize("op, sizes, dtype", FASTER_IN_OURS)
def test_kernels_run_where_they_were_measured_to_be_faster(op, sizes, dtype):
    assert how(plan(op, sizes, dtype)) == "kernel"


@pytest.mark.parametrize("op, sizes, dtype", FASTER_IN_XLA)
def test_cuda_is_always_a_kernel(op, sizes, dtype):
    assert how(plan(op, sizes, dtype, implementation="cuda")) == "kernel"


def test_a_tile_that_is_asked_for_is_a_kernel():
    with jgg.use_tiles(forward=DEFAULT_TILE):
        assert how(plan("forward", (2, 8, 1856, 2816), BF16)) == "kernel"


@pytest.mark.parametrize("op, sizes, dtype", FASTER_IN_XLA + FASTER_IN_OURS)
def test_policies(op, sizes, dtype):
    """A policy decides unless the call names an implementation."""
    with fallback.policy("kernels"):
        assert how(plan(op, sizes, dtype)) == "kernel"
        assert how(plan(op, sizes, dtype, implementation="xla")) == "xla"
    with fallback.policy("xla"):
        assert how(plan(op, sizes, dtype, implementation="cuda")) == "kernel"


def test_copies_of_rows_are_bounded():
    with fallback.policy("xla"):
        assert how(plan("wgrad", (256, 256, 200, 64), F32)) == "kernel"  # 66 MiB of copies
        assert how(plan("wgrad", (240, 240, 200, 64), F32)) == "xla_all_rows"


def test_a_policy_is_one():
    with pytest.raises(ValueError, match="'auto', 'kernels', 'xla'.*got 'fast'"):
        fallback.policy("fast").__enter__()


def test_a_policy_holds_for_gradients_and_programs_of_its_calls():
    """A jitted function is traced again for each policy, and its gradients have its policy."""
    x, w = jnp.ones((8, 1856), BF16), jnp.ones((2, 1856, 2816), BF16)
    sizes = jnp.array([3, 5], jnp.int32)

    @jax.jit
    def product(x, w):
        return jgg.ragged_dot(x, w, sizes)

    def policies(function, *operands):
        text = str(jax.make_jaxpr(function)(*operands))
        return set(re.findall(r"implementation=(\w+)", text))

    assert policies(product, x, w) == {"None"}
    with fallback.policy("kernels"):
        assert policies(product, x, w) == {"prefer_kernels"}
        out, pullback = jax.vjp(product, x, w)
    assert policies(pullback, out) == {"prefer_kernels"}
    assert policies(product, x, w) == {"None"}


def test_the_program_has_no_kernel_of_ours(h200):
    x, w = (jax.ShapeDtypeStruct(s, BF16) for s in ((8, 1856), (2, 1856, 2816)))
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert h200.compile(jgg.ragged_dot, x, w, sizes).kernels == {}


@pytest.mark.parametrize("transpose_lhs", [False, True])
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("op", OPS, ids=["noncontracting", "contracting"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_results_are_the_products(op, transpose_lhs, transpose_rhs, dtype, rng):
    """Results are right for windows and any sizes, with NaN in unowned rows and unused matrices."""
    for g, offset in ((1, 0), (3, 0), (3, 1), (3, -1)):
        m, k, n = 40, 24, 17
        sizes = sizes_of.any_kind(rng, m, 4) if offset else sizes_of.any_kind(rng, m, g)
        lhs, rhs, _ = (random(rng, shape, dtype) for shape in op.shapes(m, k, n, g))
        windows = oracle.group_rows(sizes, offset, g, m)
        for group, (start, end) in enumerate(windows):
            if op is not CONTRACTING and start == end:
                rhs[group] = np.nan
        owned = np.zeros(m, bool)
        for start, end in windows:
            owned[start:end] = True
        lhs[~owned] = np.nan
        options = dict(num_groups=g) if op is CONTRACTING else {}
        exact = op.exact(lhs, rhs, sizes, offset, **options)
        lhs, rhs = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
        params = dict(
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            preferred_element_type=np.dtype(dtype),
            precision=None,
            implementation=None,
        )
        make = partial(ragged_plan.plan_product, ragged_plan.noncontracting)
        if op is CONTRACTING:
            make = partial(ragged_plan.plan_product, ragged_plan.contracting)
            params["num_groups"] = g
        operands = lhs, rhs, jnp.asarray(sizes), jnp.asarray([offset], jnp.int32)
        made = make([jax.typeof(jnp.asarray(x)) for x in operands], params, H200)
        out = jax.jit(lambda *a, made=made: whole.product(made, *a))(*operands)
        oracle.check(out, exact)


LISTS = [
    ([(72, 320, 88)], BF16, "xla"),
    ([(96, 24, 40)] * 10, BF16, "kernel"),
    ([(4096, 4096, 4096)], BF16, "kernel"),
    ([(16, 64, 384), (128, 232, 960), (384, 320, 384)], F32, "xla"),
    ([(32, 432, 80), (120, 448, 24), (256, 888, 896), (72, 24, 512)] * 2, F32, "kernel"),
    ([(192, 56, 344), (88, 512, 512)], F64, "xla"),
    ([(128, 192, 72), (56, 32, 128), (32, 192, 24), (184, 32, 192)], F64, "kernel"),
]


@pytest.mark.parametrize("problems, dtype, path", LISTS)
def test_short_lists_of_small_problems_are_a_call_each(problems, dtype, path):
    lhs = [jax.ShapeDtypeStruct((m, k), dtype) for m, k, _ in problems]
    rhs = [jax.ShapeDtypeStruct((k, n), dtype) for _, k, n in problems]
    with jax.enable_x64(True):
        (found,) = jgg.explain(jgg.grouped_gemm, lhs, rhs).plans
        kernel = jgg.explain(lambda a, b: jgg.grouped_gemm(a, b, implementation="cuda"), lhs, rhs)
    assert how(found) == path
    assert ("a call each" in found.reason) == (path == "xla")
    assert how(kernel.plans[0]) == "kernel"
