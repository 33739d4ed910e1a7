"""FP8 products that read the tokens of their rows in place, on the device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.formats import IN_BLOCKS
from jax_grouped_gemm._src.fp8.scaled import call, primitive
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from tests.support import fp8_oracle
from tests.support.dtypes import BF16, E4M3, E5M2, F32
from tests.support.fp8_products import OUTPUTS, fp8, scales

DTYPES = pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])


def tokens_and_rows(rng, tokens, rows, k, dtype):
    """Returns tokens with scales, and the tokens of rows. Tokens that no row reads are NaN."""
    x, x_scales = fp8(rng, (tokens, k), dtype), scales(rng, (tokens, k // 128))
    where = rng.integers(-2, tokens + 2, rows).astype(np.int32)
    where[where == 0] = tokens
    unread = np.setdiff1d(np.arange(tokens), where)
    assert 0 in unread
    x[unread], x_scales[unread] = np.nan, np.nan
    return (x, x_scales), where


@DTYPES
@OUTPUTS
def test_products_of_tokens_are_those_of_copies(dtypes, out_dtype, rng, monkeypatch):
    """Products that read tokens in place have the bits of products of copied rows.

    Some products have a window of the groups, columns that are no multiple of the tile, or so many
    columns that plans would choose copies.
    """
    monkeypatch.setattr("jax_grouped_gemm._src.fp8.scaled.plan.FP8_TILES_IN_PLACE", 4)
    for tokens, rows, k, n, sizes in [
        (300, 1000, 512, 512, [300, 0, 430, 270]),
        (77, 900, 1536, 264, [1, 2, 500, 397]),
        (2000, 2000, 1024, 392, [128, 256, 64, 1000, 3, 200]),
        (700, 5000, 2048, 512, [5000]),
        (64, 300, 512, 384, [0, 0, 0]),
        (40, 333, 4096, 512, [65, 63, 129, 76]),
        (500, 1500, 512, 1000, [200, 700, 600]),
        (500, 1500, 1024, 136, [641, 859, 0]),
    ]:
        x, where = tokens_and_rows(rng, tokens, rows, k, dtypes[0])
        exists = (where >= 0) & (where < tokens)
        copies = [np.where(exists[:, None], y[where % tokens], 0).astype(y.dtype) for y in x]
        sizes = np.asarray(sizes, np.int32)
        for groups, offset in ((len(sizes), 0), (2, len(sizes) - 1), (3, -1)):
            rhs = fp8(rng, (groups, n, k), dtypes[1])
            rhs_scale = scales(rng, (groups, -(-n // 128), k // 128))
            params = dict(
                transpose_rhs=True,
                **IN_BLOCKS,
                preferred_element_type=np.dtype(out_dtype),
                implementation="cuda",
                tile=DEFAULT_TILE,
            )
            operands = rhs, rhs_scale, sizes, np.asarray([offset], np.int32)
            in_place = partial(primitive.gathered_scaled_noncontracting, copied=None, **params)
            in_place = jax.jit(in_place)
            assert (
                call.GATHERED_NONCONTRACTING_TARGET
                in in_place.lower(*x, *operands, where).as_text()
            )
            got = np.float64(in_place(*x, *operands, where))
            plain = partial(primitive.scaled_ragged_noncontracting, **params)
            np.testing.assert_array_equal(got, np.float64(jax.jit(plain)(*copies, *operands)))
            transposed = rhs.swapaxes(1, 2), rhs_scale.swapaxes(1, 2)
            exact = fp8_oracle.noncontracting(*copies, *transposed, sizes, offset)
            fp8_oracle.check(got.astype(out_dtype), exact)


@pytest.mark.parametrize("hidden, embed", [(256, 512), (136, 1536)])
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_layers_are_those_of_copied_rows(hidden, embed, dtype, rng, monkeypatch):
    """Layers that read tokens in place, or copies, agree bit for bit, forward and backward.

    The routing changes between runs.
    """
    tokens, experts, top_k = 1000, 8, 4
    shapes = (experts, embed, hidden), (experts, embed, hidden), (experts, hidden, embed)
    x = jnp.asarray(rng.standard_normal((tokens, embed)), dtype)
    matrices = [jnp.asarray(rng.standard_normal(s) / s[1] ** 0.5, dtype) for s in shapes]

    def loss(x, matrices, logits):
        y = jgg.moe.dropless_mlp(
            x, jgg.moe.route(logits, top_k), *matrices, recipe=jgg.Recipe(), implementation="cuda"
        )
        return jnp.sum(jnp.sin(y.astype(F32)))

    def run(in_place):
        if not in_place:
            monkeypatch.setattr("jax_grouped_gemm._src.fp8.scaled.plan.FP8_TILES_IN_PLACE", 0)
        gradients = jax.jit(jax.grad(lambda *operands: loss(*operands), (0, 1, 2)))
        text = gradients.lower(x, matrices, logits[0]).as_text()
        assert (call.GATHERED_NONCONTRACTING_TARGET in text) == in_place
        return [gradients(x, matrices, some) for some in logits]

    logits = jnp.asarray(rng.standard_normal((5, tokens, experts)), F32)
    # Send all tokens to a few experts, so that the other experts have none.
    logits = logits.at[3:, :, 5:].add(-100.0)
    for got, want in zip(run(True), run(False), strict=True):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.float32(one), np.float32(other))
