"""Checks the steps that write FP8 weights, by the kernels or by the reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.optimizer import fused
from jax_grouped_gemm._src.optimizer.fused import Options
from tests.support import optimizer as oracle

BF16, F32 = jnp.bfloat16, np.float32
MOMENTS = [(BF16, F32, F32), (F32, F32, F32), (BF16, BF16, F32), (F32, BF16, BF16)]
"""Dtypes of the gradient, the mean and the mean of squares."""


def check_adamw(
    rng, shape, fp8, kinds=MOMENTS[0], *, power_of_two=False, parts=1, copy=None,
    implementation=None, **numbers,
):  # fmt: skip
    """Checks one step of AdamW for each of `parts` matrices."""
    of_gradient, of_mean, of_square = kinds
    weights = oracle.weights(rng, shape, fp8, parts, copy)
    forms = weights[0].forms
    found = []
    for part, old in enumerate(weights):
        s = oracle.scalars(rng, **numbers)
        gradient, mean = oracle.matrices(rng, shape, of_gradient), oracle.matrices(rng, shape)
        mean, square = mean.astype(of_mean), np.square(oracle.matrices(rng, shape))
        square = square.astype(of_square)
        options = Options(power_of_two, implementation, part, parts)
        run = jax.jit(partial(fused.adamw, options=options), donate_argnums=(2, 3, 4))
        stacked = jnp.stack(s)
        operands = jax.tree.map(jnp.array, (gradient, mean, square, old._replace(forms=forms)))
        new_mean, new_square, new = run(stacked, *operands)
        want = oracle.adamw(s, gradient, mean, square, old.master)
        oracle.assert_close(new_mean, want[0], of_mean)
        oracle.assert_close(new_square, want[1], of_square)
        oracle.assert_close(new.master, want[2])
        forms = new.forms
        found.append(new)
    masters = [each.master for each in found]
    for each in found:
        oracle.assert_forms(each._replace(forms=forms), masters, fp8, power_of_two)


def check_apply(
    rng, shape, fp8, kind=F32, *, power_of_two=False, parts=1, copy=None, implementation=None
):
    """Checks the sum of master and update, rounded once, for each of `parts` matrices."""
    weights = oracle.weights(rng, shape, fp8, parts, copy)
    forms = weights[0].forms
    found = []
    for part, old in enumerate(weights):
        update = oracle.matrices(rng, shape, kind)
        options = Options(power_of_two, implementation, part, parts)
        run = jax.jit(partial(fused.apply, options=options), donate_argnums=2)
        operands = jax.tree.map(jnp.array, (update, old._replace(forms=forms)))
        new = run(jnp.ones(1), *operands)
        np.testing.assert_array_equal(new.master, old.master + update.astype(F32))
        forms = new.forms
        found.append(new)
    masters = [each.master for each in found]
    for each in found:
        oracle.assert_forms(each._replace(forms=forms), masters, fp8, power_of_two)


def check_skipped(rng, shape, fp8, implementation=None):
    """Checks that a skipped step changes no bit, whatever the gradient is."""
    (old,) = oracle.weights(rng, shape, fp8, copy=BF16)
    gradient = np.full(shape, np.nan, F32)
    mean, square = oracle.matrices(rng, shape), np.square(oracle.matrices(rng, shape))
    s = jnp.stack(oracle.scalars(rng, applies=0.0))
    options = Options(False, implementation)
    given = jax.tree.map(jnp.array, (gradient, mean, square, old))
    *moments, new = jax.jit(partial(fused.adamw, options=options))(s, *given)
    oracle.assert_same_bits(moments[0], mean)
    oracle.assert_same_bits(moments[1], square)
    jax.tree.map(oracle.assert_same_bits, new, old)
    new = jax.jit(partial(fused.apply, options=options))(jnp.zeros(1), gradient, old)
    jax.tree.map(oracle.assert_same_bits, new, old)


def check_nonfinite(rng, shape, fp8, implementation=None):
    """Checks that infinities and NaN in a gradient affect only their own elements."""
    (old,) = oracle.weights(rng, shape, fp8)
    update = oracle.matrices(rng, shape)
    places = rng.random(shape)
    update = np.where(places < 0.01, np.inf, np.where(places < 0.02, np.nan, update)).astype(F32)
    update = np.where(places > 0.99, -np.inf, update).astype(F32)
    options = Options(False, implementation)
    new = jax.jit(partial(fused.apply, options=options))(jnp.ones(1), update, old)
    with np.errstate(invalid="ignore"):
        oracle.assert_same_bits(new.master, old.master + update)
    oracle.assert_forms(new, [new.master], fp8)
    mean, square = oracle.matrices(rng, shape), np.square(oracle.matrices(rng, shape))
    s = oracle.scalars(rng)
    *_, new = jax.jit(partial(fused.adamw, options=options))(
        jnp.stack(s), update, mean, square, old
    )
    finite = np.isfinite(update)
    assert not np.isfinite(np.asarray(new.master)[~finite]).any()
    clean = np.where(finite, update, 0)
    exact, terms = oracle.adamw(s, clean, mean, square, old.master)[2]
    oracle.assert_close(np.asarray(new.master)[finite], (exact[finite], terms[finite]))
    oracle.assert_forms(new, [new.master], fp8)
