"""The kernels of an expert MLP, and `ragged_mlp` made of them, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import group_sizes as sizes_of
from tests.support import mlp
from tests.support.mlp_on_gpu import (
    check_gated,
    check_gradient,
    check_paired,
    check_paired_weights,
    check_rows_of_dy,
    unit,
)
from tests.support.ops import random

BF16, F16 = jnp.bfloat16, jnp.float16

ACTIVATIONS = pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
WEIGHTS = pytest.mark.parametrize("weighted", [True, False], ids=["weights", "ones"])


def sweep(rng, m, groups, count):
    """Yields group sizes of every kind."""
    yield from sizes_of.typical(rng, m, groups)
    for _ in range(count):
        yield sizes_of.any_kind(rng, m, groups)


class TestForward:
    @ACTIVATIONS
    @WEIGHTS
    def test_activations(self, activation, weighted, rng):
        for sizes in sizes_of.typical(rng, 1000, 6):
            check_gated(rng, sizes, activation=activation, weighted=weighted)

    @pytest.mark.parametrize(
        "embed, hidden", [(8, 8), (64, 128), (264, 136), (72, 2880), (2048, 768)]
    )
    def test_dimensions_off_the_tile(self, embed, hidden, rng):
        for sizes in (sizes_of.multinomial(rng, 900, 5), sizes_of.zipf(rng, 700, 5)):
            check_gated(rng, sizes, embed=embed, hidden=hidden)

    def test_any_group_sizes(self, rng):
        for sizes in sweep(rng, 1000, 8, 60):
            check_gated(rng, sizes, embed=72, hidden=200, activation=rng.choice(mlp.ACTIVATIONS))

    @pytest.mark.parametrize("offset", [-2, 0, 3, 7])
    def test_windows(self, offset, rng):
        for _ in range(4):
            sizes = sizes_of.any_kind(rng, 1000, 8)
            check_gated(rng, sizes, groups=3, offset=offset)

    def test_many_tiles(self, rng):
        """Each thread block computes several tiles."""
        sizes = sizes_of.multinomial(rng, 20000, 40)
        check_gated(rng, sizes, m=20000, embed=512, hidden=776)

    def test_what_is_clipped(self, rng):
        for activation in mlp.CLIPPED:
            check_gated(rng, sizes_of.uniform(1000, 5), activation=activation, spread=30.0)

    def test_gates_whose_square_overflows(self, rng):
        for activation in mlp.CLIPPED:
            with np.errstate(over="ignore"):
                check_gated(rng, sizes_of.uniform(500, 3), activation=activation, spread=2.0**66)


class TestBackward:
    @ACTIVATIONS
    @WEIGHTS
    def test_activations(self, activation, weighted, rng):
        for sizes in sizes_of.typical(rng, 1000, 6):
            options = dict(activation=activation, weighted=weighted)
            operands, results = check_gated(rng, sizes, **options)
            check_gradient(rng, operands, results, sizes, 0, activation)

    @pytest.mark.parametrize("activation", mlp.UNCLIPPED)
    def test_without_an_up_projection(self, activation, rng):
        for sizes in sizes_of.typical(rng, 1000, 6):
            options = dict(activation=activation, with_up=False)
            operands, results = check_gated(rng, sizes, **options)
            check_gradient(rng, operands, results, sizes, 0, activation)

    @pytest.mark.parametrize(
        "embed, hidden", [(8, 8), (64, 128), (264, 136), (72, 2880), (2048, 768)]
    )
    def test_dimensions_off_the_tile(self, embed, hidden, rng):
        sizes = sizes_of.multinomial(rng, 900, 5)
        operands, results = check_gated(rng, sizes, embed=embed, hidden=hidden)
        check_gradient(rng, operands, results, sizes, 0, "silu")

    def test_any_group_sizes(self, rng):
        for sizes in sweep(rng, 1000, 8, 60):
            activation = rng.choice(mlp.ACTIVATIONS)
            options = dict(embed=72, hidden=200, activation=activation)
            operands, results = check_gated(rng, sizes, **options)
            check_gradient(rng, operands, results, sizes, 0, activation)

    @pytest.mark.parametrize("offset", [-2, 0, 3, 7])
    def test_windows(self, offset, rng):
        for _ in range(4):
            sizes = sizes_of.any_kind(rng, 1000, 8)
            operands, results = check_gated(rng, sizes, groups=3, offset=offset)
            check_gradient(rng, operands, results, sizes, offset, "silu")

    def test_what_is_clipped(self, rng):
        sizes = sizes_of.uniform(1000, 5)
        for activation in mlp.CLIPPED:
            options = dict(activation=activation, spread=30.0)
            operands, results = check_gated(rng, sizes, **options)
            check_gradient(rng, operands, results, sizes, 0, activation)


class TestInPlace:
    """Reading rows from tokens gives the same bits as copying the rows."""

    @pytest.mark.parametrize(
        "embed, hidden",
        [(64, 256), (1536, 256), (136, 200), (2056, 136), (1280, 128), (520, 64), (136, 104),
         (136, 192), (1536, 184), (136, 264), (264, 768)],
    )  # fmt: skip
    def test_rows_of_tokens(self, embed, hidden, rng):
        tokens, m = 500, 3040
        run = jax.jit(partial(jgg.gated_ragged_dot, implementation="cuda"))
        wi_0, wi_1 = (random(rng, (16, embed, hidden), BF16) for _ in range(2))
        for sizes in sweep(rng, m - 40, 16, 12):
            x = random(rng, (tokens, embed), BF16)
            # Some rows have no token, and unowned rows may hold anything.
            rows = rng.integers(-20, tokens + 20, m).astype(np.int32)
            x[rows[-1] % tokens] = np.nan
            rows[:-40] = np.where(rows[:-40] == rows[-1] % tokens, -1, rows[:-40])
            rows[-40:] = rows[-1] % tokens
            valid = (rows >= 0) & (rows < tokens)
            copies = np.where(valid[:, None], x[np.clip(rows, 0, tokens - 1)], 0).astype(BF16)
            got = run(x, wi_0, wi_1, np.asarray(sizes, np.int32), rows=rows)
            want = run(copies, wi_0, wi_1, np.asarray(sizes, np.int32))
            # Results have NaNs if groups own all rows. NumPy finds NaNs equal, but not in bfloat16.
            np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, want)))

    @pytest.mark.parametrize(
        "embed, hidden",
        [(64, 256), (1536, 256), (136, 200), (2056, 136), (1280, 128), (520, 64), (264, 768)],
    )
    def test_rows_of_dy(self, embed, hidden, rng):
        for sizes in sweep(rng, 1000, 8, 6):
            check_rows_of_dy(rng, sizes, embed=embed, hidden=hidden)

    @pytest.mark.parametrize("embed, hidden", [(520, 256), (1032, 520)])
    def test_rows_of_dy_in_unequal_groups(self, embed, hidden, rng):
        """Tiles of unequal groups are cut along their rows."""
        m, groups = 12000, 9
        for sizes in (sizes_of.one_hot(m - 5, groups, 4), *(sizes_of.zipf(rng, m, groups),) * 3):
            check_rows_of_dy(rng, sizes, m=m, embed=embed, hidden=hidden)

    def test_is_planned(self, rng):
        x, rows = jnp.ones((512, 64), BF16), jnp.zeros(2048, jnp.int32)
        wi = jnp.ones((4, 64, 256), BF16)
        run = partial(jgg.gated_ragged_dot, rows=rows)
        (plan,) = jgg.explain(run, x, wi, wi, jnp.full(4, 512, jnp.int32)).plans
        assert plan.gather == "in place"


class TestPaired:
    def test_group_sizes(self, rng):
        for sizes in sweep(rng, 1000, 8, 40):
            check_paired(rng, sizes)

    @pytest.mark.parametrize(
        "embed, hidden", [(8, 8), (128, 64), (136, 264), (2880, 72), (2048, 768)]
    )
    def test_dimensions_off_the_tile(self, embed, hidden, rng):
        check_paired(rng, sizes_of.multinomial(rng, 900, 5), embed=embed, hidden=hidden)

    @pytest.mark.parametrize("offset", [-2, 0, 3, 7])
    def test_windows(self, offset, rng):
        check_paired(rng, sizes_of.any_kind(rng, 1000, 8), groups=3, offset=offset)


TOKENS = pytest.mark.parametrize("tokens", [None, 300], ids=["rows", "tokens"])


class TestPairedWeights:
    """Weight gradients of gate and up. Tokens are read in place for up to 768 columns."""

    @TOKENS
    @pytest.mark.parametrize("hidden", [256, 392])
    def test_group_sizes(self, hidden, tokens, rng):
        for sizes in sweep(rng, 1000, 8, 20):
            check_paired_weights(rng, sizes, hidden=hidden, tokens=tokens)

    @TOKENS
    @pytest.mark.parametrize(
        "embed, hidden",
        [(8, 8), (128, 64), (136, 264), (2880, 72), (2048, 768), (264, 776), (1544, 256)],
    )
    def test_dimensions_off_the_tile(self, embed, hidden, tokens, rng):
        sizes = sizes_of.multinomial(rng, 900, 5)
        check_paired_weights(rng, sizes, embed=embed, hidden=hidden, tokens=tokens)

    @TOKENS
    @pytest.mark.parametrize("hidden", [200, 520])
    @pytest.mark.parametrize("offset", [-2, 0, 3, 7])
    def test_windows(self, offset, hidden, tokens, rng):
        sizes = sizes_of.any_kind(rng, 1000, 8)
        check_paired_weights(rng, sizes, hidden=hidden, groups=3, offset=offset, tokens=tokens)

    @TOKENS
    @pytest.mark.parametrize("embed, hidden", [(520, 256), (1032, 520)])
    def test_unequal_groups(self, embed, hidden, tokens, rng):
        """Tiles of unequal groups are cut along their rows. Warps write zeros for empty groups."""
        m, groups = 12000, 9
        for hot in range(groups):
            sizes = sizes_of.one_hot(m - 5 * hot, groups, hot)
            check_paired_weights(rng, sizes, m=m, embed=embed, hidden=hidden, tokens=tokens)
        for _ in range(10):
            sizes = sizes_of.zipf(rng, m, groups)
            check_paired_weights(rng, sizes, m=m, embed=embed, hidden=hidden, tokens=tokens)


def layer(case, implementation, activation="silu"):
    """Returns a compiled function that returns the value and all gradients of `ragged_mlp`."""

    def run(factors, cotangent):
        function = partial(
            case.run, jgg.ragged_mlp, implementation=implementation, activation=activation
        )
        y, vjp = jax.vjp(function, *factors)
        return y, *vjp(cotangent)

    return jax.jit(run)


def check_layers_agree(case, rng, activation="silu"):
    """Compares the kernels with the composition of the reference's products."""
    cotangent = random(rng, (len(case.on_rows), case.x.shape[1]), case.x.dtype)
    got = layer(case, "cuda", activation)(case.factors, cotangent)
    want = layer(case, "xla", activation)(case.factors, cotangent)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        one, other = (np.asarray(a).astype(np.float64) for a in (one, other))
        norm = np.linalg.norm(other)
        error = np.linalg.norm(one - other)
        assert error <= 4 * unit(case.x.dtype) * norm, f"result {i}: {error / max(norm, 1e-30)}"
    owned = np.zeros(len(case.on_rows), bool)
    for start, end in case.windows:
        owned[start:end] = True
    assert not np.asarray(got[0])[~owned].any()


class TestLayer:
    @ACTIVATIONS
    @pytest.mark.parametrize("dtype", [BF16, F16])
    @pytest.mark.parametrize("with_rows", [True, False])
    def test_against_the_reference(self, activation, dtype, with_rows, rng):
        options = dict(tokens=300, top_k=3, embed=136, hidden=264, experts=7)
        case = mlp.case(rng, dtype=dtype, with_rows=with_rows, **options)
        check_layers_agree(case, rng, activation)

    def test_against_float64(self, rng):
        case = mlp.case(rng, tokens=100, top_k=2, embed=64, hidden=72, experts=5, dtype=BF16)
        y = np.asarray(layer(case, "cuda")(case.factors, jnp.zeros((200, 64), BF16))[0], np.float64)
        exact = case.exact()
        assert np.linalg.norm(y - exact) <= 2 * unit(BF16) * np.linalg.norm(exact)

    def test_any_case(self, rng):
        for _ in range(25):
            tokens, top_k, experts = rng.integers(1, 200), rng.integers(1, 5), rng.integers(1, 9)
            local = rng.integers(1, experts + 1)
            case = mlp.case(
                rng,
                tokens=tokens,
                top_k=top_k,
                embed=8 * rng.integers(1, 40),
                hidden=8 * rng.integers(1, 60),
                experts=experts,
                local=local,
                offset=int(rng.integers(-1, experts)),
                sizes=sizes_of.any_kind(rng, tokens * top_k, experts),
                dtype=rng.choice([BF16, F16]),
                with_rows=bool(rng.integers(2)),
                with_weights=bool(rng.integers(2)),
            )
            check_layers_agree(case, rng, rng.choice(mlp.ACTIVATIONS))

    def test_same_inputs_give_the_same_bits(self, rng):
        case = mlp.case(rng, tokens=2000, top_k=4, embed=512, hidden=776, experts=16, dtype=BF16)
        cotangent = random(rng, (8000, 512), BF16)
        run = layer(case, "cuda")
        results = {
            b"".join(np.asarray(a).tobytes() for a in run(case.factors, cotangent))
            for _ in range(20)
        }
        assert len(results) == 1

    def test_what_no_kernel_has(self, rng):
        options = dict(tokens=300, top_k=3, experts=7, dtype=BF16)
        check_layers_agree(mlp.case(rng, embed=136, hidden=264, **options), rng, jnp.tanh)
        check_layers_agree(mlp.case(rng, embed=133, hidden=261, **options), rng)

    @ACTIVATIONS
    def test_gates_that_are_zero(self, activation, rng):
        """The slope of relu is zero at gates that are zero, whatever up is."""
        case = mlp.case(rng, tokens=300, embed=64, hidden=72, with_rows=False, dtype=BF16)
        case.x[::3] = 0
        cotangent = random(rng, case.x.shape, BF16)

        def gradients(implementation):
            def of_gate(b0):
                biases = b0, up, None
                return case.run(
                    jgg.ragged_mlp, *case.factors, biases=biases, activation=activation,
                    implementation=implementation,
                )  # fmt: skip

            return jax.vjp(of_gate, jnp.zeros_like(up))[1](cotangent)

        up = random(rng, case.wi_0.shape[::2], BF16)
        (got,), (want,) = (gradients(i) for i in ("cuda", "xla"))
        got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
        assert np.linalg.norm(got - want) <= 8 * unit(BF16) * np.linalg.norm(want)

    @pytest.mark.parametrize("hidden", [128, 256, 384])
    def test_layers_of_tokens(self, hidden, rng):
        """The routing changes from run to run of one program."""
        case = mlp.case(rng, tokens=512, embed=256, hidden=hidden, experts=8, dtype=BF16)

        @partial(jax.jit, static_argnums=2)
        def run(logits, factors, implementation):
            def of(logits, *factors):
                routing = moe.route(logits, 2)
                return moe.dropless_mlp(
                    factors[0], routing, *factors[1:], implementation=implementation
                )

            y, vjp = jax.vjp(of, logits, *factors)
            return y, *vjp(jnp.cos(y))

        for _ in range(8):
            logits = rng.standard_normal((512, 8), np.float32) * rng.uniform(0, 5)
            got, want = (run(logits, case.factors[:4], i) for i in ("cuda", "xla"))
            for one, other in zip(got, want, strict=True):
                one, other = (np.asarray(a).astype(np.float64) for a in (one, other))
                assert np.linalg.norm(one - other) <= 16 * unit(BF16) * np.linalg.norm(other) + 1e-5

    def test_second_derivatives(self, rng):
        case = mlp.case(rng, tokens=64, embed=64, hidden=72, dtype=BF16)
        other = mlp.case(rng, tokens=64, embed=64, hidden=72, dtype=BF16)

        def product(implementation):
            def loss(*factors):
                y = case.run(jgg.ragged_mlp, *factors, implementation=implementation)
                return jnp.sum(jnp.sin(y.astype(jnp.float32)))

            every = tuple(range(5))
            run = jax.jit(lambda *f: jax.jvp(jax.grad(loss, every), f, other.factors)[1])
            return run(*case.factors)

        for one, want in zip(product("cuda"), product("xla"), strict=True):
            one, want = (np.asarray(a).astype(np.float64) for a in (one, want))
            assert np.linalg.norm(one - want) <= 16 * unit(BF16) * np.linalg.norm(want)
