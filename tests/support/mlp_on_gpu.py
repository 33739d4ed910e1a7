"""Checks the kernels of an expert MLP on random operands against float64."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.mlp import layer, primitive
from jax_grouped_gemm._src.mlp.operands import (
    DownWeightsOperands,
    ExpertWeights,
    GradientOperands,
    Groups,
    MlpOperands,
    PairedOperands,
    PairedWeightsOperands,
    Rows,
)
from jax_grouped_gemm._src.mlp.primitive import Options
from tests.support import mlp, oracle
from tests.support.ops import random

BF16 = jnp.bfloat16


def unit(dtype) -> float:
    return float(jnp.finfo(dtype).eps) / 2


@partial(jax.jit, static_argnames=("activation", "residuals", "zeroes_unowned"))
def gated(operands, *, activation, residuals=True, zeroes_unowned=True):
    """Returns hidden and, with `residuals`, gate and up."""
    options = Options.of(as_activation(activation), None, "cuda", zeroes_unowned=zeroes_unowned)
    return layer.gated_ragged_dot(options, mlp_operands(operands), residuals=residuals)


@partial(jax.jit, static_argnames=("activation", "zeroes_unowned"))
def gradient(operands, *, activation, zeroes_unowned=True):
    """Returns dgate, dup, hidden and dweights."""
    options = Options.of(as_activation(activation), None, "cuda", zeroes_unowned=zeroes_unowned)
    optional = dict(up=operands.get("up"), weights=operands.get("weights"))
    rows = Rows(operands["dy"], operands.get("rows"))
    factors = dict(rows=rows, wo=operands["wo"], gate=operands["gate"])
    given = GradientOperands(**factors, **optional, groups=groups_of(operands))
    return primitive.bind(primitive.GATED_TRANSPOSE, given, **vars(options))


@partial(jax.jit, static_argnames="num_groups")
def down_weights(operands, *, num_groups):
    """Returns hidden^T dy."""
    options = Options.of(as_activation("silu"), None, "cuda")
    rows = Rows(operands["dy"], operands["rows"])
    given = DownWeightsOperands(rows, operands["hidden"], groups_of(operands))
    params = dict(options.of_products, num_groups=num_groups)
    return primitive.bind(primitive.DOWN_WEIGHTS, given, **params)


@partial(jax.jit, static_argnames="zeroes_unowned")
def paired(a0, a1, w0, w1, sizes, offset, *, zeroes_unowned=True):
    options = Options.of(as_activation("silu"), None, "cuda", zeroes_unowned=zeroes_unowned)
    given = PairedOperands(a0, a1, w0, w1, Groups(sizes, offset))
    return primitive.bind(primitive.PAIRED, given, **options.of_products)


@partial(jax.jit, static_argnames="num_groups")
def paired_weights(operands, *, num_groups):
    """Returns x^T d0 and x^T d1."""
    options = Options.of(as_activation("silu"), None, "cuda")
    given = PairedWeightsOperands(
        Rows(operands["x"], operands.get("rows")),
        operands["d0"],
        operands["d1"],
        groups_of(operands),
    )
    params = dict(options.of_products, num_groups=num_groups)
    return primitive.bind(primitive.PAIRED_WEIGHTS, given, **params)


def groups_of(operands):
    return Groups(operands["group_sizes"], operands["group_offset"])


def mlp_operands(operands):
    """Returns the operands of an MLP, from the given ones by name."""
    names = [field.name for field in fields(ExpertWeights)]
    experts = ExpertWeights(**{name: operands[name] for name in names if name in operands})
    rows = Rows(operands["x"], operands.get("rows"))
    return MlpOperands(rows, experts, operands.get("weights"), groups_of(operands))


def indices(sizes, offset=0):
    return dict(
        group_sizes=jnp.asarray(sizes, jnp.int32),
        group_offset=jnp.asarray([offset], jnp.int32),
    )


def matrices(rng, shape, dtype, spread=1.0):
    """Returns matrices whose products with normal values are of the magnitude of `spread`."""
    return (spread * shape[-2] ** -0.5 * rng.standard_normal(shape, np.float32)).astype(dtype)


def owned_rows(sizes, offset, groups, m):
    owned = np.zeros(m, bool)
    for start, end in oracle.group_rows(sizes, offset, groups, m):
        owned[start:end] = True
    return owned


def close(actual, exact, tolerance, what):
    """Asserts that the error of each element is at most its tolerance, which may be zero."""
    actual = np.asarray(actual).astype(np.float64)
    error = np.abs(actual - exact)
    wrong = ~(error <= tolerance)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} elements are wrong, the first at {at}: "
            f"{actual[at]} for {exact[at]}, allowed error {tolerance[at]}"
        )


def check_hidden(hidden, gate, up, weights, activation):
    """Checks that hidden follows from the kernel's gate and up, and is rounded once."""
    dtype = hidden.dtype
    value, factor, *_ = mlp.activated(activation, gate, up)
    exact = value * factor * (1 if weights is None else weights.astype(np.float64)[:, None])
    # The tolerance covers ex2.approx and rcp.approx. Near -inf, gelu_tanh and silu are tiny, and
    # their absolute error is small.
    tolerance = (1.02 * unit(dtype) + 2**-18) * np.abs(exact)
    tolerance += float(jnp.finfo(dtype).smallest_subnormal) * (exact != 0)
    tolerance += 2**-19 * np.abs(np.asarray(gate).astype(np.float64) * factor) * (exact != 0)
    close(hidden, exact, tolerance, "hidden")


def check_gated(
    rng, sizes, *, m=1000, embed=264, hidden=392, groups=None, offset=0, dtype=BF16,
    weighted=True, activation="silu", spread=3.0, poison=True, with_up=True,
):  # fmt: skip
    """Checks the forward kernel on random operands, and returns these and its results.

    Without an up projection, ones are returned for up.
    """
    groups = len(sizes) if groups is None else groups
    x = random(rng, (m, embed), dtype)
    wi_0, wi_1 = (matrices(rng, (groups, embed, hidden), dtype, spread) for _ in range(2))
    weights = rng.uniform(0.1, 1, m).astype(np.float32) if weighted else None
    owned = owned_rows(sizes, offset, groups, m)
    if poison:
        x[~owned] = np.nan
        if weighted:
            weights[~owned] = np.nan
    operands = dict(x=x, wi_0=wi_0) | (dict(wi_1=wi_1) if with_up else {})
    operands |= {} if weights is None else dict(weights=weights)
    operands |= indices(sizes, offset)
    out, gate, *others = map(np.asarray, gated(operands, activation=activation))
    (up,) = others or [np.ones_like(gate)]
    oracle.check(gate, oracle.ragged_noncontracting(x, wi_0, sizes, offset))
    if with_up:
        oracle.check(up, oracle.ragged_noncontracting(x, wi_1, sizes, offset))
    clean = None if weights is None else np.where(owned, weights, 0)
    check_hidden(out, gate, up, clean, activation)
    assert not out[~owned].any()
    (alone,) = gated(operands, activation=activation, residuals=False)
    np.testing.assert_array_equal(alone, out)
    return operands, (out, gate, up)


def check_gradient(rng, operands, results, sizes, offset, activation):
    """Checks the backward kernel on results of the forward kernel."""
    hidden, gate, up = results
    groups, embed, columns = operands["wi_0"].shape
    m, dtype = len(gate), gate.dtype
    owned = owned_rows(sizes, offset, groups, m)
    dy = random(rng, (m, embed), dtype)
    wo = matrices(rng, (groups, columns, embed), dtype)
    dirty_gate, dirty_up = gate.copy(), up.copy()
    dy[~owned] = dirty_gate[~owned] = dirty_up[~owned] = np.nan
    given = dict(dy=dy, wo=wo, gate=dirty_gate)
    if "wi_1" in operands:
        given["up"] = dirty_up
    if "weights" in operands:
        given["weights"] = operands["weights"]
    got = gradient(given | indices(sizes, offset), activation=activation)
    dgate, *dups, again, dweights = map(np.asarray, got)
    assert len(dups) == ("wi_1" in operands)
    np.testing.assert_array_equal(again, hidden)

    dh = oracle.ragged_noncontracting(dy, wo, sizes, offset, transpose_rhs=True)
    # The error of dh comes from the sum and from the rounding.
    dh_error = (1.01 * unit(dtype)) * np.abs(dh.value) + 2.0**-22 * dh.depth * dh.magnitude
    dh_error += float(jnp.finfo(dtype).smallest_subnormal) * owned[:, None]
    value, factor, slope, factor_slope = mlp.activated(activation, gate, up)
    value, factor, slope, factor_slope = (
        np.where(owned[:, None], a, 0) for a in (value, factor, slope, factor_slope)
    )
    weights = np.where(owned, operands.get("weights", np.ones(m)), 0).astype(np.float64)[:, None]
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    by_dgate = weights * slope * factor, weights * factor
    by_dup = weights * value * factor_slope, weights * gate * factor_slope
    for name, actual, (by_dh, rough) in zip(
        ("dgate", "dup"), (dgate, *dups), (by_dgate, by_dup), strict=False
    ):
        exact = by_dh * dh.value
        tolerance = np.abs(by_dh) * dh_error + 1.05 * unit(dtype) * (
            np.abs(exact) + np.abs(by_dh) * dh_error
        )
        # This allows for errors of the sigmoid where its factors cancel.
        rough = np.where(owned[:, None], np.abs(rough) * (1 + np.abs(gate.astype(np.float64))), 0)
        tolerance += 2.0**-17 * rough * (np.abs(dh.value) + dh_error) + smallest * owned[:, None]
        close(actual, exact, tolerance, name)
        assert not actual[~owned].any()
    terms = value * factor
    exact = (dh.value * terms).sum(1)
    tolerance = (np.abs(terms) * dh_error).sum(1)
    tolerance += 2.0**-15 * np.abs(dh.value * gate.astype(np.float64) * factor).sum(1)
    tolerance += 2.0**-15 * np.abs(dh.value * terms).sum(1)
    tolerance = np.where(owned, tolerance, 0)
    assert dweights.dtype == np.float32
    close(dweights, np.where(owned, exact, 0), tolerance, "dweights")


def check_paired(rng, sizes, *, m=1000, embed=264, hidden=392, groups=None, offset=0, dtype=BF16):
    """Checks the sum of two products of random operands."""
    groups = len(sizes) if groups is None else groups
    lhs = [random(rng, (m, hidden), dtype) for _ in range(2)]
    rhs = [matrices(rng, (groups, embed, hidden), dtype) for _ in range(2)]
    owned = owned_rows(sizes, offset, groups, m)
    for x in lhs:
        x[~owned] = np.nan
    out = np.asarray(paired(*lhs, *rhs, *indices(sizes, offset).values()))
    one, other = (
        oracle.ragged_noncontracting(a, w, sizes, offset, transpose_rhs=True)
        for a, w in zip(lhs, rhs, strict=True)
    )
    both = (getattr(one, f) + getattr(other, f) for f in ("value", "magnitude", "depth"))
    oracle.check(out, oracle.Exact(*both, one.blocks))
    assert not out[~owned].any()


def rows_of_tokens(rng, tokens, embed, owned, dtype=BF16):
    """Returns tokens, the token of each row, and copied rows.

    Rows without a group are NaN, and rows without a token are zero.
    """
    x = random(rng, (tokens + 1, embed), dtype)
    x[tokens] = np.nan
    rows = rng.integers(-20, tokens, len(owned)).astype(np.int32)
    rows[rows < -10] += tokens + 20  # past the last token
    rows[~owned] = tokens
    is_token = (rows >= 0) & (rows <= tokens)
    return x, rows, np.where(is_token[:, None], x[np.clip(rows, 0, tokens)], 0).astype(dtype)


def check_rows_of_dy(rng, sizes, *, m=1000, tokens=300, embed=264, hidden=256):
    """Checks both products of dy that read rows in place.

    The product with wo must have the same bits as with copied rows. The weight gradient is compared
    with float64.
    """
    groups, dtype = len(sizes), BF16
    owned = owned_rows(sizes, 0, groups, m)
    dy, rows, copies = rows_of_tokens(rng, tokens, embed, owned)
    gate, up, of_wo = (random(rng, (m, hidden), dtype) for _ in range(3))
    gate[~owned] = up[~owned] = of_wo[~owned] = np.nan
    given = dict(wo=matrices(rng, (groups, hidden, embed), dtype), gate=gate, up=up)
    given |= dict(weights=rng.uniform(0.1, 1, m).astype(np.float32)) | indices(sizes)
    got = gradient(given | dict(dy=dy, rows=rows), activation="silu")
    want = gradient(given | dict(dy=copies), activation="silu")
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (one, other)))
    given = dict(dy=dy, rows=rows, hidden=of_wo) | indices(sizes)
    exact = oracle.ragged_contracting(of_wo, copies, sizes, 0, num_groups=groups)
    result = down_weights(given, num_groups=groups)
    oracle.check(result, exact)
    again = down_weights(given, num_groups=groups)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (result, again)))


def check_paired_weights(
    rng, sizes, *, m=1000, embed=264, hidden=392, groups=None, offset=0, dtype=BF16, tokens=None
):
    """Checks two weight gradients in one product of random operands.

    With `tokens`, rows are read from tokens. Unowned rows are NaN, and rows without a token are
    zero.
    """
    groups = len(sizes) if groups is None else groups
    owned = owned_rows(sizes, offset, groups, m)
    d0, d1 = (random(rng, (m, hidden), dtype) for _ in range(2))
    d0[~owned] = d1[~owned] = np.nan
    if tokens is None:
        x = rows_of_x = random(rng, (m, embed), dtype)
        x[~owned] = np.nan
        given = dict(x=x)
    else:
        x, rows, rows_of_x = rows_of_tokens(rng, tokens, embed, owned, dtype)
        given = dict(x=x, rows=rows)
    given |= dict(d0=d0, d1=d1) | indices(sizes, offset)
    results = paired_weights(given, num_groups=groups)
    for result, d in zip(results, (d0, d1), strict=True):
        oracle.check(
            result, oracle.ragged_contracting(rows_of_x, d, sizes, offset, num_groups=groups)
        )
    again = paired_weights(given, num_groups=groups)
    for one, other in zip(results, again, strict=True):
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (one, other)))
