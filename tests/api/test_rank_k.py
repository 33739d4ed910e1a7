"""Grouped rank-k and rank-2k updates: semantics, transformations and errors, on any machine."""

import inspect
import pydoc
import re
import typing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_grouped_gemm as jgg
from tests.support.ops import random
from tests.support.updates import HER2K, HERK, SYR2K, SYRK, UPDATES, check_real, full

G, N, K = 3, 7, 5

EVERY = pytest.mark.parametrize("update", UPDATES, ids=repr)
REAL = pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)
DTYPES = [np.float32, np.float64, np.complex128]
# Hermitian updates of real matrices equal the symmetric updates, as another test shows.
DOUBLE = [(update, np.complex128) for update in UPDATES] + [(SYRK, np.float64), (SYR2K, np.float64)]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def operands(rng, dtype, transpose=False, g=G, n=N, k=K):
    """Returns a and b [g, n, k], and c [g, n, n]."""
    shape = (g, k, n) if transpose else (g, n, k)
    shapes = (shape, shape, (g, n, n))
    values = [rng.standard_normal(s) for s in shapes]
    if np.issubdtype(dtype, np.complexfloating):
        values = [x + 1j * rng.standard_normal(x.shape) for x in values]
    return [x.astype(dtype) for x in values]


def hermitian_diagonal(update, c):
    """Returns c as updates see it: Hermitian ones ignore the imaginary part of the diagonal."""
    real = np.where(np.eye(c.shape[-1], dtype=bool), c.real, c)
    return real if update.hermitian else c


class TestValues:
    @EVERY
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_mirror_image_is_exact_in_optimised_code(self, update, dtype, rng):
        """The mirror image is exact however XLA fuses multiplications and additions."""
        a, b, c = operands(rng, dtype, n=70, k=33)
        # Alternate, so that every update and every dtype is tested with both triangles.
        turn = UPDATES.index(update) + DTYPES.index(dtype)
        uplo = ("lower", "upper")[turn % 2]

        def call(a, b, c):
            options = dict(alpha=0.37, beta=-1.7, uplo=uplo, symmetrize_output=True)
            return update(a, b, c, implementation="xla", **options)

        optimised = jax.jit(call, compiler_options={"xla_backend_optimization_level": 3})
        out = np.asarray(optimised(a, b, c))
        np.testing.assert_array_equal(out, update.flip(out))

    @pytest.mark.parametrize(
        "uplo, symmetrize, transpose",  # all pairs of values of two options
        [
            ("lower", False, False),
            ("lower", True, True),
            ("upper", False, True),
            ("upper", True, False),
        ],
    )
    @pytest.mark.parametrize("update, dtype", DOUBLE)
    def test_exact(self, update, uplo, transpose, symmetrize, dtype, rng):
        a, b, c = operands(rng, dtype, transpose)
        complex_alpha = dtype == np.complex128 and update is not HERK
        alpha = rng.standard_normal(G) + (1j * rng.standard_normal(G) if complex_alpha else 0)
        beta = rng.standard_normal(G)
        call = partial(
            update, alpha=alpha, uplo=uplo, transpose=transpose, symmetrize_output=symmetrize
        )
        product = update.exact(a, b, alpha=alpha[:, None, None], transpose=transpose)

        np.testing.assert_allclose(
            call(a, b), full(update, product, 0, uplo, symmetrize), atol=1e-12
        )
        inside = product + beta[:, None, None] * hermitian_diagonal(update, c)
        out = call(a, b, c, beta=beta)
        np.testing.assert_allclose(out, full(update, inside, c, uplo, symmetrize), atol=1e-12)
        if symmetrize:
            np.testing.assert_array_equal(out, update.flip(np.asarray(out)))
        if update.hermitian:
            assert not np.diagonal(np.imag(call(a, b)), axis1=1, axis2=2).any()

    @pytest.mark.parametrize(
        "dtype, uplo, transpose",
        [
            (jnp.bfloat16, "lower", False),
            (jnp.bfloat16, "upper", True),
            (jnp.float16, "lower", True),
            (jnp.float16, "upper", False),
            (np.float32, "lower", True),
            (np.float32, "upper", False),
        ],
    )
    @REAL
    def test_accumulates_in_float32(self, update, uplo, transpose, dtype, rng):
        a, b, c = operands(rng, dtype, transpose, n=40, k=300)
        options = dict(uplo=uplo, transpose=transpose, alpha=0.5, beta=-2.0)
        check_real(update, update(a, b, c, precision="highest", **options), a, b, c, **options)

    @EVERY
    def test_only_the_named_triangle_of_c_is_used(self, update, rng):
        a, b, c = operands(rng, np.float64)
        other = np.tri(N, k=-1, dtype=bool).T
        poisoned = np.where(other, np.nan, c)
        options = dict(beta=0.5, symmetrize_output=True)
        np.testing.assert_array_equal(update(a, b, poisoned, **options), update(a, b, c, **options))
        np.testing.assert_array_equal(update(a, b, poisoned, beta=0.5)[:, other], np.nan)

    @EVERY
    def test_c_is_not_read_where_beta_is_zero(self, update, rng):
        a, b, c = operands(rng, np.float64)
        beta = np.array([0.0, 1.0, 0.0])
        poisoned = c.copy()
        poisoned[beta == 0] = np.nan
        out = np.asarray(update(a, b, poisoned, beta=beta, symmetrize_output=True))
        want = np.asarray(update(a, b, c, beta=beta, symmetrize_output=True))
        np.testing.assert_array_equal(out, want)

    @REAL
    def test_lists(self, update, rng):
        """Lists may mix matrices, stacks and empty arrays of any shapes, with a scale for each."""
        shapes = [(4, 3), (2, 5, 1), (6, 0), (0, 3), (0, 4, 2), (1, 9)]
        a, b = ([rng.standard_normal(s) for s in shapes] for _ in "ab")
        c = [rng.standard_normal((*s[:-1], s[-2])) for s in shapes]
        alpha = [0.5, np.array([2.0, -1.0]), 1.0, 3.0, 1.0, -0.5]
        outs = update(a, b, c, alpha=alpha, beta=0.25)
        assert isinstance(outs, list)
        for out, x, y, z, scale in zip(outs, a, b, c, alpha, strict=True):
            scale = np.reshape(scale, (-1, 1, 1)) if np.ndim(scale) else scale
            inside = scale * update.exact(x, y) + 0.25 * z
            assert out.shape == z.shape
            np.testing.assert_allclose(
                out, full(update, inside, z, "lower", False).reshape(z.shape), atol=1e-12
            )

    def test_dtypes(self, rng):
        a, b, c = operands(rng, jnp.bfloat16)
        assert jgg.grouped_syrk(a).dtype == jnp.bfloat16
        assert jgg.grouped_syrk(a, c.astype(np.float32)).dtype == np.float32
        assert jgg.grouped_syr2k(a, b.astype(np.float32)).dtype == np.float32
        assert jgg.grouped_syrk(a, preferred_element_type=np.float32).dtype == np.float32
        assert jgg.grouped_herk(a.astype(np.complex64)).dtype == np.complex64


class TestTransformations:
    @pytest.mark.parametrize(
        "update, uplo, transpose",
        [
            (SYRK, "lower", False),
            (SYRK, "upper", True),
            (HERK, "lower", True),
            (HERK, "upper", False),
            (SYR2K, "lower", True),
            (SYR2K, "upper", False),
            (HER2K, "lower", False),
            (HER2K, "upper", True),
        ],
    )
    def test_gradients(self, update, uplo, transpose, rng):
        """First and second derivatives are right, forward and reverse, for operands and scales."""
        symmetrize = bool(rng.integers(2))
        self.check_gradients(update, np.complex128, uplo, transpose, symmetrize, rng)

    @REAL
    def test_gradients_of_real_operands(self, update, rng):
        self.check_gradients(update, np.float64, "upper", True, True, rng)

    @staticmethod
    def check_gradients(update, dtype, uplo, transpose, symmetrize, rng):
        a, b, c = operands(rng, dtype, transpose, g=2, n=4, k=3)
        alpha = 0.7 if update is HERK or dtype == np.float64 else 0.7 + 0.3j
        options = dict(uplo=uplo, transpose=transpose, symmetrize_output=symmetrize)

        def function(a, b, c, alpha, beta):
            return update(a, b, c, alpha=alpha, beta=beta, **options)

        # Differences of second order lose half of the digits, and more where terms cancel.
        tolerance = dict(atol=3e-4, rtol=3e-4)
        check_grads(
            jax.jit(function), (a, b, c, alpha, 0.4), order=2, modes=("fwd", "rev"), **tolerance
        )

    @REAL
    def test_the_cotangents_other_triangle_is_cs(self, update, rng):
        a, b, c = operands(rng, np.float64)
        ct = rng.standard_normal(c.shape)
        other = np.tri(N, k=-1, dtype=bool).T
        _, vjp = jax.vjp(lambda a, b, c: update(a, b, c, beta=0.5), a, b, c)
        poisoned = [np.asarray(x) for x in vjp(jnp.where(other, np.nan, ct))]
        clean = [np.asarray(x) for x in vjp(jnp.asarray(ct))]
        np.testing.assert_array_equal(poisoned[0], clean[0])
        np.testing.assert_array_equal(poisoned[1], clean[1])
        np.testing.assert_array_equal(clean[2], np.where(other, ct, 0.5 * ct))

    @EVERY
    @pytest.mark.parametrize("mapped", [m for m in np.ndindex(2, 2, 2, 2) if any(m)])
    def test_vmap(self, update, mapped, rng):
        """Any combination of the operands and `alpha` may be mapped."""
        size = 2
        a, b, c = operands(rng, np.float64, g=size * G)
        stacks = [x.reshape(size, G, *x.shape[1:]) for x in (a, b, c)]
        stacks.append(rng.standard_normal((size, G)))
        if not update.two_operands:
            mapped = (mapped[0], mapped[0], *mapped[2:])

        def function(a, b, c, alpha):
            return update(a, b, c, alpha=alpha, beta=0.5)

        arguments = [x if m else x[0] for x, m in zip(stacks, mapped, strict=True)]
        axes = [0 if m else None for m in mapped]
        if not any(mapped):
            pytest.skip("nothing is mapped")
        got = jax.vmap(function, axes)(*arguments)
        for i in range(size):
            one = [x[i] if m else x for x, m in zip(arguments, mapped, strict=True)]
            np.testing.assert_allclose(got[i], function(*one), atol=1e-12)

    @EVERY
    @pytest.mark.parametrize("maps_a", [False, True])
    def test_vmap_of_one_scale_for_all_matrices(self, update, maps_a, rng):
        size = 3
        a, b, c = operands(rng, np.float64, g=size * G)
        a, b, c = (x.reshape(size, G, *x.shape[1:]) for x in (a, b, c))
        alpha, beta = rng.standard_normal((2, size))
        a, axis = (a, 0) if maps_a else (a[0], None)

        def function(a, alpha, beta):
            return update(a, b[0], c[0], alpha=alpha, beta=beta)

        got = jax.vmap(function, (axis, 0, 0))(a, alpha, beta)
        for i in range(size):
            one = function(a[i] if maps_a else a, alpha[i], beta[i])
            np.testing.assert_allclose(got[i], one, atol=1e-12)

    @EVERY
    def test_vmap_over_nothing(self, update):
        a = np.ones((0, G, N, K), np.float32)
        assert jax.vmap(update)(a, a).shape == (0, G, N, N)
        assert jax.vmap(lambda a: update([a], [a])[0])(a[:, 0]).shape == (0, N, N)

    def test_vmap_of_one_entry_of_a_list(self, rng):
        a, shared = rng.standard_normal((3, 6, 4)), rng.standard_normal((5, 2))
        outs = jax.vmap(lambda a: jgg.grouped_syrk([a, shared]))(a)
        np.testing.assert_allclose(outs[0], np.tril(SYRK.exact(a, a)), atol=1e-12)
        np.testing.assert_allclose(outs[1], [np.tril(SYRK.exact(shared, shared))] * 3, atol=1e-12)

    def test_scan_and_remat(self, rng):
        a, _, c = operands(rng, np.float64)

        def loss(a):
            def step(c, _):
                return jax.checkpoint(partial(jgg.grouped_syrk, beta=0.5))(a, c), None

            return jnp.sum(jax.lax.scan(step, c, length=3)[0] ** 2)

        check_grads(loss, (a,), order=1, modes=("rev",))

    def test_shard_map(self, rng):
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
        a, b, _ = operands(rng, np.float64, g=8)
        spec = jax.sharding.PartitionSpec("x")

        @partial(jax.shard_map, mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)
        def local(a, b):
            return jgg.grouped_syr2k(a, b)

        def gradients(update):
            return jax.jit(jax.grad(lambda a, b: jnp.sum(update(a, b) ** 2), (0, 1)))

        got = gradients(local)(a, b[:2])
        want = gradients(jgg.grouped_syr2k)(a, np.tile(b[:2], (4, 1, 1)))
        np.testing.assert_allclose(got[0], want[0], atol=1e-9)
        np.testing.assert_allclose(got[1], want[1].reshape(4, 2, N, K).sum(0), atol=1e-9)

    def test_export(self, extension, rng):
        a, b, c = operands(rng, jnp.bfloat16)
        exported = jax.export.export(
            jax.jit(partial(jgg.grouped_syr2k, beta=0.5)),
            platforms=("cuda", "cpu"),
            disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
        )(a, b, c)
        loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
        check_real(SYR2K, loaded.call(a, b, c), a, b, c, beta=0.5)
        assert "@jax_grouped_gemm.rank_k.v3" in exported.mlir_module()


class TestErrors:
    A = np.ones((G, N, K), np.float32)
    C = np.ones((G, N, N), np.float32)

    @pytest.mark.parametrize(
        "error, call, said",
        [
            (TypeError, lambda s: jgg.grouped_syrk(s.A[0]), ["a", str((N, K))]),
            (TypeError, lambda s: jgg.grouped_syrk(s.A, s.C[:, 1:]), ["c", str((G, N - 1, N))]),
            (TypeError, lambda s: jgg.grouped_syr2k(s.A, s.A[:, :, 1:]), ["b", str((G, N, K))]),
            (ValueError, lambda s: jgg.grouped_syr2k([s.A], [s.A, s.A]), ["b", "2", "1"]),
            (TypeError, lambda s: jgg.grouped_syrk([s.A[0, 0]]), ["a[0]", str((K,))]),
            (TypeError, lambda s: jgg.grouped_syrk(s.A, transpose=True, c=s.C), ["transposed"]),
            (ValueError, lambda s: jgg.grouped_syrk(s.A, uplo="L"), ["uplo", "'L'"]),
            (ValueError, lambda s: jgg.grouped_syrk(s.A, implementation="gpu"), ["'gpu'"]),
            (TypeError, lambda s: jgg.grouped_syrk(s.A, alpha=np.ones(2)), ["alpha", "(2,)"]),
            (ValueError, lambda s: jgg.grouped_syrk([s.A], [s.C], beta=[1, 2]), ["beta", "2"]),
            (TypeError, lambda s: jgg.grouped_syrk([]), ["a", "[]"]),
            (TypeError, lambda s: jgg.grouped_syrk(s.A.astype(int)), ["int"]),
            (TypeError, lambda s: jgg.grouped_syr2k(s.A, [s.A]), ["b"]),
            (TypeError, lambda s: jgg.grouped_herk(s.A + 0j, alpha=1j), ["alpha", "complex"]),
            (TypeError, lambda s: jgg.grouped_her2k(s.A + 0j, s.A + 0j, s.C, beta=1j), ["beta"]),
            (TypeError, lambda s: jgg.grouped_syrk(s.A, alpha=1j), ["alpha"]),
            (
                TypeError,
                lambda s: jgg.grouped_syrk(s.A + 0j, preferred_element_type=np.float32),
                ["complex", "float32"],
            ),
        ],
    )
    def test_message(self, error, call, said):
        with pytest.raises(error) as raised:
            call(self)
        for part in said:
            assert part in str(raised.value)

    def test_insisting_on_the_kernel(self):
        with pytest.raises(NotImplementedError, match="cuda"):
            jgg.grouped_syrk(self.A.astype(jnp.bfloat16), implementation="cuda")


@pytest.mark.parametrize("update", [HERK, HER2K], ids=repr)
def test_hermitian_updates_of_real_matrices_are_the_symmetric_ones(update, rng):
    a, b = random(rng, (2, 8, 4), np.float32), random(rng, (2, 8, 4), np.float32)
    symmetric = SYR2K if update.two_operands else SYRK
    np.testing.assert_array_equal(update(a, b), symmetric(a, b))


@EVERY
def test_signature(update):
    """help() shows every option with its default, and no other option is accepted."""
    function = getattr(jgg, f"grouped_{update.name}")
    factors = ["a", "b"] if update.two_operands else ["a"]
    parameters = inspect.signature(function).parameters
    options = {name: x.default for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY}
    assert list(parameters) == [*factors, "c", *options]
    assert options == dict(
        alpha=1.0,
        beta=0.0,
        diagonal=0.0,
        uplo="lower",
        symmetrize_output=False,
        transpose=False,
        precision=None,
        preferred_element_type=None,
        implementation=None,
    )
    assert typing.get_overloads(function)
    assert parameters.keys() <= set(re.findall(r"\w+", pydoc.render_doc(function)))
    with pytest.raises(TypeError, match=f"grouped_{update.name}.*'lower'"):
        function(*[np.ones((2, 3, 3))] * len(factors), lower=True)
