"""Tests that examples/pretrain_moe.py trains, resumes, counts and divides work as documented."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

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


@pytest.fixture(scope="module")
def straight():
    """Returns the losses of a run on one device that does not stop and resume."""
    return run()


def test_the_loss_falls(straight):
    assert straight[0] == pytest.approx(math.log(256), rel=0.02)
    assert straight[-1] < straight[0] - 0.5


@pytest.mark.parametrize(
    "options",
    [{}, dict(recipe="blockwise"), dict(optimizer="muon", recipe="blockwise")],
    ids=lambda options: " ".join(options.values()) or "plain",
)
def test_a_run_that_resumes_has_the_same_losses(options, straight, tmp_path, capsys):
    expected = run(**options) if options else straight
    assert expected[-1] < expected[0] - 0.3
    options |= dict(checkpoints=tmp_path / "run", curve=tmp_path / "curve.png")
    first, second = run(4, **options, save_every=2), run(**options)
    assert "resumed after 4 steps" in capsys.readouterr().out
    assert first + second == expected  # bit for bit
    with (tmp_path / "curve.csv").open() as file:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert rows == list(enumerate(expected, start=1))


def test_a_record_has_the_run_and_its_speed(tmp_path):
    path = tmp_path / "record.json"
    losses = run(5, "--no-scan", output=path, commit="abc1234", recipe="blockwise")
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


@pytest.mark.parametrize("flags", [("--no-scan",), ("--remat=layers",)], ids=" ".join)
def test_loops_and_rematerialisation_change_no_loss(flags, straight):
    np.testing.assert_allclose(run(4, *flags), straight[:4], rtol=1e-4)


def test_several_devices_train_alike(straight, tmp_path):
    """A run on four devices with divided experts resumes on two devices with FSDP."""
    options = dict(batch=8, checkpoints=tmp_path)
    first = run(3, devices=4, expert_parallel=2, **options)
    then = run(5, "--fsdp", devices=2, **options)
    np.testing.assert_allclose(first + then, straight[:5], rtol=5e-3)


def test_several_devices_train_alike_in_fp8():
    one = run(3, batch=8, recipe="blockwise")
    for flag in ("--fsdp", "--expert-parallel=2"):
        losses = run(3, flag, batch=8, recipe="blockwise", devices=2)
        np.testing.assert_allclose(losses, one, rtol=1e-2)


def test_several_devices_train_alike_by_muon():
    one, two = (run(3, "--fsdp", batch=8, optimizer="muon", devices=n) for n in (1, 2))
    np.testing.assert_allclose(two, one, rtol=5e-3)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    """One microbatch gives the same step as three, except for the router's losses."""
    config = moe_model.PRESETS["tiny"]
    model = moe_model.Transformer(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    optimizer = optim.quantized(optax.sgd(1.0), select=lambda path, leaf: False)
    rng = np.random.default_rng()
    windows = rng.integers(0, config.vocabulary, (3, 4, config.length + 1), np.int32)
    results = []
    for cut in (windows, windows.reshape(1, -1, config.length + 1)):
        copy = jax.tree.map(lambda a: a.copy(), params)
        results.append(pretrain_moe.make_step(graph, optimizer)(copy, optimizer.init(copy), cut))
    (three, _, loss_of_three), (one, _, loss_of_one) = results
    np.testing.assert_allclose(loss_of_three, loss_of_one, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(three), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-3)


def test_the_loss_in_chunks_is_that_of_all_logits():
    rng = np.random.default_rng()
    x, kernel = rng.standard_normal((2, 12, 8)), rng.standard_normal((8, 32))
    targets = rng.integers(0, 32, (2, 12), np.int32)
    logits = x @ kernel
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.take_along_axis(shares, targets[..., None], -1)
    dlogits = 3 * (shares - np.eye(32)[targets]) / targets.size
    for chunks in (1, 3):

        def loss(x, kernel, chunks=chunks):
            return 3 * moe_model.cross_entropy(chunks, x, kernel, targets)

        arrays = jnp.float32(x), jnp.float32(kernel)
        value, (dx, dkernel) = jax.value_and_grad(loss, (0, 1))(*arrays)
        np.testing.assert_allclose(value, -3 * np.log(chosen).mean(), rtol=1e-5)
        np.testing.assert_allclose(loss(*arrays), value, rtol=1e-6)
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


def test_a_balanced_router_has_even_loads_and_the_same_gradients(straight):
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
    assert run(2, "--balanced") != straight[:2]


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
    """JAX raises the same error if memory is short at compilation and at run time."""

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

    monkeypatch.setattr(pretrain_moe, "make_step", make_step)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run(2)


def test_files_of_tokens_and_bad_options(tmp_path):
    tokens = np.random.default_rng().integers(0, 256, 1000, np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    (tmp_path / "bytes.txt").write_bytes(tokens.astype(np.uint8).tobytes())
    losses = [run(2, data=tmp_path / name) for name in ("tokens.npy", "bytes.txt")]
    assert losses[0] == losses[1]
    np.save(tmp_path / "large.npy", np.append(tokens, 256))
    with pytest.raises(SystemExit, match="--devices --batch, got 1, 2 and 3"):
        run(2, devices=2, batch=3)
    with pytest.raises(ValueError, match="tokens below 256, got 1001 tokens up to 256"):
        run(2, data=tmp_path / "large.npy")
