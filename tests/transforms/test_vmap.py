"""vmap of both ops over any of their operands, against a loop over the batch."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.dot.primitive import weight_gradient
from jax_grouped_gemm._src.fp8.products import Fp8Products
from jax_grouped_gemm._src.ragged import reference
from jax_grouped_gemm._src.tile_choices import TileChoices
from tests.support import oracle
from tests.support.ops import BOTH_OPS, NONCONTRACTING, random, swap

M, K, N, G, B, C = 23, 4, 5, 3, 2, 3
LHS, RHS, SIZES = 0, 1, 2

# Which of (lhs, rhs, group_sizes) are mapped: every combination with at least one of them.
PATTERNS = [p for p in product((False, True), repeat=3) if any(p)]
ALL_PATTERNS = pytest.mark.parametrize(
    "mapped", PATTERNS, ids=lambda p: "-".join(np.array(["lhs", "rhs", "sizes"])[list(p)])
)
ALL_MAJORS = pytest.mark.parametrize(
    "majors",
    [dict(transpose_lhs=a, transpose_rhs=b) for a in (False, True) for b in (False, True)],
    ids=lambda majors: "".join("t" if t else "n" for t in majors.values()),
)


def operands(op, rng, *batches):
    """Returns random lhs, rhs and group sizes, each with its own leading batch dimensions.

    Most lists of sizes leave a tail; some ask for more rows than there are.
    """
    lhs, rhs, _ = op.shapes(M, K, N, G)
    return [
        random(rng, (*batches[LHS], *lhs), np.float32),
        random(rng, (*batches[RHS], *rhs), np.float32),
        rng.integers(-1, M // 2, (*batches[SIZES], G), dtype=np.int32),
    ]


def one_batch(mapped):
    """Returns batch dimensions of the operands, some of which are mapped over one axis."""
    return [(B,) if m else () for m in mapped]


# Both forms of the reference have the same batching rule, so each is tested with one of the two
# patterns that map only lhs or only rhs.
@BOTH_OPS
@pytest.mark.parametrize(
    "mapped, form",
    [
        ((True, False, False), "auto"),
        ((False, True, False), "tiles"),
        ((True,) * 3, "auto"),
        ((True,) * 3, "tiles"),
    ],
)
@ALL_MAJORS
def test_any_major(op, mapped, form, majors, rng):
    with reference.form(form):
        lhs, rhs, sizes = operands(op, rng, *one_batch(mapped))
        stored = swap(lhs, majors["transpose_lhs"]), swap(rhs, majors["transpose_rhs"]), sizes
        in_axes = [0 if m else None for m in mapped]
        out = jax.vmap(partial(op.call, **majors), in_axes)(*stored)
    oracle.check(out, op.exact(lhs, rhs, sizes))


@pytest.mark.usefixtures("either_form")
class TestOneAxis:
    @BOTH_OPS
    @ALL_PATTERNS
    def test_any_position(self, op, mapped, rng):
        inputs = operands(op, rng, *one_batch(mapped))
        positions = [int(rng.integers(x.ndim)) for x in inputs]
        in_axes = [axis if m else None for axis, m in zip(positions, mapped, strict=True)]
        moved = [
            x if axis is None else np.moveaxis(x, 0, axis)
            for x, axis in zip(inputs, in_axes, strict=True)
        ]
        out = jax.vmap(op.call, in_axes, out_axes=-1)(*moved)
        oracle.check(np.moveaxis(out, -1, 0), op.exact(*inputs))

    @BOTH_OPS
    @ALL_PATTERNS
    def test_is_one_product(self, op, mapped, rng):
        in_axes = [0 if m else None for m in mapped]
        inputs = operands(op, rng, *one_batch(mapped))
        (plan,) = jgg.explain(jax.vmap(op.call, in_axes), *inputs).plans
        one_factor = mapped in ((True, False, False), (False, True, False))
        assert plan.problem.batch == (() if one_factor else (B,))

    @BOTH_OPS
    @ALL_PATTERNS
    def test_empty(self, op, mapped, rng):
        inputs = operands(op, rng, *one_batch(mapped))
        inputs = [x[:0] if m else x for x, m in zip(inputs, mapped, strict=True)]
        out = jax.vmap(op.call, [0 if m else None for m in mapped])(*inputs)
        assert out.shape == (0, *op.shapes(M, K, N, G)[2])

    @pytest.mark.parametrize("others", [(), (LHS,), (RHS,), (SIZES,), (LHS, RHS, SIZES)])
    def test_group_offset(self, others, rng):
        batches = one_batch([i in others for i in range(3)])
        lhs, rhs, sizes = operands(NONCONTRACTING, rng, *batches)
        rhs, offsets = rhs[..., :2, :, :], rng.integers(-1, G, B, dtype=np.int32)
        in_axes = [*(0 if i in others else None for i in range(3)), 0]
        out = jax.vmap(NONCONTRACTING.call, in_axes)(lhs, rhs, sizes, offsets)
        oracle.check(out, NONCONTRACTING.exact(lhs, rhs, sizes, offsets))


class TestNested:
    @BOTH_OPS
    @ALL_PATTERNS
    @pytest.mark.parametrize("inner", [(True, False, False), (False, True, True)])
    def test_two_axes(self, op, mapped, inner, rng):
        batches = [(B,) * o + (C,) * i for o, i in zip(mapped, inner, strict=True)]
        inputs = operands(op, rng, *batches)
        in_axes = [[0 if m else None for m in pattern] for pattern in (inner, mapped)]
        out = jax.vmap(jax.vmap(op.call, in_axes[0]), in_axes[1])(*inputs)

        def all_batches(x, outer, inner):
            shape = x.shape[outer + inner :]
            x = x.reshape(B if outer else 1, C if inner else 1, *shape)
            return np.broadcast_to(x, (B, C, *shape)).reshape(B * C, *shape)

        exact = op.exact(*map(all_batches, inputs, mapped, inner))
        oracle.check(out.reshape(exact.value.shape), exact)

    @BOTH_OPS
    def test_three_axes(self, op, rng):
        lhs, rhs, sizes = operands(op, rng, (C, B), (), (B,))
        call = jax.vmap(jax.vmap(op.call, (0, None, 0)), (0, None, None))
        out = jax.vmap(call, (None, -1, None), -1)(lhs, np.stack([rhs, 2 * rhs], -1), sizes)
        exact = op.exact(
            lhs.reshape(C * B, *lhs.shape[2:]), np.stack([rhs] * C * B), np.tile(sizes, (C, 1))
        )
        oracle.check(out[..., 0].reshape(exact.value.shape), exact)
        np.testing.assert_allclose(out[..., 1], 2 * out[..., 0], rtol=1e-5)


class TestGradients:
    @BOTH_OPS
    @ALL_PATTERNS
    def test_of_the_mapped_op(self, op, mapped, rng):
        lhs, rhs, sizes = operands(op, rng, *one_batch(mapped))
        cotangent = random(rng, (B, *op.shapes(M, K, N, G)[2]), np.float32)
        call = jax.vmap(op.call, [0 if m else None for m in mapped])

        @jax.jit
        def cotangents(lhs, rhs):
            return jax.vjp(lambda lhs, rhs: call(lhs, rhs, sizes), lhs, rhs)[1](cotangent)

        got = cotangents(lhs, rhs)
        exact = op.exact_cotangents(lhs, rhs, sizes, cotangent)
        for ours, want, m in zip(got, exact, mapped, strict=False):
            # If an operand is not mapped, its gradient sums the gradients of all batch elements.
            want = want.value if m else want.value.sum(0)
            np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)

    @BOTH_OPS
    @ALL_PATTERNS
    def test_mapped(self, op, mapped, rng):
        lhs, rhs, sizes = operands(op, rng, *one_batch(mapped))
        cotangent = random(rng, op.shapes(M, K, N, G)[2], np.float32)
        in_axes = [*(0 if m else None for m in mapped), None]
        got = jax.vmap(op.cotangents, in_axes)(lhs, rhs, sizes, cotangent)
        all_lhs, all_rhs, all_sizes, all_cotangents = (
            np.stack([x] * B) if axis is None else x
            for x, axis in zip((lhs, rhs, sizes, cotangent), in_axes, strict=True)
        )
        exact = op.exact_cotangents(all_lhs, all_rhs, all_sizes, all_cotangents)
        oracle.check_all(got, exact)

    @BOTH_OPS
    def test_shared_operand_collects_in_float32(self, op, rng):
        lhs, rhs, sizes = operands(op, rng, (64,), (), (64,))
        cotangent = random(rng, (64, *op.shapes(M, K, N, G)[2]), jnp.bfloat16)
        lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
        call = jax.vmap(op.call, (0, None, 0))
        (got,) = jax.vjp(lambda rhs: call(lhs, rhs, sizes), rhs)[1](cotangent)
        exact = op.exact_cotangents(lhs, rhs, sizes, cotangent)[RHS]
        want, magnitude = exact.value.sum(0), exact.magnitude.sum(0)
        assert got.dtype == jnp.bfloat16
        # Each element may be rounded to bfloat16 once, besides the roundings of a float32 sum.
        error = np.abs(np.asarray(got, np.float64) - want)
        assert (error <= 2**-8 * np.abs(want) + 2**-16 * magnitude).all()


def test_weight_gradients_of_rows_that_devices_quantise(rng):
    products = Fp8Products(jgg.Recipe(), None, TileChoices())
    offset, sizes = jnp.zeros(1, jnp.int32), jnp.array([100, 28], jnp.int32)

    def gradient(lhs, rhs):
        operands = lhs, rhs, sizes, offset, np.dtype(np.float32)
        return weight_gradient(products, *operands, num_groups=2)

    lhs, rhs = (jnp.asarray(random(rng, (B, 128, n), jnp.bfloat16)) for n in (256, 128))
    one = jax.jit(gradient)
    want = np.stack([one(*pair) for pair in zip(lhs, rhs, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(gradient))(lhs, rhs), want)
