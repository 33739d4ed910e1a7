"""The kernel for groups of few rows that quantises the rows it reads, and FP8 layers made of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.fp8.formats import Pair
from jax_grouped_gemm._src.fp8.products import Fp8Products
from jax_grouped_gemm._src.mlp.fp8 import few_rows
from jax_grouped_gemm._src.mlp.fp8.hidden import HiddenLayer, padded_columns
from jax_grouped_gemm._src.plan import TileChoices
from tests.support import fp8_oracle, mlp
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import BF16, E4M3, F32
from tests.support.fp8_products import fp8, scales
from tests.support.mlp_on_gpu import indices, owned_rows, unit
from tests.support.ops import random

DTYPES = pytest.mark.parametrize("dtype", [BF16, jnp.float16])


@pytest.fixture(autouse=True)
def any_rows_are_few(monkeypatch):
    monkeypatch.setattr(few_rows, "FEW_ROWS", 1 << 20)


@partial(jax.jit, static_argnames=("recipe", "layer", "implementation"))
def product(operands, matrices, *, recipe, layer=None, implementation="cuda"):
    products = Fp8Products(recipe, implementation, TileChoices())
    if implementation == "cuda":
        y = few_rows.product(products, layer, matrices, operands)
        assert y is not None
        return y
    given = operands | matrices._asdict()
    return few_rows.PRODUCT.reference(
        *given.values(), names=tuple(given), products=products, hidden_layer=layer
    )


def rows_of_tokens(rng, sizes, m, k, dtype, owned):
    """Operands x and perhaps rows, NaN where nobody reads them, and the same as rows."""
    if rng.integers(2):
        tokens = int(rng.integers(2, 40))
        x = random(rng, (tokens, k), dtype)
        rows = rng.integers(-1, tokens + 1, m).astype(np.int32)
        exists = (rows >= 0) & (rows < tokens)
        on_rows = np.where(exists[:, None], x[rows % tokens].astype(np.float32), 0).astype(dtype)
        unread = np.setdiff1d(np.arange(tokens), rows[owned & exists])
        x[unread] = np.nan
        return dict(x=x, rows=rows), on_rows
    x = random(rng, (m, k), dtype)
    on_rows = x.copy()
    x[~owned] = np.nan
    return dict(x=x), on_rows


def check_product(rng, sizes, m, k, n, dtype, *, groups=None, offset=0, power_of_two=False):
    """The product alone against float64, of rows as they are quantised elsewhere."""
    groups = len(sizes) if groups is None else groups
    owned = owned_rows(sizes, offset, groups, m)
    operands, on_rows = rows_of_tokens(rng, sizes, m, k, dtype, owned)
    # Magnitudes that differ from block to block, so that a scale in a wrong place is seen.
    spread = np.repeat(np.exp(rng.uniform(-3, 3, (1, -(-k // 128)))), 128, axis=1)[:, :k]
    for name in ("x",):
        operands[name] = (operands[name].astype(np.float32) * spread).astype(dtype)
    on_rows = (on_rows.astype(np.float32) * spread).astype(dtype)
    matrices = Pair(fp8(rng, (groups, n, k)), scales(rng, (groups, -(-n // 128), -(-k // 128))))
    recipe = jgg.Recipe(power_of_two_scales=power_of_two)
    y = product(operands | indices(sizes, offset), matrices, recipe=recipe)
    on_rows = np.where(owned[:, None], on_rows.astype(np.float32), 0)
    values = fp8_oracle.quantize(on_rows, (1, 128), E4M3, power_of_two)
    transposed = matrices.values.swapaxes(1, 2), matrices.scales.swapaxes(1, 2)
    exact = fp8_oracle.noncontracting(*values, *transposed, sizes, offset)
    fp8_oracle.check(np.asarray(y), exact)
    assert not np.asarray(y, np.float32)[~owned].any()


@DTYPES
def test_few_rows_of_many_groups(dtype, rng):
    for power_of_two in (False, True) * 6:
        groups, m = int(rng.integers(1, 150)), int(rng.integers(1, 200))
        sizes = sizes_of.any_kind(rng, m, groups)
        check_product(rng, sizes, m, 272, 392, dtype, power_of_two=power_of_two)


def test_groups_and_matrices_of_any_size(rng):
    for _ in range(25):
        k, n = 16 * int(rng.integers(1, 60)), 8 * int(rng.integers(1, 60))
        check_product(rng, sizes_of.any_kind(rng, 300, 8), 300, k, n, BF16)


@pytest.mark.parametrize("offset", [-2, 0, 3, 7])
def test_windows(offset, rng):
    for _ in range(5):
        sizes = sizes_of.any_kind(rng, 60, 8)
        check_product(rng, sizes, 60, 144, 200, BF16, groups=3, offset=offset)


def test_more_groups_than_sizes_are_read_at_once(rng):
    for groups in (512, 513, 1200):
        check_product(rng, sizes_of.multinomial(rng, 200, groups), 200, 48, 72, BF16)


@DTYPES
@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
@pytest.mark.parametrize("has_up", [True, False], ids=["gated", "alone"])
def test_hidden_layers(activation, has_up, dtype, rng):
    """Against the same operations in pure JAX, with any of what is applied to the sums."""
    if not has_up and activation in mlp.CLIPPED:
        pytest.skip("what is clipped has an up projection")
    for hidden in (192, 200):
        m, k, groups = 70, 272, 5
        sizes = sizes_of.any_kind(rng, m, groups)
        owned = owned_rows(sizes, 0, groups, m)
        operands, _ = rows_of_tokens(rng, sizes, m, k, dtype, owned)
        for name in ("b0", "b1")[: 1 + has_up]:
            if rng.integers(2):
                operands[name] = random(rng, (groups, hidden), rng.choice([dtype, np.float32]))
        if rng.integers(2):
            operands["weights"] = rng.uniform(0.1, 1, m).astype(np.float32)
            operands["weights"][~owned] = np.nan
        operands |= indices(sizes)
        columns = 2 * padded_columns(hidden) if has_up else hidden
        matrices = Pair(
            fp8(rng, (groups, columns, k)),
            scales(rng, (groups, -(-columns // 128), -(-k // 128))) / 8,
        )
        layer = HiddenLayer(as_activation(activation), hidden, has_up, jgg.Recipe())
        got, want = (
            np.asarray(
                product(operands, matrices, recipe=layer.recipe, layer=layer, implementation=name),
                np.float64,
            )
            for name in ("cuda", "reference")
        )
        assert np.linalg.norm(got - want) <= 4 * unit(dtype) * np.linalg.norm(want)
        assert not got[~owned].any()


@pytest.mark.parametrize("hidden", [200, 256])
@pytest.mark.parametrize("biased", [True, False], ids=["biases", "plain"])
def test_layers_of_few_tokens(hidden, biased, rng):
    """Against the layer in pure JAX, with routing that changes from run to run."""
    experts, top_k, tokens = 32, 4, 17
    case = mlp.case(rng, tokens=tokens, embed=272, hidden=hidden, experts=experts, dtype=BF16)
    quantized = jgg.quantize_mlp(case.wi_0, case.wi_1, case.wo)
    biases = [random(rng, (experts, hidden), BF16) for _ in range(2)] if biased else None
    biases = (*biases, None) if biases else None

    @partial(jax.jit, static_argnums=0)
    def run(implementation, logits):
        return moe.dropless_mlp(
            case.x, moe.route(logits, top_k), case.wi_0, case.wi_1, case.wo, biases=biases,
            recipe=jgg.Recipe(), quantized=quantized, implementation=implementation,
        )  # fmt: skip

    assert few_rows.TARGET in run.lower("cuda", jnp.zeros((tokens, experts), F32)).as_text()
    for _ in range(6):
        logits = rng.standard_normal((tokens, experts), np.float32) * rng.uniform(0, 5)
        got, want = (np.asarray(run(i, logits), np.float64) for i in ("cuda", "reference"))
        # A last bit of hidden may decide how it is rounded to 8 bits.
        assert np.linalg.norm(got - want) <= 2.0**-5 * np.linalg.norm(want)


def test_same_inputs_give_the_same_bits(rng):
    operands = dict(x=random(rng, (40, 512), BF16), rows=rng.integers(0, 40, 256).astype(np.int32))
    operands |= indices(sizes_of.multinomial(rng, 256, 64))
    matrices = Pair(fp8(rng, (64, 776, 512)), scales(rng, (64, 7, 4)))
    run = partial(product, operands, matrices, recipe=jgg.Recipe())
    assert len({np.asarray(run()).tobytes() for _ in range(20)}) == 1
