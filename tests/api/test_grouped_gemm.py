"""Products of lists of matrices: semantics, transformations and errors, on any machine."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_grouped_gemm as jgg
from tests.support.dtypes import BF16
from tests.support.ops import swap
from tests.support.products import FORMS, List, cutlass_like, mixed_layouts, random_list

# Matrices (m, k, n), three with a dimension of size zero, and two stacks, one of no matrices.
SHAPES = [(3, 4, 5), (0, 3, 2), (4, 0, 3), (2, 3, 0), (2, 6, 1, 4), (1, 1, 1), (0, 2, 3, 4)]
# Which of lhs, rhs, c and alpha `vmap` maps.
MAPPED = [mapped for mapped in product((False, True), repeat=4) if any(mapped)]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def close(outs, problems: List, atol=1e-12):
    for i, out in enumerate(outs):
        np.testing.assert_allclose(out, problems.exact(i).value, atol=atol)


class TestValues:
    @FORMS
    @pytest.mark.parametrize("with_c", [False, True])
    def test_exact(self, transpose_lhs, transpose_rhs, with_c, rng):
        problems = random_list(
            rng,
            SHAPES,
            np.float64,
            c_dtype=np.float64 if with_c else None,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            alpha=0.5,
            beta=-2.0,
        )
        close(problems(), problems)

    def test_layouts_of_their_own(self, rng):
        problems = random_list(rng, [(3, 4, 5)] * 9, np.float64, **mixed_layouts(9))
        close(problems(), problems)

    def test_scales_of_their_own(self, rng):
        """A scale may be a number, or an array with one number for each matrix of a stack."""
        problems = random_list(
            rng,
            [(3, 4, 5), (2, 3, 4, 5), (2, 0, 3)],
            np.float64,
            c_dtype=np.float64,
            alpha=[2.0, np.array([0.5, -1.0]), 3.0],
            beta=[np.float64(0.25), 1.0, -2.0],
        )
        close(problems(), problems)
        close([jax.jit(lambda p=problems: p())()[2]], List(*[x[2:] for x in (
            problems.lhs, problems.rhs, problems.c)], alpha=3.0, beta=-2.0))  # fmt: skip

    def test_complex(self, rng):
        a, b, c = ([x + 1j * y for x, y in rng.standard_normal((1, 2, 3, 3))] for _ in "abc")
        (out,) = jgg.grouped_gemm(a[:1], b[:1], c[:1], alpha=1j, beta=2 - 1j)
        np.testing.assert_allclose(out, 1j * a[0] @ b[0] + (2 - 1j) * c[0], atol=1e-12)

    @FORMS
    @pytest.mark.parametrize("dtype", [BF16, jnp.float16, np.float32])
    def test_accumulates_in_float32(self, transpose_lhs, transpose_rhs, dtype, rng):
        problems = random_list(
            rng,
            [(40, 300, 30), (2, 8, 1000, 24)],
            dtype,
            c_dtype=dtype,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            alpha=0.5,
            beta=-2.0,
        )
        problems.check(problems(precision="highest"))

    def test_c_is_not_read_where_beta_is_zero(self, rng):
        problems = random_list(rng, [(3, 4, 5), (2, 0, 5)], np.float64)
        poison = [np.full((m, 5), np.nan) for m in (3, 2)]
        for beta in (0.0, 0, jnp.zeros(()), [0.0, 0.0]):
            outs = jgg.grouped_gemm(problems.lhs, problems.rhs, poison, beta=beta)
            close(outs, problems)

    def test_c_without_beta_has_a_say_in_the_dtype(self, rng):
        problems = random_list(rng, [(3, 4, 5)], BF16)
        (out,) = jgg.grouped_gemm(problems.lhs, problems.rhs, [np.ones((3, 5), np.float32)])
        assert out.dtype == np.float32

    def test_dtypes(self):
        def dtype(a, b, **options):
            (out,) = jgg.grouped_gemm([np.ones((2, 3), a)], [np.ones((3, 4), b)], **options)
            return out.dtype

        assert dtype(BF16, BF16) == BF16
        assert dtype(BF16, np.float32) == np.float32
        assert dtype(BF16, jnp.float16) == np.float32
        assert dtype(BF16, BF16, preferred_element_type=np.float32) == np.float32
        assert dtype(np.float32, np.complex64) == np.complex64

    def test_one_stack(self, rng):
        lhs, rhs = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 5, 2))
        out = jgg.grouped_gemm(lhs, rhs, alpha=np.arange(3.0))
        np.testing.assert_allclose(out, np.arange(3)[:, None, None] * (lhs @ rhs), atol=1e-12)

    @pytest.mark.parametrize("scales", [[0.5, -1.0, 2], (0.5, np.float32(-1), jnp.float32(2))])
    def test_sequences_of_scales_of_a_stack(self, scales, rng):
        lhs, rhs, c = (rng.standard_normal((3, 4, 4)) for _ in range(3))
        as_array = np.array([0.5, -1.0, 2.0])
        for function in (jgg.grouped_gemm, jgg.grouped_syr2k):
            expected = function(lhs, rhs, c, alpha=as_array, beta=-as_array)
            out = function(lhs, rhs, c, alpha=scales, beta=[-x for x in scales])
            np.testing.assert_array_equal(out, expected)
            of_list = function([lhs, lhs[0]], [rhs, rhs[0]], alpha=[scales, 3.0])
            np.testing.assert_array_equal(of_list[0], function(lhs, rhs, alpha=as_array))
            with pytest.raises(TypeError, match=r"alpha must .* one .* for each matrix.*\(2,\)"):
                function(lhs, rhs, alpha=scales[:2])
            with pytest.raises(TypeError, match="alpha must be a number, .* got None"):
                function(lhs, rhs, alpha=[1.0, 2.0, None])

    @pytest.mark.parametrize("scheduler", ["device", "host_precomputed"])
    @pytest.mark.parametrize("sort_problems", [False, True])
    def test_results_are_in_the_callers_order(self, scheduler, sort_problems, rng):
        problems = random_list(rng, cutlass_like(rng, 30), np.float32)
        problems.check(
            problems(scheduler=scheduler, sort_problems=sort_problems, precision="highest")
        )


class TestTransformations:
    @pytest.mark.parametrize(
        "transpose_lhs, transpose_rhs, dtype",
        [(*of, np.complex128) for of in product((False, True), repeat=2)]
        + [(False, True, np.float64)],
    )
    def test_gradients(self, transpose_lhs, transpose_rhs, dtype, rng):
        """First and second derivatives by all operands and scales match finite differences."""
        problems = random_list(
            rng,
            [(2, 3, 4), (2, 2, 1, 3), (2, 0, 3)],
            dtype,
            c_dtype=dtype,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
        )

        def function(lhs, rhs, c, alpha, beta):
            options = dict(alpha=alpha, beta=beta, **problems.transposes)
            return jgg.grouped_gemm(lhs, rhs, c, **options)

        alpha, beta = [dtype(0.7), dtype([0.3, -1.0]), dtype(0.5)], dtype(0.4)
        operands = (problems.lhs, problems.rhs, problems.c, alpha, jnp.asarray(beta))
        check_grads(jax.jit(function), operands, order=2, modes=("fwd", "rev"))

    def test_gradients_with_numbers_as_scales(self, rng):
        problems = random_list(
            rng, [(2, 3, 4)] * 4, np.float64, c_dtype=np.float64, **mixed_layouts(4)
        )

        def function(lhs, rhs, c):
            return jgg.grouped_gemm(lhs, rhs, c, alpha=0.7, beta=-0.3, **problems.transposes)

        operands = (problems.lhs, problems.rhs, problems.c)
        check_grads(jax.jit(function), operands, order=2, modes=("fwd", "rev"))

    def test_gradient_of_one_operand_of_one_problem(self, rng):
        """Operands that are not differentiated have symbolic zeros as tangents: no product."""
        problems = random_list(rng, [(2, 3, 4), (3, 1, 2), (2, 2, 2)], np.float64)

        def function(x):
            rhs = [problems.rhs[0], x, problems.rhs[2]]
            return jgg.grouped_gemm(problems.lhs, rhs, alpha=jnp.asarray([2.0, 3.0, 4.0])[1])

        check_grads(jax.jit(function), (problems.rhs[1],), order=2, modes=("fwd", "rev"))
        explanation = jgg.explain(jax.grad(lambda x: jnp.sum(function(x)[1] ** 2)), problems.rhs[1])
        assert [len(plan.problem.entries) for plan in explanation.plans] == [3, 1]

    @pytest.mark.parametrize(
        "mapped, transpose_lhs, transpose_rhs",
        [
            # A mapped axis may fold into rows of lhs for either `transpose_rhs`, so test only one.
            (mapped, transpose_lhs, (i + transpose_lhs) % 2 == 1)
            for (i, mapped), transpose_lhs in product(enumerate(MAPPED), (False, True))
        ],
    )
    def test_vmap(self, transpose_lhs, transpose_rhs, mapped, rng):
        """Any operands may be mapped, in a list of a matrix, a stack and an empty product."""
        size, shapes = 3, [(4, 3, 5), (2, 4, 3, 5), (0, 3, 5)]
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        lists = [
            random_list(rng, shapes, np.float64, c_dtype=np.float64, **options) for _ in range(size)
        ]
        alphas = rng.standard_normal(size)

        def pick(name, is_mapped):
            found = [getattr(one, name) for one in lists]
            return [np.stack(x) for x in zip(*found, strict=True)] if is_mapped else found[0]

        operands = [pick(name, m) for name, m in zip(("lhs", "rhs", "c"), mapped, strict=False)]
        operands.append(alphas if mapped[3] else alphas[0])

        def function(lhs, rhs, c, alpha):
            return jgg.grouped_gemm(lhs, rhs, c, alpha=alpha, beta=0.5, **options)

        outs = jax.vmap(function, [0 if m else None for m in mapped])(*operands)
        for b in range(size):
            lhs, rhs, c = (
                getattr(lists[b if m else 0], name)
                for name, m in zip(("lhs", "rhs", "c"), mapped, strict=False)
            )
            one = List(lhs, rhs, c, alphas[b if mapped[3] else 0], 0.5, lists[0].transposes)
            close([out[b] for out in outs], one)

    def test_vmap_of_rows_makes_a_larger_product(self):
        """Shared weights are not copied for every element of the batch."""
        lhs, rhs = jnp.ones((7, 16, 8), BF16), jnp.ones((8, 24), BF16)
        mapped = jax.vmap(lambda x: jgg.grouped_gemm([x], [rhs]), in_axes=1)
        (plan,) = jgg.explain(mapped, lhs).plans
        assert [entry.shape for entry in plan.problem.entries] == [(1, 16 * 7, 24, 8)]

    def test_vmap_of_one_problem_of_a_list(self, rng):
        a, b = rng.standard_normal((3, 2, 4)), rng.standard_normal((4, 5))
        outs = jax.vmap(lambda a: jgg.grouped_gemm([a, b], [b, b.T]))(a)
        np.testing.assert_allclose(outs[0], a @ b, atol=1e-12)
        np.testing.assert_allclose(outs[1], [b @ b.T] * 3, atol=1e-12)

    def test_scan_and_remat(self, rng):
        a, c = rng.standard_normal((3, 3)), rng.standard_normal((3, 3))

        def loss(a):
            def step(c, _):
                call = jax.checkpoint(lambda a, c: jgg.grouped_gemm([a], [c], [c], beta=0.5)[0])
                return call(a, c), None

            return jnp.sum(jax.lax.scan(step, c, length=3)[0] ** 2)

        check_grads(loss, (a,), order=1, modes=("rev",))

    def test_shard_map(self, rng):
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
        lhs, rhs = rng.standard_normal((8, 3)), rng.standard_normal((3, 5))
        spec = jax.sharding.PartitionSpec("x")

        @partial(jax.shard_map, mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)
        def local(lhs, rhs):
            return jgg.grouped_gemm([lhs], [rhs])[0]

        got = jax.jit(jax.grad(lambda a, b: jnp.sum(local(a, b) ** 2), (0, 1)))(lhs, rhs)
        y = lhs @ rhs
        want = 2 * y @ rhs.T, 2 * lhs.T @ y
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-9)

    @pytest.mark.parametrize("scheduler", ["device", "host_precomputed"])
    def test_export(self, scheduler, extension, rng):
        problems = random_list(rng, [(3, 4, 5), (7, 2, 9)], BF16, c_dtype=BF16)

        def function(lhs, rhs, c):
            return jgg.grouped_gemm(lhs, rhs, c, beta=0.5, scheduler=scheduler)

        exported = jax.export.export(
            jax.jit(function),
            platforms=("cuda", "cpu"),
            disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
        )(problems.lhs, problems.rhs, problems.c)
        loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
        outs = loaded.call(problems.lhs, problems.rhs, problems.c)
        List(problems.lhs, problems.rhs, problems.c, beta=0.5).check(outs)
        assert "@jax_grouped_gemm.grouped_gemm.v1" in exported.mlir_module()


class TestErrors:
    A, B = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    C = np.ones((3, 5), np.float32)

    @pytest.mark.parametrize(
        "error, said, options",
        [
            (TypeError, ["lhs[0]", "(3, 4)", "rhs[0]", "(5, 4)"], dict(rhs=[B.T])),
            (TypeError, ["(3, 4) (transposed)"], dict(transpose_lhs=True)),
            (TypeError, ["rhs[0]", "(1, 4, 5)"], dict(rhs=[B[None]])),
            (ValueError, ["rhs", "2", "lhs", "1"], dict(rhs=[B, B])),
            (TypeError, ["c[0]", "(3, 5)", "(5, 3)"], dict(c=[C.T])),
            (TypeError, ["lhs[0]", "(4,)"], dict(lhs=[A[0]])),
            (TypeError, ["lhs", "(3, 4)"], dict(lhs=A)),
            (ValueError, ["transpose_rhs", "2"], dict(transpose_rhs=[True, False])),
            (TypeError, ["transpose_rhs", "'T'"], dict(transpose_rhs="T")),
            (ValueError, ["scheduler", "'host'"], dict(scheduler="host")),
            (ValueError, ["implementation", "'gpu'"], dict(implementation="gpu")),
            (ValueError, ["alpha", "2"], dict(alpha=[1.0, 2.0])),
            (TypeError, ["alpha", "(2,)"], dict(alpha=[np.ones(2)])),
            (TypeError, ["beta", "1j"], dict(c=[C], beta=1j)),
            (TypeError, ["lhs", "[]"], dict(lhs=[], rhs=[])),
            (TypeError, ["lhs[0]", "list"], dict(lhs=[[1.0]])),
            (TypeError, ["int"], dict(lhs=[A.astype(int)], rhs=[B.astype(int)])),
            (TypeError, ["complex"], dict(lhs=[A + 0j], preferred_element_type=np.float32)),
        ],
    )
    def test_message(self, error, said, options):
        with pytest.raises(error) as raised:
            jgg.grouped_gemm(**{"lhs": [self.A], "rhs": [self.B], **options})
        for part in said:
            assert part in str(raised.value)

    def test_insisting_on_the_kernel(self):
        operands = [self.A.astype(BF16)], [self.B.astype(BF16)]
        with pytest.raises(NotImplementedError, match="cuda"):
            jgg.grouped_gemm(*operands, implementation="cuda")


def test_stored_transposed(rng):
    """Operands that are stored transposed give the same product."""
    problems = random_list(rng, [(5, 6, 7)], np.float64)
    plain = jgg.grouped_gemm(problems.lhs, problems.rhs)
    stored = [swap(problems.lhs[0], True)], [swap(problems.rhs[0], True)]
    swapped = jgg.grouped_gemm(*stored, transpose_lhs=True, transpose_rhs=[True])
    np.testing.assert_allclose(swapped[0], plain[0], atol=1e-12)


@pytest.mark.parametrize("maps_lhs, maps_rhs", [(True, False), (False, True), (True, True)])
def test_nothing_is_mapped_over(maps_lhs, maps_rhs):
    """vmap over an axis of size zero gives empty results, as for JAX's own functions."""
    lhs, rhs = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    operands = [
        np.ones((0, *x.shape), x.dtype) if is_mapped else x
        for x, is_mapped in ((lhs, maps_lhs), (rhs, maps_rhs))
    ]

    def products(lhs, rhs):
        return jgg.grouped_gemm([lhs, rhs.T], [rhs, lhs.T])

    axes = tuple(0 if is_mapped else None for is_mapped in (maps_lhs, maps_rhs))
    outs = jax.vmap(products, axes)(*operands)
    assert [out.shape for out in outs] == [(0, 2, 4), (0, 4, 2)]
