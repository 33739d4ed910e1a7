"""Tests that examples/pretrain_moe.py trains, resumes, counts and divides work as documented."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import json
import math
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from examples import moe_model, pretrain_moe  # noqa: E402
from jax_grouped_gemm import optim  # noqa: E402
from jax_grouped_gemm.demo.model import rotate, rotations  # noqa: E402

STEPS = 10


def run(steps=STEPS, *flags, **options):
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return pretrain_moe.main([f"--steps={steps}", "--learning-rate=1e-2", *flags, *named])


begun, compiled = {}, {}


@contextlib.contextmanager
def one_step(**options):
    """Returns a context in which runs with equal options share first weights and compiled step."""
    key, start, make = tuple(options.items()), pretrain_moe.start, pretrain_moe.make_step

    def copy(tree):
        return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), tree)

    def start_once(*args):
        if key not in begun:
            begun[key] = start(*args)
        graph, optimizer, params, of_params, state = begun[key]
        return graph, optimizer, copy(params), of_params, copy(state)

    def make_once(*args, **of_jit):
        if key not in compiled:
            compiled[key] = make(*args, **of_jit)
        return compiled[key]

    with mock.patch.multiple(pretrain_moe, start=start_once, make_step=make_once):
        yield


def without_a_model(*_):
    """Replaces `pretrain_moe.start` in tests of what surrounds the step."""
    return None, None, {}, {}, {}


@functools.cache
def straight(**options):
    """Returns the losses of a run on one device that does not stop and resume."""
    with one_step(**options):
        return run(**options)


def test_the_loss_falls():
    assert straight()[0] == pytest.approx(math.log(256), rel=0.02)
    assert straight()[-1] < straight()[0] - 0.5


@pytest.mark.parametrize(
    "options",
    [{}, dict(recipe="blockwise"), dict(optimizer="muon", recipe="blockwise")],
    ids=lambda options: " ".join(options.values()) or "plain",
)
def test_a_run_that_resumes_has_the_same_losses(options, tmp_path, capsys):
    expected = straight(**options)
    assert expected[-1] < expected[0] - 0.3
    files = dict(checkpoints=tmp_path / "run", curve=tmp_path / "curve.png")
    with one_step(**options):
        first, second = run(4, **options, **files, save_every=2), run(**options, **files)
    assert "resumed after 4 steps" in capsys.readouterr().out
    assert first + second == expected  # bit for bit
    with (tmp_path / "curve.csv").open() as file:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert rows == list(enumerate(expected, start=1))


def test_a_record_has_the_run_and_its_speed(tmp_path):
    path = tmp_path / "record.json"
    losses = run(5, "--no-scan", output=path, commit="abc1234", recipe="blockwise")
    # A run without loops has the losses of a run with them.
    np.testing.assert_allclose(losses, straight(recipe="blockwise")[:5], rtol=1e-4)
    record = json.loads(path.read_text())
    assert record["command"] == (
        "python -m examples.pretrain_moe --no-scan --recipe blockwise --learning-rate 0.01 "
        "--steps 5 --commit abc1234"
    )
    assert record["commit"] == "abc1234" and record["device"] == jax.devices()[0].device_kind
    assert record["machine"]["packages"]["jax"] == jax.__version__
    (case,) = record["cases"]
    assert case["case"] == "--no-scan --recipe blockwise --learning-rate 0.01"
    config, ours = moe_model.PRESETS["tiny"], case["peers"]["ours"]
    assert case["shape"]["layers"] == config.layers
    assert case["shape"]["dtype"] == "float32"
    assert case["tokens"] == config.batch * config.length
    np.testing.assert_allclose(ours["losses"], losses, rtol=1e-4)
    # These are the times of steps 2 to 5. The time of step 2 may include compilation.
    assert len(ours["us"]) == 4 and ours["mfu"] is None
    assert ours["median_us"] == sorted(ours["us"][1:])[1]
    rate = case["tokens"] / ours["median_us"] * 1e6
    np.testing.assert_allclose(ours["tokens_per_second"], rate, rtol=1e-4)
    np.testing.assert_allclose(ours["tflops"], config.flops_per_token * rate / 1e12, rtol=1e-3)


def test_rematerialisation_changes_no_loss():
    np.testing.assert_allclose(run(4, "--remat=layers"), straight()[:4], rtol=1e-4)


def test_several_devices_train_alike(tmp_path):
    """A run on four devices with divided experts resumes on two devices with FSDP."""
    options = dict(batch=8, checkpoints=tmp_path)
    first = run(3, devices=4, expert_parallel=2, **options)
    then = run(5, "--fsdp", devices=2, **options)
    np.testing.assert_allclose(first + then, straight()[:5], rtol=5e-3)


def test_several_devices_train_alike_in_fp8():
    losses = run(3, batch=8, recipe="blockwise", devices=2, expert_parallel=2)
    np.testing.assert_allclose(losses, straight(recipe="blockwise")[:3], rtol=1e-2)


def test_several_devices_train_alike_by_muon():
    """Devices of FSDP divide FP8 weights and the moments of Muon."""
    options = dict(optimizer="muon", recipe="blockwise")
    losses = run(3, "--fsdp", batch=8, **options, devices=2)
    np.testing.assert_allclose(losses, straight(**options)[:3], rtol=5e-3)


class Bigrams(nnx.Module):
    """A small model without a router, whose loss is a mean over all tokens."""

    def __init__(self, rng):
        embedding, head = rng.standard_normal((2, 16, 16)).astype(np.float32)
        self.embedding, self.head = nnx.Param(embedding), nnx.Param(head)

    def loss(self, windows):
        x = self.embedding[...][windows[:, :-1]]
        loss = moe_model.cross_entropy(2, x, self.head[...], windows[:, 1:])
        return loss, loss


def test_accumulated_gradients_are_those_of_the_whole_batch():
    rng = np.random.default_rng()
    graph, params = nnx.split(Bigrams(rng), nnx.Param)
    optimizer = optim.quantized(optax.sgd(1.0), select=lambda path, leaf: False)
    windows = rng.integers(0, 16, (3, 4, 9), np.int32)
    results = []
    for cut in (windows, windows.reshape(1, 12, 9)):
        copy = jax.tree.map(jnp.array, params)
        results.append(pretrain_moe.make_step(graph, optimizer)(copy, optimizer.init(copy), cut))
    (three, _, loss_of_three), (one, _, loss_of_one) = results
    np.testing.assert_allclose(loss_of_three, loss_of_one, rtol=1e-5)
    for a, b, old in zip(*map(jax.tree.leaves, (three, one, params)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.abs(a - old).max() > 1e-2


def test_the_loss_in_chunks_is_that_of_all_logits():
    rng = np.random.default_rng()
    x, kernel = rng.standard_normal((2, 12, 8)), rng.standard_normal((8, 32))
    targets = rng.integers(0, 32, (2, 12), np.int32)
    logits = x @ kernel
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.take_along_axis(shares, targets[..., None], -1)
    dlogits = 3 * (shares - np.eye(32)[targets]) / targets.size

    @functools.partial(jax.jit, static_argnums=2)
    def losses(x, kernel, chunks):
        def loss(x, kernel):
            return 3 * moe_model.cross_entropy(chunks, x, kernel, targets)

        return loss(x, kernel), *jax.value_and_grad(loss, (0, 1))(x, kernel)

    for chunks in (1, 3):
        alone, value, (dx, dkernel) = losses(np.float32(x), np.float32(kernel), chunks)
        np.testing.assert_allclose(value, -3 * np.log(chosen).mean(), rtol=1e-5)
        np.testing.assert_allclose(alone, value, rtol=1e-6)
        np.testing.assert_allclose(dx, dlogits @ kernel.T, atol=1e-5)
        np.testing.assert_allclose(dkernel, np.einsum("bsd,bsv->dv", x, dlogits), atol=1e-5)


def test_the_router_is_as_exact_as_its_operands():
    rng = np.random.default_rng()
    bf16 = jnp.bfloat16
    x, kernel = jnp.asarray(rng.standard_normal((2, 6, 64)), bf16), rng.standard_normal((64, 8))
    weights = jnp.asarray(rng.standard_normal((2, 6, 8)), jnp.float32)
    kernel = jnp.asarray(kernel, bf16)
    logits, vjp = jax.vjp(moe_model.float32_product, x, kernel)
    wide = [np.asarray(a, np.float64) for a in (x, kernel, weights.astype(bf16))]
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, wide[0] @ wide[1], atol=1e-4)
    dx, dkernel = vjp(weights)
    assert dx.dtype == dkernel.dtype == bf16
    np.testing.assert_allclose(dx, wide[2] @ wide[1].T, rtol=1e-2, atol=0.1)
    expected = np.einsum("bsd,bse->de", wide[0], wide[2])
    np.testing.assert_allclose(dkernel, expected, rtol=1e-2, atol=0.1)


def loss_without_a_step(graph, optimizer, **_):
    """Returns a step that computes the loss and changes nothing."""
    loss = jax.jit(lambda params, windows: nnx.merge(graph, params).loss(windows[0])[1])
    return lambda params, state, windows: (params, state, loss(params, windows))


def test_a_balanced_router_has_even_loads_and_the_same_gradients(monkeypatch):
    rng = np.random.default_rng()
    x, weights = (jnp.asarray(rng.standard_normal((4, 512, n)), jnp.float32) for n in (64, 8))
    plain, balanced = (
        moe_model.Router(64, 8, balanced=balanced, rngs=nnx.Rngs(0)) for balanced in (False, True)
    )
    _, chosen = jax.lax.top_k(balanced(x), 2)
    counts = np.bincount(np.ravel(chosen), minlength=8)
    assert counts.sum() == 4096 and abs(counts - 512).max() < 128
    gradients = [
        nnx.grad(lambda router: (router(x) * weights).sum())(router) for router in (plain, balanced)
    ]
    jax.tree.map(np.testing.assert_array_equal, *gradients)
    monkeypatch.setattr(pretrain_moe, "make_step", loss_without_a_step)
    assert run(1, "--balanced") != straight()[:1]


def test_rotations_multiply_pairs_by_complex_numbers():
    x = np.random.default_rng().standard_normal((2, 50, 3, 16))
    angle = np.arange(50)[:, None] * 1e6 ** (-np.arange(8) / 8)
    pairs = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angle)[:, None]
    y = rotate(jnp.float32(x), rotations(50, 16, 1e6))
    np.testing.assert_allclose(y, np.concatenate([pairs.real, pairs.imag], -1), atol=1e-4)


def test_active_parameters_are_those_of_the_model():
    for name, config in moe_model.PRESETS.items():
        config = dataclasses.replace(config, layers=3)
        state = jax.eval_shape(
            lambda config=config: nnx.state(moe_model.Transformer(config, rngs=nnx.Rngs(0)).blocks)
        )
        active = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            path = jax.tree_util.keystr(path)
            if any(matrix in path for matrix in ("wi_0", "wi_1", "wo")):
                active += leaf.size * config.top_k // config.experts
            elif "kernel" in path:
                active += leaf.size
        assert config.active_parameters == active, name


@pytest.mark.parametrize("flags, stock", [((), False), (("--stock",), True)])
def test_a_model_that_is_too_large_ends_with_a_sentence(flags, stock, monkeypatch):
    """The error of a step without memory becomes a sentence. JAX raises it at compilation too."""

    def make_step(*_, **__):
        def step(*_):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 32.85GiB with "
                "allocator GPU_0_bfc on device 0. [tf-allocator-allocation-error='']"
            )

        return step

    monkeypatch.setattr(pretrain_moe, "make_step", make_step)
    with pytest.raises(SystemExit, match="^out of memory: asked for 32.85 GiB.* --batch") as raised:
        run(2, *flags)
    assert ("no --stock" in str(raised.value)) is stock
    assert raised.value.__suppress_context__


def test_other_errors_are_not_of_memory(monkeypatch):
    def make_step(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: invalid argument")

    monkeypatch.setattr(pretrain_moe, "start", without_a_model)
    monkeypatch.setattr(pretrain_moe, "make_step", make_step)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run(2)


def test_files_of_tokens_and_bad_options(tmp_path, monkeypatch):
    read = []

    def make_step(*_, **__):
        def step(params, state, windows):
            read.append(np.asarray(windows))
            return params, state, np.float32(0)

        return step

    monkeypatch.setattr(pretrain_moe, "start", without_a_model)
    monkeypatch.setattr(pretrain_moe, "make_step", make_step)
    tokens = np.random.default_rng().integers(0, 256, 1000, np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    (tmp_path / "bytes.txt").write_bytes(tokens.astype(np.uint8).tobytes())
    for name in ("tokens.npy", "bytes.txt"):
        run(2, data=tmp_path / name)
    np.testing.assert_array_equal(read[:2], read[2:])
    windows = np.lib.stride_tricks.sliding_window_view(tokens, read[0].shape[-1])
    assert {row.tobytes() for row in windows.astype(np.int32)} >= {
        row.tobytes() for window in read for row in window[0]
    }
    np.save(tmp_path / "large.npy", np.append(tokens, 256))
    with pytest.raises(SystemExit, match="--devices --batch, got 1, 2 and 3"):
        run(2, devices=2, batch=3)
    with pytest.raises(ValueError, match="tokens below 256, got 1001 tokens up to 256"):
        run(2, data=tmp_path / "large.npy")
