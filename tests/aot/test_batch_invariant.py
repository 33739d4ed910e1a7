"""Batch-invariant programs for a GPU call the same kernels for any number of rows."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

pytestmark = [
    pytest.mark.plans_as_users_get_them,
    pytest.mark.usefixtures("extension"),
]

COUNTS = (1, 16, 129, 1024, 8192)
K, N, G = 14336, 4096, 8
ATTRIBUTES = "kind", "tile_m", "tile_n", "cluster", "terms"


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def calls(function, *operands):
    """Returns the target and attributes of every kernel call in the program for a GPU."""
    lowered = export.export(
        jax.jit(function), platforms=["cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*operands)
    text = lowered.mlir_module()
    found = []
    for target, config in re.findall(
        r"@jax_grouped_gemm\.(\w+)\.v\d+\(.*?mhlo.backend_config = \{(.*?)\}", text
    ):
        attributes = dict(re.findall(r"(\w+) = (\"\w+\"|-?\d+)", config))
        found.append((target, *(attributes.get(name) for name in ATTRIBUTES)))
    return found


def product(m, dtype=jnp.bfloat16, **options):
    operands = array(m, K, dtype=dtype), array(G, K, N, dtype=dtype), array(G, dtype=jnp.int32)
    return calls(partial(jgg.ragged_dot, **options), *operands)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_products_have_the_same_attributes(dtype):
    found = {str(product(m, dtype, batch_invariant=True)) for m in COUNTS}
    assert len(found) == 1 and "ragged_noncontracting" in str(found)
    assert len({str(product(m, dtype)) for m in COUNTS}) > 1


def test_layers_have_the_same_attributes_but_for_kernels_of_one_order():
    def layer(x, experts, weights, wi_0, wi_1, wo):
        routing = moe.Routing(jnp.zeros((x.shape[0], G)), experts, weights)
        return moe.dropless_mlp(x, routing, wi_0, wi_1, wo, batch_invariant=True)

    found = {}
    for tokens in COUNTS:
        choices = array(tokens, 2, dtype=jnp.int32), array(tokens, 2, dtype=jnp.float32)
        weights = array(G, N, 768), array(G, N, 768), array(G, 768, N)
        found[tokens] = calls(layer, array(tokens, N), *choices, *weights)
    of_products = {
        tokens: [call for call in every if call[3] is not None] for tokens, every in found.items()
    }
    assert of_products[1] == of_products[16] and of_products[129] == of_products[8192]
    assert {call[0] for call in of_products[1]} == {"decode_mlp"}
    assert not any('"stream_k"' in call for every in of_products.values() for call in every)


def test_what_no_kernel_runs_is_refused():
    """On a GPU, XLA would compute products of int32, so batch invariance is an error for them."""
    operands = array(8, 16, dtype=jnp.int32), array(2, 16, 8, dtype=jnp.int32)
    sizes = array(2, dtype=jnp.int32)
    for options in ({}, dict(implementation="cuda")):
        with pytest.raises(NotImplementedError, match="batch_invariant is impossible for ragged_d"):
            calls(partial(jgg.ragged_dot, batch_invariant=True, **options), *operands, sizes)
