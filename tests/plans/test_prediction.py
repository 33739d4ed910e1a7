"""Predictions of plans, compared with times measured on an H200."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.device import H200, Rates, Target, predict
from jax_grouped_gemm._src.fp8 import formats
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.lists.grouped_gemm import plan as plan_lists
from jax_grouped_gemm._src.lists.rank_k import plan as plan_rank_k
from jax_grouped_gemm._src.mlp import kernels as kernels_mlp
from jax_grouped_gemm._src.ragged.tiles import FLOAT32, SIXTEEN_BITS
from jax_grouped_gemm._src.rows import plan as plan_rows
from tests.support.plans import contracting_plan, how

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
E4M3 = jnp.float8_e4m3fn

array = jax.ShapeDtypeStruct


def ragged(shape, op, dtype, out_dtype, precision) -> jgg.Plan:
    """Returns the plan of a ragged product that is not quantised. `_t`: weights are [g, n, k]."""
    m, k, n, g = (shape[name] for name in ("rows", "k", "n", "groups"))
    sizes = array((g,), jnp.int32)
    kind, _, transposed = op.partition("_t")
    if kind == "wgrad_add":
        operands = array((g, k, n), jnp.float32), array((m, k), dtype), array((m, n), dtype)
        return only(jgg.ragged_dot_accumulate, *operands, sizes)
    if kind.startswith("wgrad"):
        plan = functools.partial(contracting_plan, m, k, n, g, dtype, out_dtype)
        return plan(precision=precision)
    if kind == "dgrad":
        k, n = n, k
    stored_transposed = (kind == "dgrad") != op.endswith("_t")
    rhs = array((g, n, k) if stored_transposed else (g, k, n), dtype)
    options = dict(transpose_rhs=stored_transposed, precision=precision)
    return only(jgg.ragged_dot, array((m, k), dtype), rhs, sizes, **options)


def scaled(shape, op) -> jgg.Plan:
    m, k, n, g = (shape[name] for name in ("rows", "k", "n", "groups"))
    sizes = array((g,), jnp.int32)

    def blocks(x):
        return -(-x // 128)

    if op == "fp8_wgrad":
        b = formats.row_blocks(m, g)
        pairs = ((array((b, x, 128), E4M3), array((b, x), jnp.float32)) for x in (k, n))
        (lhs, rhs) = pairs
        return only(jgg.scaled_ragged_dot_contracting, *lhs, *rhs, sizes, num_rows=m)
    if op == "fp8_dgrad":
        k, n = n, k
    lhs = array((m, k), E4M3), array((m, blocks(k)), jnp.float32)
    rhs = array((g, n, k), E4M3), array((g, blocks(n), blocks(k)), jnp.float32)
    return only(jgg.scaled_ragged_dot, *lhs, *rhs, sizes, transpose_rhs=True)


def update(shape, op, dtype) -> jgg.Plan:
    name, *options = op.split("_")
    x = array((shape["groups"], shape["n"], shape["k"]), dtype)
    precision = "highest" if options == ["f32"] else None
    operands = (x, x) if "2" in name else (x,)
    options = dict(precision=precision, implementation="cuda")
    with jax.enable_x64(True):
        return only(getattr(jgg, f"grouped_{name}"), *operands, **options)


def products(shape, dtype, precision) -> jgg.Plan:
    problems = shape["problems"]
    lhs = [array((m, k), dtype) for m, _, k in problems]
    rhs = [array((k, n), dtype) for _, n, k in problems]
    return only(jgg.grouped_gemm, lhs, rhs, precision=precision)


def only(fn, *args, **kwargs) -> jgg.Plan:
    (plan,) = jgg.explain(fn, *args, multiprocessors=132, **kwargs).plans
    return plan


def plan_of(case: dict[str, Any]) -> jgg.Plan | None:
    """Returns the plan that runs a recorded case, or None if the case is no product."""
    op, shape, dtype = case["op"], case["shape"], case["dtype"]
    precision = None if case.get("precision") == "default" else case.get("precision")
    if op.startswith(("quantize", "fp8_step")):
        return None
    if op.startswith("fp8_"):
        return scaled(shape, op)
    if op.startswith("grouped_gemm"):
        return products(shape, dtype, precision)
    if op.startswith(("syr", "her")):
        return update(shape, op, dtype)
    return ragged(shape, op, dtype, case["out_dtype"], precision)


def recorded() -> list[tuple[str, dict[str, Any]]]:
    """Returns each case in which our kernels for one product were timed, and the file's name."""
    return [
        (path.name, case)
        for path in sorted(RESULTS.glob("h200_*.json"))
        for case in json.loads(path.read_text())["cases"]
        if "flops" in case and "median_us" in case["peers"].get("ours", {})
        # Leave out layers and optimisers.
        if not case["op"].startswith(("moe_", "ep_", "newton_", "step", "weight_only"))
    ]


@pytest.fixture(scope="module")
def times() -> dict[str, np.ndarray]:
    """Returns the predicted and the measured microseconds of each file, [cases, 2]."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, case in recorded():
        plan = plan_of(case)
        if plan is not None:
            assert plan.prediction is not None, (name, case["case"], str(plan))
            pair = plan.prediction.seconds * 1e6, case["peers"]["ours"]["median_us"]
            found.setdefault(name, []).append(pair)
    return {name: np.array(pairs) for name, pairs in found.items()}


def rank_correlation(pairs: np.ndarray) -> float:
    """Returns Spearman's rank correlation. Equal values have the mean of their ranks."""
    ranks = []
    for column in pairs.T:
        _, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return float(np.corrcoef(ranks)[0, 1])


def test_ranks_all_recorded_products(times):
    pairs = np.concatenate(list(times.values()))
    assert len(pairs) >= 200
    assert rank_correlation(pairs) >= 0.95


@pytest.mark.parametrize(
    "name", ["main", "majors", "fp8", "rank_k", "lists", "lists_float32", "float32_highest"]
)
def test_ranks_the_products_of_a_record(times, name):
    """Predictions also rank the products within each record."""
    assert rank_correlation(times[f"h200_{name}.json"]) >= 0.9


def test_is_near_the_measured_time(times):
    """Predictions are bounds: most kernels take longer, but few take twice as long."""
    ratios = np.concatenate(
        [measured / predicted for predicted, measured in (pairs.T for pairs in times.values())]
    )
    assert 0.9 < np.median(ratios) < 1.3
    assert np.mean(ratios < 2) > 0.9 and ratios.min() > 0.6


@pytest.mark.parametrize(
    "choice",
    [
        choice
        for table in (
            *(SIXTEEN_BITS, FLOAT32, plan_fp8.NONCONTRACTING_KERNELS, plan_fp8.CONTRACTING_KERNELS),
            *(plan_lists.COMPILED, plan_rank_k.COMPILED),
        )
        for choice in table
        if choice.record
    ],
    ids=lambda choice: " ".join(choice.record),
)
def test_choices_are_those_of_their_records(choice):
    plan = plan_of(case_of(choice))
    assert plan.tile == choice.tile and plan.chosen_by == "default"


LAYER_KERNELS = {
    "gated_ragged_dot": kernels_mlp.FORWARD_KERNELS,
    "gated_ragged_dot_transpose": kernels_mlp.GRADIENT_KERNELS,
    "paired_weight_gradients": kernels_mlp.WEIGHTS_KERNELS,
    "down_weight_gradient": kernels_mlp.DOWN_WEIGHTS_KERNELS,
}


@pytest.mark.parametrize(
    ("op", "choice"),
    [(op, choice) for op, table in LAYER_KERNELS.items() for choice in table],
    ids=lambda value: " ".join(getattr(value, "record", [])) or None,
)
def test_choices_of_layers_are_those_of_their_records(op, choice):
    shape = case_of(choice)["shape"]
    tokens, embed, hidden, experts, top_k = (
        shape[name] for name in ("tokens", "embed", "hidden", "experts", "top_k")
    )
    wi, wo = ((experts, *dims) for dims in ((embed, hidden), (hidden, embed)))
    operands = (array(dims, jnp.bfloat16) for dims in ((tokens, embed), wi, wi, wo))

    def loss(x, wi_0, wi_1, wo, logits):
        return (
            moe.dropless_mlp(x, moe.route(logits, top_k), wi_0, wi_1, wo).astype(jnp.float32).sum()
        )

    logits = array((tokens, experts), jnp.float32)
    gradients = jax.grad(loss, (0, 1, 2, 3))
    plans = jgg.explain(gradients, *operands, logits, multiprocessors=132).plans
    (plan,) = (plan for plan in plans if plan.problem.op == op)
    assert how(plan) == "kernel" and plan.tile == choice.tile


@pytest.mark.parametrize("choice", plan_rows.SORTS, ids=lambda choice: " ".join(choice.record))
def test_sorts_are_those_of_their_records(choice):
    shape = case_of(choice)["shape"]
    pairs, experts = shape["tokens"] * shape["top_k"], shape["experts"]
    params = dict(num_experts=experts, implementation=None)
    plan = plan_rows.plan_sort([array((pairs,), jnp.int32)], params, H200)
    assert plan.grid == choice.blocks(pairs, experts)
    assert (plan.grid == 1) == (choice is not plan_rows.SORTS[0])


def case_of(choice) -> dict[str, Any]:
    """Returns the recorded case that was measured with this choice."""
    name, wanted = choice.record
    cases = json.loads((RESULTS / name).read_text())["cases"]
    (case,) = (case for case in cases if case["case"] == wanted)
    return case


class TestBounds:
    OPTIONS = dict(utilization=0.5, num_bytes=4.2e9, target=H200)

    def test_the_larger_one_counts(self):
        few = predict(jnp.bfloat16, multiply_adds=1e6, **self.OPTIONS)
        many = predict(jnp.bfloat16, multiply_adds=1e15, **self.OPTIONS)
        assert few.bound == "memory" and few.seconds == few.memory_seconds == pytest.approx(1e-3)
        assert many.bound == "tensor cores" and many.seconds == many.tensor_seconds
        assert "bound by memory" in str(few) and "predicted time 1 ms" in str(few)
        assert "bound by the tensor cores" in str(many)

    def test_rates(self):
        def seconds(dtype):
            return predict(dtype, multiply_adds=1e15, **self.OPTIONS).tensor_seconds

        assert seconds(E4M3) < seconds(jnp.bfloat16) == seconds(jnp.float16)
        assert seconds(jnp.float32) == seconds(jnp.float16)
        assert seconds(jnp.float64) > 10 * seconds(jnp.float16)
        assert seconds(jnp.complex128) == pytest.approx(4 * seconds(jnp.float64))

    def test_splitting_comes_before(self):
        options = self.OPTIONS | dict(multiply_adds=1e6)
        split = predict(jnp.float32, split_bytes=8.4e9, **options)
        assert split.seconds == pytest.approx(3e-3)

    def test_half_the_multiprocessors_take_twice_as_long_to_multiply(self):
        options = self.OPTIONS | dict(multiply_adds=1e15)
        half = predict(jnp.bfloat16, **(options | dict(target=Target(66))))
        whole = predict(jnp.bfloat16, **options)
        assert half.tensor_seconds == pytest.approx(2 * whole.tensor_seconds)
        assert half.memory_seconds == whole.memory_seconds

    def test_rates_are_those_of_the_target(self):
        options = self.OPTIONS | dict(multiply_adds=1e15, split_bytes=8.4e9)
        rates = Rates(sixteen_bits=2 * H200.rates.sixteen_bits, bandwidth=H200.rates.bandwidth / 2)
        other = predict(jnp.bfloat16, **(options | dict(target=Target(rates=rates))))
        ours = predict(jnp.bfloat16, **options)
        assert other.tensor_seconds == pytest.approx(ours.tensor_seconds / 2)
        assert other.memory_seconds == pytest.approx(2 * ours.memory_seconds)
        assert other.split_seconds == pytest.approx(2 * ours.split_seconds)
