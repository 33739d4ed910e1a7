"""Tests of the server in examples/. The tests of the trainer are in test_pretrain.py."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flax")


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
