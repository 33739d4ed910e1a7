"""The programs of examples/ do what they say."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flax")


@pytest.fixture(scope="module")
def straight():
    """The losses of twelve steps on one device, without a stop."""
    pytest.importorskip("orbax.checkpoint")
    from examples import train_moe

    return train_moe.main(["--steps", "12"])


def test_training_resumes_where_it_ended(straight, tmp_path, capsys):
    from examples import train_moe

    def run(steps):
        return train_moe.main(["--steps", str(steps), "--checkpoints", str(tmp_path)])

    first, second = run(5), run(12)
    assert "resumed after 5 steps" in capsys.readouterr().out
    np.testing.assert_allclose(first + second, straight, rtol=1e-4)
    assert straight[-1] < straight[0] - 0.5


def test_accumulated_gradients_are_those_of_the_whole_batch():
    """As many tokens in one microbatch as in two: the same step, but for the router's losses."""
    pytest.importorskip("orbax.checkpoint")
    import jax
    import optax
    from flax import nnx

    from examples import train_moe
    from jax_grouped_gemm import optim

    config = train_moe.PRESETS["cpu"]
    model = train_moe.Transformer(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    optimizer = optim.quantized(optax.sgd(1.0), select=lambda path, leaf: False)
    window = np.random.default_rng().integers(0, 256, (2, config.batch, config.length + 1))
    results = []
    for windows in (window, window.reshape(1, -1, config.length + 1)):
        step = train_moe.make_step(graph, optimizer)
        copy = jax.tree.map(lambda a: a.copy(), params)
        results.append(step(copy, optimizer.init(copy), windows.astype(np.int32)))
    (two, _, loss_of_two), (one, _, loss_of_one) = results
    np.testing.assert_allclose(loss_of_two, loss_of_one, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.parametrize("splits", [("experts", "experts"), ("data", "fsdp")], ids=str)
def test_several_devices_train_alike(splits, straight, tmp_path):
    from examples import train_moe

    def run(steps, devices, split):
        options = dict(steps=steps, devices=devices, split=split, checkpoints=tmp_path)
        return train_moe.main([f"--{name}={value}" for name, value in options.items()])

    first = run(3, 4, splits[0])
    then = run(5, 2, splits[1])  # resumes on another number of devices
    np.testing.assert_allclose(first + then, straight[:5], rtol=5e-3)


def test_training_in_fp8(tmp_path):
    """FP8 weights are not in the checkpoint, and a run that resumes makes them again."""
    pytest.importorskip("orbax.checkpoint")
    from examples import train_moe

    def run(steps, *options):
        return train_moe.main([f"--steps={steps}", "--recipe=fp8", *options])

    losses = run(12)
    assert losses[-1] < losses[0] - 0.5
    resumed = [run(steps, f"--checkpoints={tmp_path}") for steps in (5, 12)]
    np.testing.assert_allclose(sum(resumed, []), losses, rtol=1e-4)


def test_training_in_fp8_on_several_devices():
    pytest.importorskip("orbax.checkpoint")
    from examples import train_moe

    runs = [
        train_moe.main(["--steps=4", "--recipe=fp8", f"--devices={n}", f"--split={split}"])
        for n, split in ((1, "data"), (4, "data"), (2, "fsdp"), (2, "experts"))
    ]
    for losses in runs[1:]:
        np.testing.assert_allclose(losses, runs[0], rtol=1e-2)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_a_server_answers_with_what_the_layer_gives(kind, tmp_path):
    pytest.importorskip("flatbuffers")
    from examples import serve

    config = serve.PRESETS["cpu"]
    params = serve.quantized(config, 1, kind)
    server = serve.Server(serve.programs_of(config, params, kind, tmp_path), params)
    for count in (1, 3, 4, 16):
        x = np.random.default_rng().standard_normal((count, config.embed), np.float32)
        np.testing.assert_allclose(server(x), serve.layer(config, params, x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_serving(kind, capsys):
    pytest.importorskip("flatbuffers")
    from examples import serve

    medians = serve.main(["--requests", "6", "--weights", kind])
    assert medians and all(each > 0 for each in medians.values())
    assert "exported" in capsys.readouterr().out
