"""Plans of float32 lists of products and symmetric updates, and the errors that tests allow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import F32
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.ops import random
from tests.support.plans import how
from tests.support.products import random_list
from tests.support.updates import SYR2K, SYRK, check_real

BOTH = pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)
TERMS = pytest.mark.parametrize("precision, terms", [(None, 1), ("high", 3), ("highest", 3)])


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def only_plan(function, *arguments):
    (plan,) = jgg.explain(function, *arguments).plans
    return plan


def pairs(shapes):
    """Returns the lhs and rhs of products whose shapes are (m, k, n) or (g, m, k, n)."""
    lhs = [array(*g, m, k) for *g, m, k, n in shapes]
    return lhs, [array(*g, k, n) for *g, m, k, n in shapes]


class TestUpdates:
    def plan(self, update, *shapes, **options):
        arrays = [array(*shape) for shape in shapes]
        update = partial(update, **dict(implementation="cuda") | options)
        return only_plan(lambda x: update(x, x), arrays)

    @TERMS
    @BOTH
    def test_precision_decides_the_terms(self, update, precision, terms):
        plan = self.plan(update, (3, 64, 32), precision=precision)
        assert (how(plan), plan.reason, plan.terms) == ("kernel", "", terms)
        assert f"{terms} products of float16 parts" in str(plan)

    @TERMS
    @BOTH
    def test_workspace_holds_the_parts(self, update, precision, terms):
        plan = self.plan(update, (3, 64, 32), (128, 8), precision=precision)
        elements = (3 * 64 * 32 + 128 * 8) * (2 if update is SYR2K else 1)
        parts = 2 * elements * (1 if terms == 1 else 2)
        assert parts <= plan.workspace_bytes <= parts + 256
        assert str(plan.workspace_bytes) in str(plan)

    @TERMS
    @BOTH
    def test_workspace_is_what_the_handler_wants(self, update, precision, terms, schedules, rng):
        shapes = [(int(g), *map(int, s)) for g, *s in rng.integers(1, 300, (70, 3))]
        shapes[3] = (0, 8, 8)
        shapes[5] = (2, 0, 8)
        shapes[7] = (2, 8, 0)
        plan = self.plan(update, *shapes, precision=precision)
        stacks = [(s.g, s.n * s.k) for s in plan.kernel_problem.stacks if 0 not in (s.g, s.n)]
        operands = stacks * (2 if update is SYR2K else 1)
        assert plan.workspace_bytes == schedules.float32_list_workspace_bytes(operands, terms)
        # Passes over matrices take eight elements at a time.
        assert all(elements > 0 and elements % 8 == 0 for _, elements in operands)

    @pytest.mark.parametrize(
        "n, k, padded", [(64, 32, (64, 32)), (36, 36, (36, 40)), (7, 1, (8, 8))]
    )
    def test_rows_of_parts_are_multiples_of_16_bytes(self, n, k, padded):
        plan = self.plan(SYRK, (2, n, k))
        (stack,) = plan.kernel_problem.stacks
        assert (stack.n, stack.k) == padded
        assert how(plan) == ("kernel" if (n, k) == padded else "copies")
        assert (n, k) == padded or "of float16 parts" in plan.reason

    def test_stored_transposed(self):
        plan = self.plan(SYRK, (2, 36, 36), transpose=True)
        (stack,) = plan.kernel_problem.stacks
        assert (stack.n, stack.k) == (40, 36)

    def test_result_is_float32_to_the_kernel(self):
        plan = self.plan(SYRK, (2, 64, 64), preferred_element_type=jnp.bfloat16)
        assert plan.kernel_problem.result_dtype == F32
        assert how(plan) == "kernel"

    @BOTH
    def test_gradients_have_the_precision_of_the_update(self, update):
        def loss(a, b):
            return jnp.sum(update(a, b, precision="highest", implementation="cuda"))

        # The derivatives of an update are rank-2k updates or plain products.
        explanation = jgg.explain(
            lambda a, b: jax.jvp(loss, (a, b), (a, b)), *[array(2, 64, 32)] * 2
        )
        assert explanation.plans and all(plan.terms == 3 for plan in explanation.plans)

    @pytest.mark.parametrize(
        "options, said",
        [
            (dict(implementation="xla"), "was asked for"),
            (dict(precision="BF16_BF16_F32_X3"), "X3"),
            (dict(preferred_element_type=jnp.complex64), "float32 -> complex64"),
        ],
    )
    def test_reference(self, options, said):
        plan = self.plan(SYRK, (2, 64, 64), **options)
        assert how(plan) == "xla" and said in plan.reason and plan.terms == 0

    def test_other_operands_have_no_parts(self):
        plan = only_plan(
            partial(jgg.grouped_syrk, precision="highest"), array(2, 64, 64, dtype=jnp.bfloat16)
        )
        assert plan.terms == 0 and plan.workspace_bytes == 0 and "parts" not in str(plan)


class TestProducts:
    SHAPES = ((128, 64, 256), (64, 8, 8), (3, 32, 16, 40), (2048, 64, 4096))

    def plan(self, shapes=SHAPES, **options):
        return only_plan(partial(jgg.grouped_gemm, **options), *pairs(shapes))

    @TERMS
    def test_precision_decides_the_terms(self, precision, terms):
        plan = self.plan(precision=precision)
        assert (how(plan), plan.reason, plan.terms) == ("kernel", "", terms)
        assert f"{terms} products of float16 parts" in str(plan)
        assert 0 < plan.utilization <= 1

    @TERMS
    def test_workspace_is_what_the_handler_wants(self, precision, terms, schedules, rng):
        shapes = [tuple(map(int, s)) for s in rng.integers(1, 300, (100, 4))]
        shapes[3] = (0, 8, 8, 8)
        shapes[5] = (2, 8, 0, 8)
        plan = self.plan(shapes, precision=precision)
        assert len(plan.launches) == 2
        for launch in plan.launches:
            entries = [plan.kernel_problem.entries[i] for i in launch.problems]
            operands = [(e.g, e.m * e.k) for e in entries] + [(e.g, e.k * e.n) for e in entries]
            wanted = schedules.float32_list_workspace_bytes(operands, terms)
            assert launch.parts_bytes == wanted
            assert launch.workspace_bytes == wanted + launch.schedule.nbytes
            assert all(elements > 0 and elements % 8 == 0 for _, elements in operands)
        assert plan.workspace_bytes == sum(x.workspace_bytes for x in plan.launches)

    def test_steps_are_those_of_all_terms(self):
        once, thrice = (self.plan([(128, 4096, 256)], precision=p) for p in ("default", "highest"))
        (once,), (thrice,) = once.launches, thrice.launches
        assert thrice.tile == once.tile
        assert 2.9 < thrice.steps / once.steps < 3

    @pytest.mark.parametrize("form", list(np.ndindex(2, 2)))
    def test_rows_of_parts_are_multiples_of_16_bytes(self, form):
        transposes = dict(zip(("transpose_lhs", "transpose_rhs"), map(bool, form), strict=True))
        lhs, rhs = array(36, 36), array(36, 36)
        plan = only_plan(partial(jgg.grouped_gemm, **transposes), [lhs], [rhs])
        (entry,) = plan.kernel_problem.entries
        contiguous = {"m" if form[0] else "k", "k" if form[1] else "n"}
        for name in "mkn":
            assert getattr(entry, name) == (40 if name in contiguous else 36)
        assert how(plan) == "copies" and "of float16 parts" in plan.reason

    def test_gradients_have_the_precision_of_the_products(self):
        def loss(lhs, rhs):
            return sum(jnp.sum(out) for out in jgg.grouped_gemm(lhs, rhs, precision="highest"))

        plans = jgg.explain(jax.grad(loss, (0, 1)), *pairs(self.SHAPES)).plans
        assert len(plans) == 3 and all(plan.terms == 3 for plan in plans)

    def test_other_operands_have_no_parts(self):
        lhs, rhs = array(64, 64, dtype=jnp.bfloat16), array(64, 64, dtype=jnp.bfloat16)
        plan = only_plan(partial(jgg.grouped_gemm, precision="highest"), [lhs], [rhs])
        assert plan.terms == 0 and plan.workspace_bytes == 0 and "parts" not in str(plan)


def tf32(x):
    """Rounds float32 operands to 11 bits, the best that tensor cores do without parts."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


class TestAllowedErrors:
    """The GPU tests allow the errors of float32, and those of TF32 only at default precision."""

    @BOTH
    @pytest.mark.parametrize("k", [8, 72, 1032])
    def test_updates(self, update, k, rng):
        a, b = random(rng, (2, 136, k), F32), random(rng, (2, 136, k), F32)

        def product(a, b):
            out = update.exact(np.float64(a), np.float64(b)).astype(np.float32)
            return np.tril(out)

        highest = dict(product_error=PRODUCT_ERROR["highest"])
        check_real(update, product(a, b), a, b, **highest)
        rounded = product(tf32(a), tf32(b))
        check_real(update, rounded, a, b, product_error=PRODUCT_ERROR["default"])
        with pytest.raises(AssertionError):
            check_real(update, rounded, a, b, **highest)

    @pytest.mark.parametrize("k", [8, 72, 1032])
    def test_products(self, k, rng):
        problems = random_list(rng, [(136, k, 200)], F32)
        (lhs,), (rhs,) = problems.lhs, problems.rhs
        highest = dict(product_error=PRODUCT_ERROR["highest"])
        problems.check([np.matmul(lhs, rhs)], **highest)
        rounded = np.matmul(tf32(lhs), tf32(rhs))
        problems.check([rounded], product_error=PRODUCT_ERROR["default"])
        with pytest.raises(AssertionError):
            problems.check([rounded], **highest)
