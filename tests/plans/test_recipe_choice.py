"""Whether plans compute a recipe in FP8 or in bf16, for layers and matmuls of many sizes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from benchmarks import fit
from benchmarks.never_slower import recipes
from jax_grouped_gemm import moe
from jax_grouped_gemm._src import fallback
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fp8.choice import Choice, bf16_choice
from jax_grouped_gemm._src.fp8.prediction import Cost, Dot, Layer

pytestmark = pytest.mark.plans_as_users_get_them
BF16 = jnp.bfloat16
CHOICE = "recipe_in_bf16"


def first_plan(op, *sizes, **options):
    function = recipes.function(op, sizes, None)
    return jgg.explain(
        lambda *operands: function(*operands, **options), *recipes.operands(op, sizes)
    ).plans[0]


def test_measured_sizes_lose_little():
    """No choice between FP8 and bf16 is much slower than the faster of the two measured ways."""
    factors = fallback.coefficients()
    cases = [fit.Case.of(pair) for pair in fit.read() if fit.is_recipe(pair)]
    assert len(cases) > 120
    best = [min(case.pair.kernel_us, case.pair.other_us) for case in cases]
    taken = [case.choice(factors[case.kind]) for case in cases]
    assert sum(taken) < 1.002 * sum(best)
    for case, one, least in zip(cases, taken, best, strict=True):
        most = 1.04 if case.pair.op in recipes.shapes.RECIPES else 1.1  # 1.1 for other recipes
        assert one < most * least, case.pair


@pytest.mark.parametrize(
    ("op", "sizes", "in_bf16"),
    [
        ("recipe_layer_step", (5003, 1096, 520, 24, 3), True),  # rows of no multiple of 16 bytes
        ("recipe_layer", (5003, 1096, 520, 24, 3), True),
        ("recipe_layer_step", (8192, 5120, 8192, 16, 1), False),
        ("recipe_layer", (8192, 5120, 8192, 16, 1), True),
        ("recipe_layer_step", (4096, 4096, 14336, 8, 2), False),
        ("recipe_layer_step", (64, 2048, 768, 128, 8), True),  # few rows an expert
        ("recipe_dot_step", (128, 512, 2048, 1536), True),
        ("recipe_dot_step", (8, 1024, 4096, 14336), False),
        ("recipe_dot", (128, 512, 2048, 1536), True),
    ],
    ids=str,
)
def test_plans(op, sizes, in_bf16):
    plan = first_plan(op, *sizes)
    assert (plan.problem.op == CHOICE) == in_bf16
    if in_bf16:
        assert plan.kernel.name == "bf16" and "s in FP8" in plan.reason
        assert str(plan).count("\n") == 1 and str(sizes[2]) in str(plan)


@pytest.mark.parametrize(
    ("sizes", "alone", "trained"),
    [
        ((5003, 1096, 520, 24, 3), True, True),
        ((8192, 2048, 768, 128, 8), False, False),  # qwen3_30b
        ((8192, 5120, 8192, 16, 1), False, False),
        ((64, 2048, 768, 128, 8), False, False),
        ((16384, 1096, 128, 128, 1), False, True),
    ],
    ids=str,
)
def test_weights_quantised_before(sizes, alone, trained):
    """For weights quantised before, the cast to bf16 has a cost, and the quantiser has none."""
    experts = [jax.ShapeDtypeStruct(x.shape, BF16) for x in recipes.operands("recipe_layer", sizes)]
    quantized = jax.eval_shape(jgg.quantize_mlp, *experts[3:6])
    for op, in_bf16 in (("recipe_layer", alone), ("recipe_layer_step", trained)):
        function = recipes.function(op, sizes, None)
        given = *recipes.operands(op, sizes), quantized

        def run(*operands, function=function):
            return function(*operands[:-1], quantized=operands[-1])

        plans = jgg.explain(run, *given).plans
        found = [plan for plan in plans if plan.problem.op == CHOICE]
        assert bool(found) == in_bf16
        assert any("scaled" in plan.problem.op for plan in plans) != in_bf16
        assert all("weights quantised before" in str(plan) for plan in found)
        assert all("s in FP8" in plan.reason for plan in found)


def test_costs_of_weights_quantised_before():
    layer, dot = Layer(8, 4096, 2048, 1024, 512), Dot(8, 4096, 1024, 512)
    for of, matrices in ((layer, 3), (dot, 1)):
        (fp8, bf16), (fp8_given, bf16_given) = (
            Choice(of, jgg.Recipe(), True, given).terms() for given in (False, True)
        )
        assert fp8["weights"] > 0 == fp8_given["weights"]
        cast = 6 * matrices * 8 * 1024 * 512 / H200.rates.bandwidth
        assert bf16_given["moved"] - bf16["moved"] == pytest.approx(cast)
        same = ("rows", "gradients", "wave", "unaligned")
        assert all(fp8[x] == fp8_given[x] and bf16[x] == bf16_given[x] for x in same)


def test_random_sizes(rng):
    """The plans of layers and matmuls of random sizes have the choice that is predicted."""
    for number in range(12):
        op = recipes.shapes.RECIPES[number % 4]
        sizes = recipes.random_sizes(op, rng)
        in_bf16 = recipes.takes_bf16(op, sizes)
        assert (first_plan(op, *sizes).problem.op == CHOICE) == in_bf16, (op, sizes)


@pytest.mark.parametrize("training", [True, False])
def test_rows_decide(training):
    for of, rows in ((Layer(16, 0, 0, 4096, 4096), "m"), (Dot(16, 0, 4096, 4096), "m")):
        chosen = [
            Choice(dataclasses.replace(of, **{rows: 16 * 2**i}), jgg.Recipe(), training).seconds()
            for i in range(15)
        ]
        assert chosen[0][2] and not chosen[-1][2]
        ratios = [bf16 / fp8 for fp8, bf16, _ in chosen]
        assert ratios[-1] > 1.3 > 0.9 > ratios[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [64, 1 << 17])
def test_products_take_the_time_of_bytes_or_of_products(rows, training):
    """Few rows take the time of reading the matrices. Many rows take the tensor cores' time."""
    layer, elements = Layer(64, rows, 0, 2048, 1024), 3 * 2048 * 1024

    def seconds(itemsize, rate):
        one = (
            itemsize * 64 * elements / H200.rates.bandwidth
            if rows == 64
            else rows * elements / rate
        )
        return one * (1 + training)

    in_bf16, in_fp8 = Cost(), Cost()
    layer.in_bf16(in_bf16, training=training)
    layer.in_fp8(jgg.Recipe(), in_fp8, training=training)
    assert in_bf16.terms["rows"] == pytest.approx(seconds(2, H200.rates.sixteen_bits), rel=0.05)
    assert in_fp8.terms["rows"] == pytest.approx(seconds(1, H200.rates.eight_bits), rel=0.05)
    assert (in_bf16.terms["gradients"] > 0) == (in_fp8.terms["gradients"] > 0) == training


def test_what_is_not_left_to_plans():
    def chosen(**options):
        given = dict(of=Dot(4, 32, 64, 64), recipe=jgg.Recipe(), training=True)
        given |= dict(dtypes=[BF16, BF16], implementation=None) | options
        how = given.pop("dtypes"), given.pop("implementation")
        return bf16_choice(Choice(**given), *how)

    assert chosen()
    assert chosen(dtypes=[jnp.float16] * 2)
    for dtypes in ([jnp.float32] * 2, [BF16, jnp.float16], [BF16, jnp.float32]):
        assert not chosen(dtypes=dtypes)
    for implementation in ("cuda", "xla", "reference"):
        assert not chosen(implementation=implementation)
    assert not chosen(of=Dot(4, 0, 64, 64)) and not chosen(of=Dot(0, 32, 64, 64))
    assert not chosen(of=Layer(4, 0, 0, 64, 64)) and not chosen(of=Layer(0, 32, 16, 64, 64))
    assert not chosen(recipe=jgg.Recipe("bf16", "bf16", "bf16"))
    assert not chosen(recipe=jgg.Recipe(forward="bf16"), training=False)
    with fallback.policy("kernels"):
        assert not chosen()


def test_symbolic_sizes_are_in_fp8(rng):
    m = jax.export.symbolic_shape("m")[0]
    lhs = jax.ShapeDtypeStruct((m, 64), BF16)
    others = jax.ShapeDtypeStruct((4, 64, 32), BF16), jax.ShapeDtypeStruct((4,), jnp.int32)
    jaxpr = jax.make_jaxpr(jgg.fp8_ragged_dot)(lhs, *others)
    assert CHOICE not in str(jaxpr) and "scaled" in str(jaxpr)


def test_the_experts_of_a_device_count(rng):
    """The choice does not count rows whose experts are on other devices."""
    t, d, f = 1 << 14, 4096, 1024
    routing = moe.Routing(
        jax.ShapeDtypeStruct((t, 64), jnp.float32),
        jax.ShapeDtypeStruct((t, 2), jnp.int32),
        jax.ShapeDtypeStruct((t, 2), jnp.float32),
    )
    x, offset = jax.ShapeDtypeStruct((t, d), BF16), jax.ShapeDtypeStruct((), jnp.int32)

    def plan(experts):
        wi, wo = (jax.ShapeDtypeStruct((experts, *s), BF16) for s in ((d, f), (f, d)))

        def layer(x, routing, wi_0, wi_1, wo, offset):
            options = dict(recipe=jgg.Recipe(), group_offset=offset)
            return moe.dropless_mlp(x, routing, wi_0, wi_1, wo, **options)

        return jgg.explain(jax.jit(layer), x, routing, wi, wi, wo, offset).plans[0]

    assert "16384 rows" in str(plan(32)) and "32768 rows" in str(plan(64))


def test_copying_tokens_counts():
    """Rows that a layer copies from tokens take longer than rows that are sorted already."""
    t, d, f, experts, top_k = 5003, 1096, 520, 24, 3
    rows, indices = t * top_k, jax.ShapeDtypeStruct((t * top_k,), jnp.int32)
    matrices = [jax.ShapeDtypeStruct((experts, *s), BF16) for s in ((d, f), (d, f), (f, d))]
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    of_routing = (experts, jnp.float32), (top_k, jnp.int32), (top_k, jnp.float32)
    routing = moe.Routing(*(jax.ShapeDtypeStruct((t, n), dtype) for n, dtype in of_routing))

    def predicted(function, tokens, *operands):
        x = jax.ShapeDtypeStruct((tokens, d), BF16)
        with_recipe = functools.partial(function, recipe=jgg.Recipe())
        reason = jgg.explain(with_recipe, x, *operands).plans[0].reason
        return [int(us) for us in re.findall(r"(\d+) us", reason)]

    def copied(x, rows, *operands, **options):
        return jgg.ragged_mlp(x, *operands, rows=rows, **options)

    of_sorted = predicted(jgg.ragged_mlp, rows, *matrices, sizes)
    of_tokens = predicted(copied, t, indices, *matrices, sizes)
    assert of_tokens == predicted(moe.dropless_mlp, t, routing, *matrices)
    assert of_tokens and all(a > b for a, b in zip(of_tokens, of_sorted, strict=True))
