"""Batch invariance on the GPU: a row has the same bits alone and among any other rows."""

import functools
import os

# A shared host may not let every process use multicast memory.
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
COUNTS = (1, 16, 129, 1024, 8192)
SOME = (1, 129, 8192)
FEW = (1, 4, 16, 129, 1024)
"""Kernels sort up to 128 pairs of a token and an expert themselves: 16 tokens of 8 experts."""
MANY = 8192
WATCHED = 32
"""Rows whose bits are compared."""

LAYERS = {  # D, F, E, k
    "qwen3": (2048, 768, 64, 8),
    "mixtral": (4096, 14336, 8, 2),
    "gptoss": (2880, 2880, 16, 4),
    "odd": (1096, 520, 12, 3),
}


def arrays(rng, *shapes, dtype=BF16):
    """Returns arrays of many magnitudes, so that the bits of a sum show its order and rounding.

    One small program makes all arrays, because these tests spend most of their time compiling.
    """
    spread, scale = (1, 0.25) if dtype == jnp.float16 else (1.5, 1)

    def values(key, shape):
        one, other = jax.random.split(key)
        x = jax.random.normal(one, shape) * jnp.exp2(spread * jax.random.normal(other, shape))
        return (x * scale * (shape[-2] ** -0.5 if len(shape) == 3 else 1)).astype(dtype)

    @jax.jit
    def every(key):
        return [values(*x) for x in zip(jax.random.split(key, len(shapes)), shapes, strict=True)]

    return every(jax.random.key(int(rng.integers(2**31)), impl="rbg"))


def assert_same(one, other, what):
    one, other = (np.asarray(x).astype(np.float32) for x in (one, other))
    assert np.isfinite(one).all()
    differ = (one.view(np.uint32) != other.view(np.uint32)).mean()
    assert differ == 0, f"{what}: {differ:.3g} of all elements differ"


def check_layer(rng, layer, of_tokens, counts):
    """Checks that `layer` gives a token the same bits among any number of tokens."""
    whole = [np.asarray(a) for a in layer(*of_tokens)]
    for count in counts:
        # Put some of the first tokens at random places among other tokens.
        tokens, places = rng.permutation(MANY)[:count], rng.permutation(count)[:WATCHED]
        tokens[places] = np.arange(len(places))
        got = layer(*(a[tokens] for a in of_tokens))
        for name, a, b in zip(("y", "dx"), got, whole, strict=False):
            assert_same(np.asarray(a)[places], b[: len(places)], f"{name} among {count} tokens")


def operands(rng, name, dtype=BF16):
    """Returns x, experts, weights and dy of tokens, and the matrices."""
    d, f, e, k = LAYERS[name]
    shapes = (MANY, d), (MANY, d), (e, d, f), (e, d, f), (e, f, d)
    x, dy, *matrices = arrays(rng, *shapes, dtype=dtype)
    popularity = np.log(rng.dirichlet(np.full(e, 2.0)))
    experts = np.argsort(-(popularity + rng.gumbel(size=(MANY, e))), axis=1)[:, :k]
    weights = rng.uniform(0.1, 1, experts.shape).astype(np.float32)
    return (np.asarray(x), experts.astype(np.int32), weights, np.asarray(dy)), matrices


def layer_of(matrices, run=moe.dropless_mlp, gradient=True, **options):
    """Returns a function of x, experts, weights and dy that returns y and dx."""
    num_experts = matrices[0].shape[0]

    @jax.jit
    def layer(matrices, x, experts, weights, dy):
        logits = jnp.zeros((x.shape[0], num_experts), F32)

        def of(x):
            return run(x, moe.Routing(logits, experts, weights), *matrices, **options)

        if not gradient:
            return (of(x),)
        y, vjp = jax.vjp(of, x)
        return y, *vjp(dy)

    return functools.partial(layer, matrices)


invariant = functools.partial(layer_of, batch_invariant=True)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "odd"])
def test_layers(name, rng):
    of_tokens, matrices = operands(rng, name)
    check_layer(rng, invariant(matrices), of_tokens, COUNTS)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "odd"])
def test_layers_of_few_tokens(name, rng):
    """Without gradients, kernels sort few tokens themselves."""
    of_tokens, matrices = operands(rng, name)
    layer = invariant(matrices, gradient=False)
    for count, sorts in (16, True), (129, False):
        plans = jgg.explain(layer, *(a[:count] for a in of_tokens)).plans
        assert ("decode_mlp" in [plan.problem.op for plan in plans]) == sorts
    check_layer(rng, layer, of_tokens, FEW)


def test_layers_of_few_tokens_with_biases(rng):
    """Kernels that sort add the biases of gate and up, but not the bias of down."""
    of_tokens, matrices = operands(rng, "gptoss")
    d, f, e, _ = LAYERS["gptoss"]
    *of_hidden, of_down = arrays(rng, (e, f), (e, f), (e, d))
    for bo in (None, of_down):
        options = dict(biases=(*of_hidden, bo), activation="swiglu_oai", gradient=False)
        check_layer(rng, invariant(matrices, **options), of_tokens, FEW)


def test_layers_with_biases(rng):
    of_tokens, matrices = operands(rng, "gptoss")
    d, f, e, _ = LAYERS["gptoss"]
    biases = tuple(arrays(rng, (e, f), (e, f), (e, d)))
    layer = invariant(matrices, biases=biases, activation="swiglu_oai")
    check_layer(rng, layer, of_tokens, SOME)


@pytest.mark.parametrize("recipe", [None, jgg.Recipe()], ids=["bf16", "fp8"])
def test_training_and_inference_agree(recipe, rng):
    of_tokens, matrices = operands(rng, "qwen3")
    layers = [invariant(matrices, gradient=g, recipe=recipe) for g in (False, True)]
    for count in (1, 16, 1024):
        (alone,), (trained, _) = (layer(*(a[:count] for a in of_tokens)) for layer in layers)
        assert_same(alone, trained, f"y of {count} tokens")


@pytest.mark.parametrize("name, counts", [("qwen3", COUNTS), ("mixtral", (1, 1024))])
def test_layers_in_fp8(name, counts, rng):
    of_tokens, matrices = operands(rng, name)
    check_layer(rng, invariant(matrices, recipe=jgg.Recipe()), of_tokens, counts)


@pytest.mark.parametrize(
    "name, format, counts",
    [
        ("qwen3", "mxfp4", COUNTS),
        ("qwen3", "int4", (1, 129, 1024)),
        ("qwen3", "int8", (1, 1024)),
        ("qwen3", "fp8", (1, 1024)),
        ("qwen3", "fp8_128x128", (1, 1024)),
        # With 8192 tokens, gate and up have tall tiles.
        ("gptoss", "mxfp4", (1, 1024, 8192)),
        ("gptoss", "fp8_128x128", (1, 1024, 8192)),
    ],
)
def test_layers_of_packed_weights(name, format, counts, rng):
    of_tokens, matrices = operands(rng, name)
    packed = jax.jit(lambda every: [jgg.quantize(w, format) for w in every])(matrices)
    check_layer(rng, invariant(packed, gradient=False), of_tokens, counts)


def test_layers_that_are_composed(rng):
    of_tokens, matrices = operands(rng, "odd", F32)
    check_layer(rng, invariant(matrices), of_tokens, (1, 129))


def check_product(rng, product, lhs, groups, counts=COUNTS):
    """Checks that `product` gives the rows of a group the same bits in groups of any size."""
    lhs, group = np.asarray(lhs), int(rng.integers(groups))
    alone = product(lhs[:WATCHED], np.bincount([group] * WATCHED, minlength=groups))
    for count in counts:
        watched = min(WATCHED, count)
        some = rng.integers(1, groups + 1)
        sizes = np.bincount(rng.integers(0, some, count - watched), minlength=groups)
        first = int(sizes[:group].sum() + rng.integers(sizes[group] + 1))
        rows = rng.integers(0, len(lhs), count)
        rows[first : first + watched] = np.arange(watched)
        sizes[group] += watched
        got = np.asarray(product(lhs[rows], sizes))[first : first + watched]
        assert_same(got, np.asarray(alone)[:watched], f"rows among {count}")


PRODUCTS = [
    (4096, 14336, 8, BF16),
    (14336, 4096, 8, BF16),
    (2048, 64, 4, BF16),
    (520, 1096, 5, jnp.float16),
    (2048, 1024, 4, F32),
]


@pytest.mark.parametrize("k, n, groups, dtype", PRODUCTS, ids=str)
def test_products(k, n, groups, dtype, rng):
    lhs, rhs = arrays(rng, (MANY, k), (groups, k, n), dtype=dtype)
    product = jax.jit(functools.partial(jgg.ragged_dot, batch_invariant=True, precision="highest"))
    check_product(rng, lambda x, sizes: product(x, rhs, sizes), lhs, groups)


@pytest.mark.parametrize("k, n", [(14336, 4096), (768, 2048)])
def test_products_in_fp8(k, n, rng):
    lhs, rhs = arrays(rng, (MANY, k), (8, k, n))
    product = jax.jit(functools.partial(jgg.fp8_ragged_dot, batch_invariant=True))
    check_product(rng, lambda x, sizes: product(x, rhs, sizes), lhs, 8)


@pytest.mark.parametrize("precision", [None, "ANY_F8_ANY_F8_F32_FAST_ACCUM"])
def test_products_of_scales_of_rows(precision, rng):
    lhs, rhs = arrays(rng, (MANY, 2048), (8, 768, 2048))
    rhs = jax.jit(lambda w: jgg.quantize(w, "fp8_row", layout="rows"))(rhs)

    @jax.jit
    def product(x, rhs, sizes):
        options = dict(transpose_rhs=True, precision=precision, batch_invariant=True)
        return jgg.ragged_dot(jgg.quantize(x, "fp8_row"), rhs, sizes, **options)

    check_product(rng, lambda x, sizes: product(x, rhs, sizes), lhs, 8)


def test_products_of_packed_weights(rng):
    lhs, rhs = arrays(rng, (MANY, 2048), (32, 2048, 768))
    rhs = jax.jit(lambda w: jgg.quantize(w, "int4"))(rhs)
    product = jax.jit(functools.partial(jgg.ragged_dot, batch_invariant=True))
    check_product(rng, lambda x, sizes: product(x, rhs, sizes), lhs, 32)


def test_kernels_of_one_table_have_the_same_bits(rng):
    """Batch-invariant plans choose between these two kernels by the number of rows."""
    lhs, rhs = arrays(rng, (512, 4096), (8, 4096, 1024))
    sizes = jnp.full(8, 64, jnp.int32)

    def product(lhs, rhs):
        return jgg.ragged_dot(lhs, rhs, sizes, batch_invariant=True)

    found = []
    for tile in (jgg.TileConfig(128, 256, 2), jgg.TileConfig(128, 128, 2)):
        with jgg.use_tiles(forward=tile):
            (plan,) = jgg.explain(product, lhs, rhs).plans
            assert plan.tile == tile
            found.append(jax.jit(product)(lhs, rhs))
    assert_same(*found, "a tile of 256 columns and one of 128")


def test_whole_layers_of_flax(rng):
    pytest.importorskip("flax", reason="Flax is not installed")
    from flax import nnx

    from jax_grouped_gemm.flax.nnx import MoE

    options = dict(dtype=BF16, param_dtype=F32, batch_invariant=True)
    layer = MoE(1024, 512, 32, 4, rngs=nnx.Rngs(0), **options)
    x = np.asarray(arrays(rng, (MANY, 1024))[0])
    apply = nnx.jit(lambda layer, x: layer(x)[0])
    whole = np.asarray(apply(layer, x))
    for count in SOME:
        assert_same(apply(layer, x[:count]), whole[:count], f"y of {count} tokens")


@pytest.mark.parametrize("recipe", [None, jgg.Recipe()], ids=["bf16", "fp8"])
def test_over_devices(recipe, rng):
    """On any number of devices, a token has the bits of one device, among few or many tokens."""
    of_tokens, matrices = operands(rng, "qwen3")
    given = [a[:1024] for a in of_tokens]
    expected = [np.asarray(a) for a in invariant(matrices, recipe=recipe)(*given)]
    for count in (1, 2, 4, 8):
        if count > len(jax.devices("cuda")):
            break
        devices = np.array(jax.devices("cuda")[:count])
        mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
        options = dict(expert_axis="expert", recipe=recipe, batch_invariant=True)
        over = moe.expert_parallel(mesh, **options)
        layer = layer_of(matrices, lambda *operands, over=over: over(*operands)[0])
        for tokens in (8, 1024):
            got = layer(*(a[:tokens] for a in given))
            for what, one, other in zip(("y", "dx"), got, expected, strict=True):
                assert_same(one, other[:tokens], f"{what} of {tokens} tokens on {count} devices")
