"""The kernels of optimisers, against float64 and, for FP8, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe, optim
from tests.support import optimizer as oracle
from tests.support import optimizer_steps as steps
from tests.support.dtypes import E4M3, E5M2

FORMATS = pytest.mark.parametrize("fp8, power_of_two", [(E4M3, False), (E5M2, True)])


@FORMATS
@pytest.mark.parametrize("kinds", [*steps.MOMENTS, (jnp.float32, jnp.float32, jnp.bfloat16)])
def test_adamw(kinds, fp8, power_of_two, rng):
    for shape in oracle.SHAPES:
        steps.check_adamw(rng, shape, fp8, kinds, power_of_two=power_of_two, implementation="cuda")


@FORMATS
@pytest.mark.parametrize("kind", [jnp.bfloat16, np.float32])
def test_apply(kind, fp8, power_of_two, rng):
    for shape in oracle.SHAPES:
        steps.check_apply(rng, shape, fp8, kind, power_of_two=power_of_two, implementation="cuda")


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("copy", [None, jnp.bfloat16, jnp.float16])
def test_joined_and_copied(parts, copy, rng):
    for shape in oracle.SHAPES:
        options = dict(parts=parts, copy=copy, implementation="cuda")
        steps.check_adamw(rng, shape, E4M3, **options)
        steps.check_apply(rng, shape, E4M3, **options)


@pytest.mark.parametrize("numbers", [dict(nesterov=True), dict(eps_root=1e-3)], ids=str)
def test_other_numbers(numbers, rng):
    steps.check_adamw(rng, (2, 300, 136), E4M3, implementation="cuda", **numbers)


def test_skipped(rng):
    for shape in oracle.SHAPES:
        steps.check_skipped(rng, shape, E4M3, "cuda")


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_nonfinite(fp8, rng):
    for shape in oracle.SHAPES:
        steps.check_nonfinite(rng, shape, fp8, "cuda")


def test_past_two_to_the_31_elements(rng):
    """Addresses need more than 32 bits, which the last block shows."""
    shape = (1, 2**18 + 128, 2**13)
    key = jax.random.key(int(rng.integers(2**31)))

    @jax.jit
    def run(key):
        master = jax.random.normal(key, shape)
        update = jnp.ones(shape, jnp.bfloat16)
        forms = jgg.quantize_weights(jnp.zeros(shape, jnp.bfloat16))
        options = steps.Options(False, "cuda")
        new = steps.fused.apply(jnp.ones(1), update, steps.fused.Weights(master, forms), options)
        values, scales, values_t, scales_t = new.forms
        ends = values[:, -128:], scales[:, -1:], values_t[:, :, -128:], scales_t[:, :, -1:]
        return new.master[:, -128:], master[:, -128:] + 1, ends

    master, want, forms = run(key)
    np.testing.assert_array_equal(master, want)
    for got, form in zip(forms, oracle.forms_of([master], E4M3), strict=True):
        oracle.assert_same_bits(got, form)


def model(rng, k=256, n=384):
    shapes = dict(wi_0=(4, k, n), wi_1=(4, k, n), wo=(4, n, k))
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return dict(experts=params, bias=rng.standard_normal(33, np.float32))


@pytest.mark.parametrize("sizes", [(256, 384), (200, 72)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_steps_are_those_of_the_reference(sizes, dtype, rng):
    """Runs many steps in place, and the same steps with the reference on the same device."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), model(rng, *sizes))
    made = {
        kind: optim.adamw(
            lambda count: 1e-2 / (1 + count), mask=dict(experts=True, bias=False),
            max_norm=1.0, skip_nonfinite=True, implementation=kind,
        )
        for kind in ("cuda", "reference")
    }  # fmt: skip
    runs = {kind: (jax.tree.map(jnp.copy, params), o.init(params)) for kind, o in made.items()}
    for number in range(10):
        gradients = jax.tree.map(
            lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.bfloat16), params
        )
        if number == 4:
            gradients["bias"] = gradients["bias"].at[3].set(jnp.nan)
        for kind, optimizer in made.items():
            run = jax.jit(optimizer.step, donate_argnums=(0, 2))
            runs[kind] = run(runs[kind][0], gradients, runs[kind][1])
    (ours, state), (theirs, expected) = runs["cuda"], runs["reference"]
    assert int(state.inner.count) == int(expected.inner.count) == 9

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=2e-2 if a.dtype == jnp.bfloat16 else 1e-5, atol=1e-6)

    jax.tree.map(close, (ours, state.inner.mu), (theirs, expected.inner.mu))
    masters = ours if dtype == jnp.float32 else state.master
    want = jgg.quantize_mlp(*masters["experts"].values(), implementation="cuda")
    jax.tree.map(oracle.assert_same_bits, state.quantized["experts"], want)


@pytest.mark.parametrize("sizes", [(512, 384), (520, 264)])
def test_training_is_that_of_weights_quantised_apart(sizes, rng):
    """Losses of 200 steps have the same bits as with `quantize_mlp` of the same weights."""
    optimizer = optim.adamw(1e-3, b2=0.95, max_norm=1.0, implementation="cuda")
    d, f = sizes
    params = jax.tree.map(lambda x: jnp.asarray(x) / d**0.5, model(rng, d, f))
    x = jnp.asarray(rng.standard_normal((8, 300, d)), jnp.bfloat16)
    logits = jnp.asarray(rng.standard_normal((8, 300, 4)), jnp.float32)

    def step(params, state, x, logits, apart):
        def loss(params):
            matrices = (w.astype(jnp.bfloat16) for w in params["experts"].values())
            options = dict(recipe=jgg.Recipe(), quantized=quantized)
            y = moe.dropless_mlp(x, moe.route(logits, 2), *matrices, **options)
            return jnp.mean((y.astype(jnp.float32) - jnp.tanh(x.astype(jnp.float32))) ** 2)

        quantized = state.quantized["experts"]
        if apart:
            quantized = jgg.quantize_mlp(*params["experts"].values(), implementation="cuda")
        value, gradients = jax.value_and_grad(loss)(optimizer.compute_params(params))
        return *optimizer.step(params, gradients, state), value

    run = jax.jit(step, static_argnums=4)
    runs = []
    for apart in (False, True):
        now, losses = (params, optimizer.init(params)), []
        for number in range(200):
            *now, loss = run(*now, x[number % 8], logits[number % 8], apart)
            losses.append(loss)
        runs.append(np.array(losses))
    np.testing.assert_array_equal(*runs)
    assert runs[0][-8:].mean() < runs[0][:8].mean()


def test_updates_in_place(rng):
    """A step needs no memory beyond its arguments, and returns its results in their buffers."""
    optimizer = optim.adamw(1e-3, implementation="cuda")
    params = jax.tree.map(jnp.asarray, model(rng))
    state = optimizer.init(params)
    compiled = jax.jit(optimizer.step, donate_argnums=(0, 2)).lower(params, params, state).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2**14
    gradients = jax.tree.map(jnp.ones_like, params)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.ndim > 1]
    after = compiled(params, gradients, state)
    assert before == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after) if x.ndim > 1]


def test_not_donated(rng):
    """A step whose arguments are not donated leaves the old arrays as they were."""
    optimizer = optim.quantized(_sgd(), implementation="cuda")
    params = jax.tree.map(jnp.asarray, model(rng))
    state = optimizer.init(params)
    before = jax.tree.map(np.array, (params, state))
    jax.block_until_ready(jax.jit(optimizer.step)(params, params, state))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, (params, state)))


def _sgd():
    return optax.GradientTransformation(
        lambda params: (), lambda g, state, params=None: (jax.tree.map(lambda x: -0.1 * x, g), ())
    )
