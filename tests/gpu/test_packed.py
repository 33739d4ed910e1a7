"""Products of packed matrices on the GPU, against float64 of codes times scales."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import group_sizes as sizes_of
from tests.support import mlp, weight_formats
from tests.support.mlp_on_gpu import close

BF16 = jnp.bfloat16
EIGHT_BITS = "int8", "fp8", "fp8_128x128"
WITHOUT_FEW_ROWS = ("fp8_128x128",)
ALL = "mxfp4", "int4", *EIGHT_BITS
VARIANTS = [
    ("mxfp4", {}),
    ("int8", {}),
    ("fp8", {}),
    ("fp8_128x128", {}),
    *(
        ("int4", dict(group_size=size, zero_points=zero_points))
        for size in (32, 64, 128)
        for zero_points in (False, True)
    ),
]
FORMATS = pytest.mark.parametrize("format, options", VARIANTS, ids=str)
# "few" decodes in tiles of 32 rows. For WITHOUT_FEW_ROWS it is the same as "decoded".
SCHEDULES = pytest.mark.parametrize("schedule", ["streamed", "few", "decoded"])
STREAMED_ROWS = 8
MEAN_ROWS = {"streamed": STREAMED_ROWS, "few": 16, "decoded": 100}
# With at least 128 rows a group, TMA loads consecutive rows.
MEANS = [*MEAN_ROWS.items(), ("decoded", 160)]
# "tall" has tiles of 256 rows. Plans choose them for so many rows a group, and so many columns.
TALL = [(format, "tall", 785) for format in ("mxfp4", "fp8_128x128")]
TALL_COLUMNS = 2056


def groups_for(schedule, rows):
    """Returns the least and the most groups for `rows` rows: plans choose by rows per group."""
    if schedule == "streamed":
        few = -(-rows // STREAMED_ROWS)
        return few, few + 20
    of_many = max(-(-rows // 24) - (schedule == "decoded"), 1)
    return (1, of_many) if schedule == "decoded" else (of_many, max(-(-rows // 8) - 1, of_many))


def is_planned(plan, schedule, format):
    """Returns whether a plan has the kernel that `schedule` stands for."""
    kernel = plan.kernel
    if schedule == "tall":
        return kernel.tile.tile_m == 256
    if schedule == "streamed" or format in WITHOUT_FEW_ROWS:
        return kernel.schedule == ("streamed" if schedule == "streamed" else "decoded")
    return kernel.schedule == "decoded" and (schedule == "decoded" or kernel.tile.tile_m == 32)


def packed(rng, shape, format, options):
    """Returns packed matrices whose columns have different magnitudes."""
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-2], 1, shape[-1])))
    return jgg.quantize(jnp.asarray(x, jnp.float32), format, **options)


def exact(q):
    """Returns, in float64, the weights that kernels multiply: some are rounded to bfloat16."""
    if q.format.name == "fp8_128x128":
        return weight_formats.kernel_blocks(q)
    return np.asarray(q.dequantize(BF16 if q.format.name == "int4" else jnp.float32), np.float64)


def dot(x, q, sizes, offset=0, *, schedule):
    """Returns the product by the kernel that `schedule` names."""
    sizes = jnp.asarray(sizes, jnp.int32)

    def product(x, q):
        return jgg.ragged_dot(x, q, sizes, group_offset=offset, implementation="cuda")

    (plan,) = jgg.explain(product, x, q).plans
    assert is_planned(plan, schedule, q.format.name)
    return jax.jit(product)(x, q)


def check_sums(got, x, q, sizes, offset=0):
    """Compares the rows of all groups with float64. Unowned rows have to be zero."""
    x, w, got = (np.asarray(a, np.float64) for a in (x, exact(q), got))
    want, bound = np.zeros(got.shape), np.zeros(got.shape)
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0), dtype=np.int64), x.shape[0])
    for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows = slice(begin, end)
        if 0 <= group - offset < w.shape[0]:
            want[rows] = x[rows] @ w[group - offset]
            bound[rows] = np.abs(x[rows]) @ np.abs(w[group - offset])
    error = np.abs(got - want)
    assert (error <= np.abs(want) * 2.0**-8 + bound * (x.shape[1] * 2.0**-23)).all()


def check_close(got, want, error):
    """Allows six standard deviations (see `mlp.linear`) and lost subnormal numbers of float32."""
    close(got, want, 6 * 2.0**-9 * error + 2.0**-110, "result")


def check_layer(got, x, routing, matrices, biases, activation):
    """Compares a layer with float64. Errors of different roundings count as independent."""
    x = np.asarray(x, np.float64)
    w0, w1, wo = (exact(q) for q in matrices)
    biases = [b if b is None else np.asarray(b, np.float64) for b in biases]
    want, variance = np.zeros((2, *got.shape))
    pairs = zip(np.asarray(routing.experts).T, np.asarray(routing.weights).T, strict=True)
    for experts, weights in pairs:
        for row, (e, weight) in enumerate(zip(experts, weights, strict=True)):
            b0, b1, bo = (None if b is None else b[e] for b in biases)
            hidden, error = mlp.hidden_layer(x[row], w0[e], w1[e], b0, b1, activation)
            y, y_error = mlp.linear(hidden, wo[e], bo)
            want[row] += weight * y
            variance[row] += weight**2 * (y_error**2 + error**2 @ wo[e] ** 2)
    check_close(got, want, np.sqrt(variance + want**2))


@FORMATS
@pytest.mark.parametrize("k, n", [(64, 64), (320, 200), (97, 131), (1, 1)])
def test_unpack_bit_for_bit(format, options, k, n, rng):
    q = packed(rng, (3, k, n), format, options)
    got = jax.jit(jgg.dequantize)(q)
    (plan,) = jgg.explain(jgg.dequantize, q).plans
    assert plan.kernel.name == "unpack"
    with jax.default_device(jax.devices("cpu")[0]):
        want = jgg.dequantize(jax.device_get(q))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))


@FORMATS
@SCHEDULES
def test_one_hot_rows_give_the_matrix(format, options, schedule, rng):
    k, n = 200, 136
    q = packed(rng, (1, k, n), format, options)
    sizes = np.zeros(groups_for(schedule, k)[0], np.int32)
    sizes[0] = k
    got = dot(jnp.eye(k, dtype=BF16), q, sizes, schedule=schedule)
    np.testing.assert_array_equal(np.asarray(got), exact(q)[0].astype(BF16))


def every_code(rng, format, zero_points=True):
    """Returns every code with every exponent or zero point, and other scales of all magnitudes."""
    rows, columns = np.mgrid[: 256 if format in EIGHT_BITS else 64, :256]
    some = np.array([0, 1, 3, -1.5, 2.0**-60, 1.2345e20])
    if format == "int8":
        codes = ((rows + columns) % 256 - 128).astype(np.int8)
        return jgg.from_codes(codes[None], rng.choice(some, (1, 256)).astype(np.float32), format)
    if format in EIGHT_BITS:
        codes = ((rows + columns) % 256).astype(np.uint8)
        codes[codes % 128 == 127] = 0  # NaN makes its column or block NaN
        scales = rng.choice(some, (1, 256)).astype(np.float32)
        if format == "fp8_128x128":
            codes = np.tile(codes, 3)
            scales = np.stack([some, some[::-1]])[None].astype(np.float32)
        return jgg.from_codes(jnp.asarray(codes[None]).view(jnp.float8_e4m3fn), scales, format)
    codes = ((rows + columns) % 16).astype(np.uint8)[None]
    if format == "int4":
        zeros = np.stack([columns[0] // 16, columns[0] // 16 ^ 15]).astype(np.uint8)[None]
        scales = jnp.asarray(rng.choice(some, zeros.shape), BF16)
        return jgg.from_codes(codes, scales, format, zero_points=zeros if zero_points else None)
    # The other group of a column has another exponent, near enough for bfloat16's subnormals.
    exponents = np.stack([columns[0], np.maximum(columns[0] - 100, 0)]).astype(np.uint8)
    return jgg.from_codes(codes, exponents[None], format)


def on_cpu(q):
    """Returns a matrix as bfloat16 [k, n], unpacked without a kernel."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(jgg.dequantize(jax.device_get(q))[0])


@pytest.mark.parametrize(
    "format, zero_points", [*((format, False) for format in ALL), ("int4", True)]
)
def test_every_code(format, zero_points, rng):
    q = every_code(rng, format, zero_points)
    want, got = on_cpu(q), np.asarray(jax.jit(jgg.dequantize)(q)[0])
    number = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(got.view(np.uint16)[number], want.view(np.uint16)[number])
    assert np.isnan(got.astype(np.float32)[~number]).all()
    # All results of a column with a NaN are NaN, because zero times NaN is NaN.
    if format == "fp8_128x128":
        want = exact(q)[0]
    want = np.where(number.all(axis=0), want.astype(np.float32), np.nan)
    for schedule in MEAN_ROWS:
        k = len(want)
        sizes = np.zeros(groups_for(schedule, k)[0], np.int32)
        sizes[0] = k
        got = np.asarray(dot(jnp.eye(k, dtype=BF16), q, sizes, schedule=schedule), np.float32)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize(
    "schedule, sizes",
    [*((schedule, [rows]) for schedule, rows in MEAN_ROWS.items()), ("decoded", [70, 330])],
)
def test_infinity_and_nan_stay_in_their_row(format, schedule, sizes, rng):
    """With two groups, TMA boxes of the first also load rows of the second."""
    k, rows = 128, sum(sizes)
    q = packed(rng, (len(sizes), k, 200), format, {})
    clean = rng.standard_normal((rows, k)).astype(np.float32)
    x = clean.copy()
    at = sum(sizes[:-1]) + np.array([1, 3, 6])
    x[at[0], 5], x[at[1], 70], x[at[2], [8, 100]] = np.inf, np.nan, (np.inf, -np.inf)
    got, expected = (
        np.asarray(dot(jnp.asarray(a, BF16), q, sizes, schedule=schedule), np.float32)
        for a in (x, clean)
    )
    with np.errstate(invalid="ignore"):
        special = np.einsum("mk,kn->mn", x, exact(q)[-1])[at]
    np.testing.assert_array_equal(got[at], special)
    others = np.delete(np.arange(rows), at)
    np.testing.assert_array_equal(got[others], expected[others])


@pytest.mark.parametrize("format", ALL)
@SCHEDULES
def test_many_steps_and_many_rows(format, schedule, rng):
    """Products have sums of 45 records, and groups of up to 1024 rows."""
    rows = {"streamed": 8, "few": 16, "decoded": 512}[schedule]
    q = packed(rng, (3, 2880, 264), format, {})
    x = jnp.asarray(rng.standard_normal((3 * rows, 2880)), BF16)
    sizes = [2 * rows, 0, rows]
    check_sums(dot(x, q, sizes, schedule=schedule), x, q, sizes)


@FORMATS
@SCHEDULES
def test_random_sizes(format, options, schedule, rng):
    for _ in range(10):
        streams = schedule == "streamed"
        k = int(rng.integers(1, 600)) if streams else 8 * int(rng.integers(1, 75))
        m, n = int(rng.integers(1 if streams else 9, 400)), int(rng.integers(1, 400))
        least, most = groups_for(schedule, m)
        groups = int(rng.integers(least, most + 1))
        local, offset = int(rng.integers(1, min(groups, 6) + 1)), int(rng.integers(-1, groups))
        sizes = sizes_of.any_kind(rng, m, groups)
        q = packed(rng, (local, k, n), format, options)
        x = jnp.asarray(rng.standard_normal((m, k)), BF16)
        check_sums(dot(x, q, sizes, offset, schedule=schedule), x, q, sizes, offset)


ACTIVATIONS = "silu", "swiglu_oai", "gelu_tanh", "gelu"


@pytest.mark.parametrize(
    "format, schedule, mean, activation, has_up",
    [
        *((format, *mean, name, True) for format in ALL for mean in MEANS for name in ACTIVATIONS),
        *((format, *mean, "relu2", False) for format in ALL for mean in MEANS),
        *((*tall, name, True) for tall in TALL for name in ACTIVATIONS),
    ],
)
def test_hidden_layers(format, schedule, mean, activation, has_up, rng):
    columns = TALL_COLUMNS if schedule == "tall" else 200
    q, up = (packed(rng, (4, 264, columns), format, {}) for _ in range(2))
    b0, b1 = (jnp.asarray(rng.standard_normal((4, columns)), BF16) for _ in range(2))
    sizes = [mean // 2, 0, mean * 4 - mean // 2 - 3, 3]
    x = jnp.asarray(rng.standard_normal((sum(sizes), 264)) / 16, BF16)

    def product(x, q, up):
        options = dict(biases=(b0, b1 if has_up else None), activation=activation)
        return jgg.gated_ragged_dot(x, q, up if has_up else None, jnp.asarray(sizes), **options)

    (plan,) = jgg.explain(product, x, q, up).plans
    assert is_planned(plan, schedule, format)
    got = jax.jit(product)(x, q, up)
    ends = np.cumsum(sizes)
    for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        w0, w1 = exact(q)[group], exact(up)[group] if has_up else None
        rows = np.asarray(x[begin:end], np.float64)
        biases = (np.asarray(b[group], np.float64) for b in (b0, b1))
        want = mlp.hidden_layer(rows, w0, w1, *biases, activation)
        check_close(got[begin:end], *want)


@pytest.mark.parametrize("format", [format for format, *_ in TALL])
def test_tall_tiles(format, rng):
    """Groups have a few rows more or less than instances, and may be on another device."""
    bounds = [edge + more for edge in range(0, 257, 32) for more in (-1, 0, 1)][1:]
    for n in (2049, 2056, 2112, 2176):
        few = [int(size) for size in rng.choice(bounds, 3)]
        sizes = [*few[:2], 4 * 800 - sum(few) - 30, few[2]]
        k, offset, m = 8 * int(rng.integers(1, 75)), int(rng.integers(0, 3)), 4 * 800
        local = int(rng.integers(1, 5 - offset))
        q, up = (packed(rng, (local, k, n), format, {}) for _ in range(2))
        tokens = jnp.asarray(rng.standard_normal((500, k)) / np.sqrt(k), BF16)
        rows = rng.integers(0, 500, m)
        product = partial(
            jgg.gated_ragged_dot,
            group_sizes=jnp.asarray(sizes, jnp.int32),
            rows=jnp.asarray(rows, jnp.int32),
            group_offset=offset,
        )
        (plan,) = jgg.explain(product, tokens, q, up).plans
        assert is_planned(plan, "tall", format)
        got = jax.jit(product)(tokens, q, up)
        x, ends = np.asarray(tokens, np.float64)[rows], np.cumsum([0, *sizes])
        owned = slice(ends[offset], ends[offset + local])
        for group in range(local):
            here = slice(*ends[offset + group : offset + group + 2])
            want = mlp.hidden_layer(x[here], exact(q)[group], exact(up)[group], None, None, "silu")
            check_close(got[here], *want)
        assert not np.delete(np.asarray(got, np.float32), owned, axis=0).any()


@pytest.mark.parametrize("format", [format for format, *_ in TALL])
def test_nan_stays_in_its_row_of_tall_tiles(format, rng):
    """Boxes of the first group also load rows of the second."""
    sizes, k = [70, 1500], 72
    q, up = (packed(rng, (2, k, TALL_COLUMNS), format, {}) for _ in range(2))
    clean = rng.standard_normal((sum(sizes), k)).astype(np.float32)
    x, at = clean.copy(), [70, 72, 77, 500]
    x[at] = np.nan
    run = jax.jit(partial(jgg.gated_ragged_dot, group_sizes=jnp.asarray(sizes)))
    (plan,) = jgg.explain(run, jnp.asarray(x, BF16), q, up).plans
    assert is_planned(plan, "tall", format)
    got, expected = (np.asarray(run(jnp.asarray(a, BF16), q, up), np.float32) for a in (x, clean))
    assert np.isnan(got[at]).all()
    others = np.delete(np.arange(len(x)), at)
    np.testing.assert_array_equal(got[others], expected[others])


@pytest.mark.parametrize(
    "format, options, schedule, mean",
    [
        *((*variant, *mean) for variant in VARIANTS for mean in MEANS),
        *((format, {}, *mean) for format, *mean in TALL),
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layers(format, options, schedule, mean, activation, rng):
    """Layers read tokens, and have biases of any type and activations of each form."""
    embed, hidden, experts, top_k = 264, 200, 5, 2
    if schedule == "tall":
        embed, hidden = 72, TALL_COLUMNS
    tokens = mean * experts // top_k
    shapes = [(experts, embed, hidden)] * 2 + [(experts, hidden, embed)]
    matrices = [packed(rng, shape, format, options) for shape in shapes]
    types = jnp.float32, BF16, jnp.float32
    biases = tuple(
        jnp.asarray(rng.standard_normal((experts, q.shape[2])), dtype)
        for q, dtype in zip(matrices, types, strict=True)
    )
    x = jnp.asarray(rng.standard_normal((tokens, embed)) / 16, BF16)
    logits = jnp.asarray(rng.standard_normal((tokens, experts)), jnp.float32)
    logits = logits.at[:, 1].add(-2)  # so expert 1 has few tokens

    def layer(x, matrices):
        options = dict(biases=biases, activation=activation)
        return moe.dropless_mlp(x, moe.route(logits, top_k), *matrices, **options)

    plans = jgg.explain(layer, x, matrices).plans
    (plan,) = (plan for plan in plans if plan.problem.op in ("packed_mlp", "decode_mlp"))
    assert is_planned(plan, schedule, format)
    got = jax.jit(layer)(x, matrices)
    check_layer(got, x, moe.route(logits, top_k), matrices, biases, activation)


@SCHEDULES
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "gelu_tanh"])
def test_gates_whose_square_overflows(schedule, activation, rng):
    """Such gates, half of the columns here, add nothing to a result."""
    shapes = [(2, 64, 136)] * 2 + [(2, 136, 64)]
    matrices = [packed(rng, shape, "mxfp4", {}) for shape in shapes]
    b0 = jnp.broadcast_to(jnp.where(jnp.arange(136) % 2, -3e38, 0), (2, 136))
    biases = (b0, None, None)
    x = jnp.asarray(rng.standard_normal((2 * MEAN_ROWS[schedule], 64)), BF16)
    routing = moe.route(jnp.asarray(rng.standard_normal((x.shape[0], 2)), jnp.float32), 1)
    got = moe.dropless_mlp(x, routing, *matrices, biases=biases, activation=activation)
    assert np.abs(np.asarray(got, np.float32)).max() > 0
    check_layer(got, x, routing, matrices, biases, activation)


@SCHEDULES
def test_nan_scale_is_in_its_column_alone(schedule, rng):
    codes = jnp.asarray(rng.integers(0, 16, (1, 128, 72)), jnp.uint8)
    scales = jnp.full((1, 4, 72), 127, jnp.uint8).at[0, 2, 33].set(255)
    q = jgg.from_codes(codes, scales, "mxfp4")
    rows = MEAN_ROWS[schedule]
    got = dot(jnp.zeros((rows, 128), BF16), q, [rows], schedule=schedule)
    assert (np.isnan(np.asarray(got, np.float32)) == (np.arange(72) == 33)).all()


def test_gradients_of_activations(rng):
    q = packed(rng, (4, 256, 192), "mxfp4", {})
    x = jnp.asarray(rng.standard_normal((64, 256)), BF16)
    sizes = jnp.asarray([10, 0, 50, 4], jnp.int32)

    def loss(x, w):
        return (jgg.ragged_dot(x, w, sizes).astype(jnp.float32) ** 2).sum()

    got, want = (jax.jit(jax.grad(loss))(x, w) for w in (q, jgg.dequantize(q)))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
