"""`check_groups` lets programs check group sizes and offsets when they run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

M, K, N, G = 10, 4, 3, 3
GOOD = np.array([4, 0, 6])
BAD = {
    "negative": (np.array([12, -2, 0]), 0, "must not be negative"),
    "past": (np.array([4, 4, 4]), 0, "must not sum past the 10 rows"),
    "overflow": (np.array([2**31 - 1, 2**31 - 1, 2]), 0, "must not sum past the 10 rows"),
    "below": (np.array([4, 0, 5]), 0, "must sum to the 10 rows"),
    "offset_below": (GOOD, -1, "group_offset must be between 0 and 1"),
    "offset_past": (GOOD, 2, "group_offset must be between 0 and 1"),
}


def products(rng):
    """Returns functions of (group_sizes, group_offset), for two of the three groups."""
    x, dy = (jnp.asarray(rng.standard_normal((M, n)), jnp.float32) for n in (K, N))
    w = jnp.asarray(rng.standard_normal((2, K, N)), jnp.float32)
    e4m3 = jnp.float8_e4m3fn
    blocks = jnp.ones((4, K, 128), e4m3), jnp.ones((4, K))
    contracting = functools.partial(
        jgg.scaled_ragged_dot_contracting, *blocks, *blocks, num_rows=M, num_groups=2
    )
    scaled = functools.partial(
        jgg.scaled_ragged_dot, x.astype(e4m3), 1.0, w.astype(e4m3), 1.0, lhs_scaling="tensor"
    )
    return {
        "ragged_dot": functools.partial(jgg.ragged_dot, x, w),
        "accumulate": functools.partial(jgg.ragged_dot_accumulate, w, x, dy),
        "fp8": functools.partial(jgg.fp8_ragged_dot, x, w),
        "scaled": scaled,
        "scaled_contracting": contracting,
        "mlp": functools.partial(jgg.ragged_mlp, x, w, w, w.mT),
    }


@pytest.fixture(params=["ragged_dot", "accumulate", "fp8", "scaled", "scaled_contracting", "mlp"])
def product(request, rng):
    function = products(rng)[request.param]
    return lambda sizes, offset: function(sizes, group_offset=offset)


@pytest.mark.parametrize("sizes, offset, message", BAD.values(), ids=BAD)
def test_mistakes_raise_at_once(sizes, offset, message, product):
    product(sizes, offset)
    with jgg.check_groups():
        product(GOOD, 1)
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            product(sizes, offset)
    product(sizes, offset)


def test_mistakes_inside_jit(product):
    """A function that was traced before is traced again with checks, and gives equal results."""
    jitted = jax.jit(product)
    expected = jitted(GOOD, 0)
    with jgg.check_groups():
        checked = jax.jit(checkify.checkify(jitted))
        error, out = checked(GOOD, 0)
        error.throw()
        np.testing.assert_array_equal(out, expected)
        errors = {name: checked(sizes, offset)[0] for name, (sizes, offset, _) in BAD.items()}
    for name, (_, _, message) in BAD.items():
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            errors[name].throw()
            pytest.fail(name)


def test_rows_without_a_group_on_request(product):
    with jgg.check_groups(unowned_rows=True):
        product(BAD["below"][0], 0)
        with pytest.raises(checkify.JaxRuntimeError, match="sum past"):
            product(BAD["past"][0], 0)


def test_gradients_and_batches(rng):
    x = jnp.asarray(rng.standard_normal((2, M, K)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((G, K, N)), jnp.float32)

    def loss(w, sizes):
        return jax.vmap(jgg.ragged_dot, in_axes=(0, None, 0))(x, w, sizes).sum()

    with jgg.check_groups():
        gradient = checkify.checkify(jax.jit(jax.grad(loss)))
        error, out = gradient(w, np.stack([GOOD, GOOD[::-1]]))
        error.throw()
        error, _ = gradient(w, np.stack([GOOD, BAD["below"][0]]))
    np.testing.assert_allclose(out, jax.grad(loss)(w, np.stack([GOOD, GOOD[::-1]])), rtol=1e-5)
    with pytest.raises(checkify.JaxRuntimeError, match="sum to the 10 rows"):
        error.throw()


def test_moe_layers_never_fail(rng):
    x, logits = (jnp.asarray(rng.standard_normal((7, n)), jnp.float32) for n in (K, G))
    wi, wo = jnp.ones((G, K, N)), jnp.ones((G, N, K))
    with jgg.check_groups():
        moe.dropless_mlp(x, moe.route(logits, 2), wi, wi, wo, biases=(wi[:, 0], None, wo[:, 0]))


@pytest.mark.parametrize(
    "dtype, recipe, on_input",
    [
        (jnp.float32, None, True),
        (jnp.bfloat16, None, False),
        (jnp.float32, jgg.Recipe(), False),
        (jnp.bfloat16, jgg.Recipe(), True),
        (jnp.float32, jgg.Recipe(forward="bf16"), True),
        (jnp.bfloat16, jgg.Recipe(forward="bf16"), False),
    ],
)
def test_moe_layers_of_experts_that_there_are_not(dtype, recipe, on_input, rng):
    x, logits = (jnp.asarray(rng.standard_normal((7, n)), dtype) for n in (16, G))
    wi, wo = jnp.ones((G, 16, 24), dtype), jnp.ones((G, 24, 16), dtype)

    @jax.jit
    def layer(experts, offset):
        routing = moe.route(logits, 1)._replace(experts=experts)
        return moe.dropless_mlp(
            x, routing, wi[1:], wi[1:], wo[1:], recipe=recipe, group_offset=offset,
            apply_router_weight_on_input=on_input,
        )  # fmt: skip

    experts = rng.integers(0, G, (7, 1)).astype(np.int32)

    absent = experts.copy()
    absent[3] = -1

    def messages(*operands, **options):
        with jgg.check_groups(**options):
            checked = jax.jit(checkify.checkify(layer))
            return [checked(*each)[0].get() for each in operands]

    right, without, past = messages((experts, 1), (absent, 1), (experts, 2))
    assert right is None
    assert "group_sizes must sum to the 7 rows" in without
    assert "group_offset must be between 0 and 1" in past
    assert messages((absent, 1), unowned_rows=True) == [None]


def test_its_argument_is_a_boolean():
    with pytest.raises(TypeError, match="unowned_rows"):
        with jgg.check_groups(unowned_rows="yes"):
            pass
