"""Batch invariance on the GPU: the bits of a row alone, and among any number of others."""

import functools
import os

# Multicast memory is not everybody's to use on a shared host.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

import jax_grouped_gemm as jgg  # noqa: E402
from jax_grouped_gemm import moe  # noqa: E402

pytestmark = pytest.mark.plans_as_users_get_them

BF16, F32 = jnp.bfloat16, jnp.float32
MANY = 8192
COUNTS = (1, 16, 129, 1024, MANY)
WATCHED = 32
"""Tokens whose bits are compared."""

LAYERS = {  # D, F, E, k: those that the benchmarks have, with fewer experts where they are many
    "qwen3": (2048, 768, 64, 8),
    "sonic": (1536, 256, 64, 8),
    "mixtral": (4096, 14336, 8, 2),
    "gptoss": (2880, 2880, 16, 4),
    "odd": (1096, 520, 12, 3),
}


def values(key, *shape, dtype=BF16):
    """Of many magnitudes, so that the order of a sum, and what it cuts off, is seen in its bits."""
    one, other = jax.random.split(key)
    spread, scale = (1, 0.25) if dtype == jnp.float16 else (1.5, 1)
    x = jax.random.normal(one, shape, F32) * jnp.exp2(spread * jax.random.normal(other, shape, F32))
    scale *= shape[-2] ** -0.5 if len(shape) == 3 else 1
    return (x * scale).astype(dtype)


def arrays(rng, *shapes, dtype=BF16):
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), len(shapes))
    return [values(key, *shape, dtype=dtype) for key, shape in zip(keys, shapes, strict=True)]


def assert_same(one, other, what):
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    assert np.isfinite(one).all()
    differ = (one.view(np.uint32) != other.view(np.uint32)).mean()
    assert differ == 0, f"{what}: {differ:.3g} of all elements differ"


def some_tokens(rng, count):
    """So many tokens, and the places of those among them that are watched."""
    tokens = rng.permutation(MANY)[:count]
    places = rng.permutation(count)[:WATCHED]
    tokens[places] = np.arange(len(places))
    return tokens, places


def check_layer(rng, layer, x, experts, *of_tokens):
    """`layer` of a token's arrays gives the same bits for any number of tokens."""
    whole = layer(x, experts, *of_tokens)
    for count in COUNTS:
        tokens, places = some_tokens(rng, count)
        got = layer(*(a[tokens] for a in (x, experts, *of_tokens)))
        for name, a, b in zip(("y", "dx"), got, whole, strict=False):
            assert_same(a[places], b[tokens[places]], f"{name} of {count} tokens and of {MANY}")


def operands(rng, name, dtype=BF16):
    d, f, e, k = LAYERS[name]
    x, dy, wi_0, wi_1, wo = arrays(
        rng, (MANY, d), (MANY, d), (e, d, f), (e, d, f), (e, f, d), dtype=dtype
    )
    popularity = np.log(rng.dirichlet(np.full(e, 2.0)))
    experts = np.argsort(-(popularity + rng.gumbel(size=(MANY, e))), axis=1)[:, :k]
    weights = rng.uniform(0.1, 1, experts.shape)
    return (
        *(x, jnp.asarray(experts, jnp.int32), jnp.asarray(weights, F32), dy),
        (wi_0, wi_1, wo),
    )


def layer_of(matrices, with_gradient=True, **options):
    """Of x, experts, weights and dy: y, and dx."""
    num_experts = matrices[0].shape[0]

    @jax.jit
    def layer(matrices, x, experts, weights, dy):
        logits = jnp.zeros((x.shape[0], num_experts), F32)

        def of(x):
            routing = moe.Routing(logits, experts, weights)
            return moe.dropless_mlp(x, routing, *matrices, batch_invariant=True, **options)

        if not with_gradient:
            return (of(x),)
        y, vjp = jax.vjp(of, x)
        return y, *vjp(dy)

    return functools.partial(layer, matrices)


@pytest.mark.parametrize("with_gradient", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, with_gradient, rng):
    *of_tokens, matrices = operands(rng, name)
    check_layer(rng, layer_of(matrices, with_gradient), *of_tokens)


@pytest.mark.parametrize(
    "recipe", [None, jgg.Recipe(), jgg.Recipe.rowwise()], ids=["bf16", "block", "row"]
)
@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_training_and_inference_agree(name, recipe, rng):
    *of_tokens, matrices = operands(rng, name)
    for count in COUNTS:
        given = [a[:count] for a in of_tokens]
        (alone,), (trained, _) = (
            layer_of(matrices, grad, recipe=recipe)(*given) for grad in (False, True)
        )
        assert_same(alone, trained, f"y of {count} tokens")


@pytest.mark.parametrize("scaling", ["blockwise", "rowwise"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gptoss", "odd"])
def test_layers_in_fp8(name, scaling, rng):
    *of_tokens, matrices = operands(rng, name)
    recipe = jgg.Recipe(scaling=scaling)
    check_layer(rng, layer_of(matrices, recipe=recipe), *of_tokens)


@pytest.mark.parametrize("name", ["gptoss", "odd"])
def test_layers_with_biases(name, rng):
    *of_tokens, matrices = operands(rng, name)
    d, f, e, _ = LAYERS[name]
    biases = tuple(arrays(rng, (e, f), (e, f), (e, d)))
    layer = layer_of(matrices, biases=biases, activation="swiglu_oai")
    check_layer(rng, layer, *of_tokens)


@pytest.mark.parametrize("format", ["mxfp4", "int4", "int8"])
@pytest.mark.parametrize("name", ["gptoss", "qwen3"])
def test_layers_of_packed_weights(name, format, rng):
    *of_tokens, matrices = operands(rng, name)
    packed = [jgg.quantize(w, format) for w in matrices]
    check_layer(rng, layer_of(packed, with_gradient=False), *of_tokens)


@pytest.mark.parametrize("dtype", [jnp.float16, F32], ids=str)
def test_layers_that_are_composed(dtype, rng):
    *of_tokens, matrices = operands(rng, "odd", dtype)
    check_layer(rng, layer_of(matrices), *of_tokens)


PRODUCTS = [(4096, 14336, 8), (14336, 4096, 8), (768, 2048, 64), (2048, 64, 128), (520, 1096, 5)]


def ragged_sizes(rng, rows, groups):
    return np.bincount(
        rng.integers(0, groups, rows) % rng.integers(1, groups + 1), minlength=groups
    )


def check_product(rng, product, lhs, groups):
    """`product` of rows and sizes gives the rows of a group the same bits in groups of any size."""
    of_group = int(rng.integers(groups))
    alone = product(lhs[:WATCHED], np.bincount([of_group] * WATCHED, minlength=groups))
    for count in COUNTS:
        watched = min(WATCHED, count)
        sizes = ragged_sizes(rng, count - watched, groups)
        first = int(sizes[:of_group].sum()) + int(rng.integers(sizes[of_group] + 1))
        rows = rng.integers(0, len(lhs), count)
        rows[first : first + watched] = np.arange(watched)
        sizes[of_group] += watched
        got = product(lhs[rows], sizes)[first : first + watched]
        assert_same(got, alone[:watched], f"rows among {count}")


@pytest.mark.parametrize("dtype", [BF16, jnp.float16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("k, n, groups", PRODUCTS, ids=str)
def test_products(k, n, groups, dtype, rng):
    lhs, rhs = arrays(rng, (MANY, k), (groups, k, n), dtype=dtype)
    product = jax.jit(functools.partial(jgg.ragged_dot, batch_invariant=True, precision="highest"))
    check_product(rng, lambda x, sizes: product(x, rhs, sizes), lhs, groups)


@pytest.mark.parametrize(
    "recipe",
    [jgg.Recipe(), jgg.Recipe.rowwise(), jgg.Recipe.rowwise(fast_accumulation=True)],
    ids=["blockwise", "rowwise", "fast"],
)
@pytest.mark.parametrize("k, n, groups", PRODUCTS, ids=str)
def test_products_in_fp8(k, n, groups, recipe, rng):
    lhs, rhs = arrays(rng, (MANY, k), (groups, k, n))
    product = jax.jit(functools.partial(jgg.fp8_ragged_dot, recipe=recipe, batch_invariant=True))
    check_product(rng, lambda x, sizes: product(x, rhs, sizes), lhs, groups)


@pytest.mark.parametrize("format", ["mxfp4", "int4", "int8"])
def test_products_of_packed_weights(format, rng):
    lhs, rhs = arrays(rng, (MANY, 2048), (32, 2048, 768))
    rhs = jgg.quantize(rhs, format)
    product = jax.jit(functools.partial(jgg.ragged_dot, batch_invariant=True))
    check_product(rng, lambda x, sizes: product(x, rhs, sizes), lhs, 32)


def test_kernels_of_one_table_have_the_same_bits(rng):
    """Those that batch invariance chooses from by the number of rows."""
    k, n, groups = 4096, 1024, 8
    lhs, rhs = arrays(rng, (512, k), (groups, k, n))
    sizes = jnp.full(groups, 64, jnp.int32)

    def product(lhs, rhs):
        return jgg.ragged_dot(lhs, rhs, sizes, batch_invariant=True)

    tiles = [jgg.TileConfig(128, 256, 2), jgg.TileConfig(128, 128, 2)]
    found = []
    for tile in tiles:
        with jgg.use_tiles(forward=tile):
            (plan,) = jgg.explain(product, lhs, rhs).plans
            assert plan.tile == tile
            found.append(jax.jit(product)(lhs, rhs))
    assert_same(*found, "a tile of 256 columns and one of 128")


def test_whole_layers_of_flax(rng):
    from flax import nnx

    from jax_grouped_gemm.flax.nnx import MoE

    layer = MoE(
        1024, 512, 32, 4, dtype=BF16, param_dtype=F32, batch_invariant=True, rngs=nnx.Rngs(0)
    )
    (x,) = arrays(rng, (MANY, 1024))
    apply = nnx.jit(lambda layer, x: layer(x)[0])
    whole = apply(layer, x)
    for count in COUNTS:
        assert_same(apply(layer, x[:count]), whole[:count], f"y of {count} tokens")


def test_a_program(rng):
    """The context holds for what is traced inside."""
    (x, w) = arrays(rng, (MANY, 4096), (8, 4096, 14336))
    product = jax.jit(jgg.ragged_dot)

    def of(count):
        with jgg.batch_invariant():
            return product(x[:count], w, jnp.zeros(8, jnp.int32).at[3].set(count))

    whole = of(MANY)
    for count in COUNTS:
        assert_same(of(count), whole[:count], f"{count} rows")


@pytest.mark.parametrize("recipe", [None, jgg.Recipe()], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_over_devices(name, recipe, rng):
    """A token has the bits of one device, alone and among others, on as many as there are."""
    x, experts, weights, dy, matrices = operands(rng, name)
    e = LAYERS[name][2]
    given = x[:1024], experts[:1024], weights[:1024], dy[:1024]
    expected = layer_of(matrices, recipe=recipe)(*given)
    for count in (1, 2, 4, 8):
        if count > len(jax.devices("cuda")):
            break
        devices = np.array(jax.devices("cuda")[:count])
        mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
        options = dict(recipe=recipe, batch_invariant=True)
        run = moe.expert_parallel(mesh, expert_axis="expert", **options)

        @jax.jit
        def layer(matrices, x, experts, weights, dy, run=run):
            def of(x):
                routing = moe.Routing(jnp.zeros((x.shape[0], e), F32), experts, weights)
                return run(x, routing, *matrices)[0]

            y, vjp = jax.vjp(of, x)
            return y, *vjp(dy)

        for tokens in (8, 1024):
            got = layer(matrices, *(a[:tokens] for a in given))
            for what, one, other in zip(("y", "dx"), got, expected, strict=True):
                assert_same(one, other[:tokens], f"{what} of {tokens} tokens on {count} devices")
