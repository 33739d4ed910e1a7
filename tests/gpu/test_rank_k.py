"""The kernels for rank-k and rank-2k updates with operands of every dtype, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import BF16, F16, F32
from tests.support.families import (
    DOUBLE,
    FAMILIES,
    FLOAT32,
    OTHER,
    SIXTEEN_BITS,
    TENSOR_FLOAT,
    check_update,
    each,
    label,
    run_update,
)
from tests.support.ops import swap
from tests.support.updates import FORMS, HER2K, HERK, SYR2K, SYRK, UPDATES

SYMMETRIC = (SYRK, SYR2K)


def every(*families):
    """Parametrises a test over families and the updates that each family computes."""
    cases = [
        (family, update)
        for family in families
        for update in (UPDATES if family.is_double else SYMMETRIC)
    ]
    return pytest.mark.parametrize("family, update", cases, ids=label, indirect=["family"])


def every_tile(*families):
    """Parametrises a test like `every`, and over the tiles of 16-bit kernels."""
    cases = [
        (family, tile, update)
        for family in families
        for tile in (("wide", "fine") if family in SIXTEEN_BITS else (None,))
        for update in (UPDATES if family.is_double else SYMMETRIC)
    ]
    names, indirect = "family, rank_k_tile, update", ["family", "rank_k_tile"]
    return pytest.mark.parametrize(names, cases, ids=label, indirect=indirect)


@OTHER
@FORMS
@pytest.mark.usefixtures("rank_k_tile")
class TestStacks:
    @every_tile(*SIXTEEN_BITS)
    @pytest.mark.parametrize("result", [None, F32])
    def test_dtypes(self, family, update, result, uplo, transpose, other, rng):
        options = dict(uplo=uplo, transpose=transpose, other=other, result=result)
        check_update(family, update, rng, (3, 456, 200), **options)

    @every_tile(*TENSOR_FLOAT)
    def test_sizes(self, family, update, uplo, transpose, other, rng):
        options = dict(uplo=uplo, transpose=transpose, other=other)
        for n in (8, 64, 120, 128, 136, 256, 264, 384, 392, 520, 1032):
            check_update(family, update, rng, (2, n, int(8 * rng.integers(1, 40))), **options)

    @every_tile(*TENSOR_FLOAT)
    def test_off_16_bytes(self, family, update, uplo, transpose, other, rng):
        """Rows that TMA cannot address, of operands or of their parts, are padded."""
        options = dict(uplo=uplo, transpose=transpose, other=other, result=F32)
        for n, k in ((1, 1), (37, 51), (129, 7), (255, 333), (132, 36)):
            check_update(family, update, rng, (3, n, k), **options)


@every_tile(*TENSOR_FLOAT)
@pytest.mark.usefixtures("rank_k_tile")
def test_many_tiles_for_each_processor(family, update, rng):
    check_update(family, update, rng, (3, 2600, 200), other="mirror")


@every_tile(*FAMILIES)
@pytest.mark.usefixtures("rank_k_tile")
def test_repeats_bitwise(family, update, rng):
    shape = (5, 300, 517) if family.is_double else (5, 520, 1032)
    a, b = family.draw(rng, shape), family.draw(rng, shape)
    first = np.asarray(run_update(family, update, a, b))
    for _ in range(20):
        np.testing.assert_array_equal(run_update(family, update, a, b), first)


@every(*FAMILIES)
class TestStackOrList:
    def test_nothing_outside_of_a_matrix_is_read(self, family, update, rng):
        """Neighbours in the stack are NaN, because no tile may load across the ends of a matrix."""
        for n, k in ((72, 24), (77, 21)):
            for transpose in (False, True):
                shape = (3, k, n) if transpose else (3, n, k)
                a, b = family.draw(rng, shape), family.draw(rng, shape)
                a[0] = a[2] = b[0] = b[2] = np.nan
                options = dict(transpose=transpose)
                out = run_update(family, update, a, b, symmetrize_output=True, **options)
                inner = out[1:2], a[1:2], b[1:2]
                family.check_update(update, *inner, symmetrize=True, **options)
                assert np.isnan(np.asarray(out)[[0, 2]]).all()

    # The longest lists need more than one launch, and more than one pass over operands.
    @FORMS
    @pytest.mark.parametrize("count", [1, 4, 24, 70, 180])
    def test_lists(self, family, update, uplo, transpose, count, rng):
        """Problems have unequal shapes, as in CUTLASS's tests, and some are empty."""
        sizes = 8 * rng.integers(1, 64 if count < 50 else 24, (count, 2)) + 24
        sizes[0] = (16, 8)
        if family.is_double and count > 4:
            sizes[4] = sizes[4] - 1  # not a multiple of 16 bytes
        shapes = [(k, n) if transpose else (n, k) for n, k in sizes]
        a, b = ([family.draw(rng, shape) for shape in shapes] for _ in "ab")
        c = [family.draw(rng, (n, n)) for n, _ in sizes]
        if count > 1:
            for operand in (a, b):
                operand[1] = family.draw(rng, (3, *shapes[1]))  # a stack
                operand[2] = operand[2][:, :0] if not transpose else operand[2][:0]  # no terms
                operand[3] = operand[3][:0] if not transpose else operand[3][:, :0]  # no result
            c[1], c[3] = family.draw(rng, (3, *c[1].shape)), np.zeros((0, 0), family.dtype)
        is_complex = np.iscomplexobj(a[0])
        alpha = 0.5 - 0.25j if update is HER2K and is_complex else 0.5
        options = dict(alpha=alpha, beta=-2.0, uplo=uplo, transpose=transpose)
        outs = run_update(family, update, a, b, c, **options)
        assert [out.shape for out in outs] == [x.shape for x in c]
        for out, x, y, z in zip(outs, a, b, c, strict=True):
            if z.size:
                out, x, y, z = (v if v.ndim == 3 else v[None] for v in (out, x, y, z))
                family.check_update(update, out, x, y, z, **options)

    def test_vmap(self, family, update, rng):
        a, b = family.draw(rng, (2, 3, 136, 72)), family.draw(rng, (3, 136, 72))
        alpha = rng.standard_normal(2).astype(np.finfo(family.scale_dtype).dtype)

        @jax.jit
        def mapped(a, b, alpha):
            call = partial(update, **family.options)
            return jax.vmap(lambda a, alpha: call(a, b, alpha=alpha))(a, alpha)

        for i, out in enumerate(mapped(a, b, alpha)):
            family.check_update(update, out, a[i], b, alpha=alpha[i])


@every(*TENSOR_FLOAT)
class TestSymmetric:
    @pytest.mark.parametrize("traced", [False, True])
    def test_one_scale_for_all_matrices(self, family, update, traced, rng):
        a, b = family.draw(rng, (3, 264, 72)), family.draw(rng, (3, 264, 72))
        c, scales = family.draw(rng, (3, 264, 264)), dict(alpha=0.5, beta=-2.0)
        if traced:
            call = jax.jit(partial(update, **family.options))
            out = call(a, b, c, **{name: jnp.float32(x) for name, x in scales.items()})
        else:
            out = run_update(family, update, a, b, c, **scales)
        family.check_update(update, out, a, b, c, **scales)

    @pytest.mark.parametrize("result", [BF16, F16])
    def test_other_result_dtype(self, family, update, result, rng):
        check_update(family, update, rng, (2, 136, 72), result=result, other="c")

    def test_beta_zero_never_reads_c(self, family, update, rng):
        a, b = family.draw(rng, (2, 200, 72)), family.draw(rng, (2, 200, 72))
        c = np.full((2, 200, 200), np.nan, family.dtype)
        options = dict(beta=jnp.zeros(()), symmetrize_output=True)
        out = run_update(family, update, a, b, c, **options)
        family.check_update(update, out, a, b, symmetrize=True)

    def test_hermitian_updates_are_the_same(self, family, update, rng):
        a, b = family.draw(rng, (2, 264, 136)), family.draw(rng, (2, 264, 136))
        hermitian = {SYRK: HERK, SYR2K: HER2K}[update]
        family.check_update(hermitian, run_update(family, hermitian, a, b), a, b)

    def test_stored_transposed_gives_the_same_bits(self, family, update, rng):
        a, b = family.draw(rng, (2, 136, 72)), family.draw(rng, (2, 136, 72))
        plain = run_update(family, update, a, b)
        turned = run_update(family, update, swap(a, True), swap(b, True), transpose=True)
        np.testing.assert_array_equal(turned, plain)


@each(*FAMILIES)
def test_donated_c_is_updated_in_place(family, rng):
    a, c = family.draw(rng, (2, 136, 72)), family.draw(rng, (2, 136, 136))
    update = HERK if np.iscomplexobj(a) else SYRK
    function = getattr(jgg, f"grouped_{update}")
    call = jax.jit(partial(function, beta=0.5, **family.options), donate_argnums=1)
    donated = jnp.asarray(c)
    pointer = donated.unsafe_buffer_pointer()
    out = call(a, donated)
    assert out.unsafe_buffer_pointer() == pointer
    family.check_update(update, out, a, a, c, beta=0.5)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("symmetrize", [False, True])
@every(SIXTEEN_BITS[0], FLOAT32[-1], DOUBLE[0], DOUBLE[-1])
def test_gradients(family, update, symmetrize, transpose, rng):
    """Compares the kernels' gradients with the reference's in float32 or wider."""
    dtype, wide = family.dtype, F32 if family.dtype == BF16 else family.dtype
    operands = tuple(family.draw(rng, (2, 136, 136)).astype(wide) for _ in range(3))
    weights = family.draw(rng, (2, 136, 136)).astype(wide)

    def loss(options, dtype, operands, alpha, beta):
        a, b, c = (x.astype(dtype) for x in operands)
        out = update(
            a, b, c, alpha=alpha, beta=beta, symmetrize_output=symmetrize, transpose=transpose,
            preferred_element_type=wide, **dict(options),
        )  # fmt: skip
        return jnp.vdot(weights, out).real

    gradient = jax.jit(jax.grad(loss, (2, 3, 4)), static_argnums=(0, 1))
    reference = family.options | dict(implementation="xla")
    with jax.default_matmul_precision("highest"):
        got = gradient(tuple(family.options.items()), dtype, operands, 0.5, -2.0)
        want = gradient(tuple(reference.items()), wide, operands, 0.5, -2.0)
    allowed = {BF16: 1e-2, F32: 1e-4}.get(dtype, 1e-11)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, np.complex128) for z in (x, y))
        assert np.linalg.norm(x - y) <= allowed * np.linalg.norm(y)
