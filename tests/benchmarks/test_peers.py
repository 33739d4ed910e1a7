"""Tests of what benchmarks pass to peers whose libraries this machine may lack."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from benchmarks import cutlass, grouped_gemm, moe, rank_k, weight_only
from benchmarks.harness import cases
from benchmarks.harness import peer as base
from benchmarks.harness.fp8_inputs import ScaledInputs, dequantize, reference, rowwise
from benchmarks.harness.recorders import Sample
from benchmarks.peers import cutlass as cutlass_peers
from benchmarks.peers import humming, quack, quack_moe, sweep


def scaled_case(op: str, seed: int):
    case = cases.Case(cases.SHAPES["tiny_fine"], op, "random", "float8_e4m3fn", seed)
    return case, ScaledInputs(case.shape, seed)


FORWARD = cases.Op("fp8_forward", "x", "wt", transpose_rhs=True, out_dtype="bfloat16")
WGRAD = cases.Op("fp8_wgrad", "x", "dy", contracting=True, out_dtype="float32")


@pytest.mark.parametrize("op", [FORWARD, WGRAD])
def test_the_fp8_reference_is_close_to_the_product_of_the_sources(op, rng):
    case, inputs = scaled_case(op, int(rng.integers(2**31)))
    lhs, rhs, sizes = inputs.operands(case)
    found = np.asarray(inputs.reference(case, (lhs, rhs, sizes)))
    x, y = (np.float64(source) for source in (lhs.source, rhs.source))
    expected = np.zeros(case.problem.out_shape)
    for group, (start, end) in enumerate(cases.row_ranges(case.group_sizes)):
        if op.contracting:
            expected[group] = x[start:end].T @ y[start:end]
        else:
            expected[start:end] = x[start:end] @ y[group].T
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    # Three bits of mantissa cause this error. A misplaced scale or row would cause far more.
    assert 0.01 < error < 0.06


def test_rowwise_scales_use_the_whole_range(rng):
    x = jnp.asarray(rng.standard_normal((3, 40, 130)) * 10.0 ** rng.integers(-3, 4, (3, 40, 1)))
    values, scales = rowwise(x)
    assert scales.shape == (3, 40, 1)
    assert np.all(np.abs(np.float32(values)).max(-1) == 448)
    np.testing.assert_allclose(dequantize(values, scales), x, rtol=2**-4, atol=0.01 * x.max())


def test_the_reference_takes_any_scales(rng):
    case, inputs = scaled_case(FORWARD, 1)
    lhs, rhs, sizes = inputs.operands(case)
    doubled = lhs._replace(scales=2 * lhs.scales)
    np.testing.assert_allclose(
        reference(case.problem, doubled, rhs, sizes),
        2 * reference(case.problem, lhs, rhs, sizes),
        rtol=1e-5,
    )


FLOAT32 = [update for update in rank_k.UPDATES.values() if update.dtype == "float32"]


@pytest.mark.parametrize("update", FLOAT32, ids=lambda update: update.name)
def test_updates_have_their_precision_wherever_they_are_called(update):
    """A function must set its precision itself, because it is timed outside of any context."""
    a, b = (jnp.ones((2, 24, 16), update.dtype) for _ in "ab")
    functions = [peer.function for peer in rank_k.peers(update) if isinstance(peer, base.JaxPeer)]
    assert len(functions) >= 3
    want = "HIGHEST" if update.precision == "highest" else "DEFAULT"
    for function in functions:
        assert want in str(jax.make_jaxpr(jax.jit(function))(a, b))


def test_lists_of_products_are_the_same_in_every_run():
    found = grouped_gemm.lists()
    assert found == grouped_gemm.lists()
    for name, problems in found.items():
        sides = np.array(problems)
        assert (sides % 8 == 0).all() and sides.min() >= 24, name


def test_every_kernel_of_cutlass_that_is_asked_for_is_compiled():
    sources = Path(cutlass.__file__).parent
    compiled = set(re.findall(r'\{"(\w+)", \w+\}', (sources / "kernels.h").read_text()))
    asked = set(cutlass_peers.PRODUCTS.values())
    asked |= {name for names in cutlass_peers.UPDATES.values() for name in names.values()}
    assert asked == compiled


def test_a_missing_library_names_the_command_that_builds_it(monkeypatch, tmp_path):
    monkeypatch.setattr(cutlass, "LIBRARY", tmp_path / "absent.so")
    reason = cutlass.unavailable_reason()
    assert cutlass.BUILD in reason and (Path(__file__).parents[2] / cutlass.BUILD).exists()


@pytest.mark.parametrize("kind", quack_moe.KINDS)
def test_configurations_of_quack_layers_are_those_that_the_product_can_have(kind):
    found = quack_moe.candidates(kind)
    assert len(set(found)) == len(found) > 8
    dynamic = kind == "gate_up_gradient"
    assert str(found[0]) == str(quack.CONFIGS[0]) + ", dynamic" * dynamic
    assert {config.is_dynamic_persistent for config in found} == {False, dynamic}
    gathered = "x_gradient" != kind != "down"
    assert (max(config.cluster_n for config in found) == 1) == gathered
    if kind.startswith("gate_up") and not kind.endswith("weights"):
        assert not any(config.tile_n % 32 for config in found)


def test_kernels_of_a_quack_layer_have_parts_by_their_order():
    product = "kernel_cutlass_kernel_quack_gemm_sm90_0"
    step = (product, product, "sum_of_rows", "memset", product, "reduce") + 2 * (product,)
    step += ("sum_of_rows", product)
    part_of = quack_moe.parts_in_order(quack_moe.KINDS)
    expected = {"combine": 12.0, "PyTorch": 10.0} | dict(
        zip(quack_moe.KINDS, (1.0, 2.0, 5.0, 7.0, 8.0, 10.0), strict=True)
    )
    # The second round has the same parts as the first.
    for _ in range(2):
        assert Sample(9.0, step, tuple(map(float, range(1, 11)))).parts(part_of) == expected


def test_a_chain_has_a_layer_for_each_step_with_experts_of_its_own():
    problem = moe.Problem(moe.TINY, "moe_forward")
    (x, experts, *others), packed = given = weight_only.operands(moe.TINY, "int8", 0)
    ours, bf16 = weight_only.peers(problem, np.asarray(experts), chain=2)
    layer = moe.layer_function(problem, None)
    (between,) = layer(x, experts, *others)
    (expected,) = layer(between, (experts + moe.TINY.top_k) % moe.TINY.experts, *others)
    np.testing.assert_array_equal(*(np.float32(y) for y in (*bf16.function(*given), expected)))
    (found,) = ours.function(*given)
    np.testing.assert_allclose(np.float32(found), np.float32(expected), atol=0.02)


# Values of MXFP4 by code, from the specification; the sign is the highest bit.
MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
HUMMING_VALUES = {
    "mxfp4": np.concatenate([MXFP4, -MXFP4]),
    "int4": np.arange(16.0) - 8,
    "int8": np.arange(256.0) - 128,
}


@pytest.mark.parametrize("format", humming.VALUES)
def test_the_words_and_scales_that_humming_gets_are_the_weights(format, rng):
    """Rows that do not fill a group of 128, and two matrices that do not fill 256 columns."""
    shape = 2, 192, 160
    drawn = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(2)]
    packed = [jgg.quantize(x, format) for x in drawn]
    words, scales = map(np.asarray, humming.packed_words(packed))
    values = HUMMING_VALUES[format]
    bits = int(np.log2(len(values)))
    assert words.shape == (2, 512, 256 * bits // 32) and words.dtype == np.int32
    # The first code along k is in the lowest bits of a word.
    codes = words[..., None] >> np.arange(0, 32, bits) & len(values) - 1
    steps = np.exp2(np.float64(scales) - 127) if format == "mxfp4" else np.float64(scales)
    assert scales.shape == (2, 512, {"mxfp4": 8, "int4": 2, "int8": 1}[format])
    assert np.isfinite(steps).all()
    found = values[codes.reshape(2, 512, 256)] * np.repeat(steps, 256 // steps.shape[2], axis=2)
    expected = np.zeros((2, 512, 256))
    weights = np.concatenate([np.float64(jgg.dequantize(q)) for q in packed], axis=2)
    expected[:, :320, :192] = weights.swapaxes(1, 2)
    # The scales of int8 are rounded to bfloat16, and dequantised weights are bfloat16 too.
    np.testing.assert_allclose(found, expected, rtol=2**-7 if format != "mxfp4" else 0)


def test_a_missing_humming_is_named(monkeypatch):
    monkeypatch.setattr(base, "on_gpu", lambda: True)
    monkeypatch.setattr(
        base.importlib.util, "find_spec", lambda name: None if name == "humming" else name
    )
    for name in humming.GEMM_TYPES:
        assert humming.HummingLayer(name).unavailable_reason() == "humming is not installed"


class Tensor:
    """Stands in for a tensor of PyTorch, which may not be installed."""

    is_cuda = False

    def __init__(self, value: float):
        self.value = value


def test_each_product_of_a_quack_layer_gets_its_fastest_configuration(tmp_path, monkeypatch):
    kinds = "down", "gate_up_gradient"
    fastest = {kind: quack_moe.candidates(kind)[3] for kind in kinds}
    asked = []

    def function(kind: str, config: quack_moe.Config | None, *inputs: Tensor) -> list[Tensor]:
        asked.append((kind, config))
        if config and config.tile_m == 256:
            raise ValueError("does not fit")
        wrong = config == quack_moe.candidates(kind)[1]
        return [Tensor(len(inputs) + wrong)]

    def seconds(call) -> float:
        call.run()
        kind, _ = asked[-1]
        # Candidate 1 is the fastest of all, but gives a wrong result.
        others = 0 if call.config == quack_moe.candidates(kind)[1] else 5
        return 1 if call.config == fastest[kind] else others

    def compose(product) -> float:
        (out,) = product("down", Tensor(0))
        (gradient,) = product("gate_up_gradient", out, out)
        return gradient.value

    monkeypatch.setattr(sweep, "_seconds", seconds)
    monkeypatch.setattr(quack_moe, "differ", lambda one, other: one.value != other.value)
    named = quack_moe.products(experts=4, m=64, d=32, f=16)
    of_kind = {kind: functools.partial(function, kind) for kind in kinds}

    def tuned(limit: int) -> dict[str, quack_moe.Config]:
        swept = sweep.Sweep("imagined", limit, retune=False, directory=tmp_path)
        return quack_moe.tuned(swept, compose, of_kind, named)

    assert tuned(limit=6) == fastest
    kept = json.loads((tmp_path / "imagined_configs.json").read_text())
    assert set(kept) == {"down/4x64x16x32/bfloat16", "gate_up_gradient/4x64x32x16/bfloat16"}
    # A later run takes the kept configurations, and the default to compare their results with.
    asked.clear()
    assert tuned(limit=3) == fastest
    assert {config for _, config in asked} == {None, *fastest.values()}
