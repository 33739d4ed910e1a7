"""The main job: its text, its training, and what it prints and saves."""

import dataclasses
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")
pytest.importorskip("optax", reason="Optax is not installed")
pytest.importorskip("tqdm", reason="tqdm is not installed")

from jax_grouped_gemm.__main__ import main  # noqa: E402
from jax_grouped_gemm.demo import data, presets  # noqa: E402

TINY = presets.Preset(
    model=presets.ModelConfig(
        num_layers=1, embed=16, num_heads=2, hidden=16, num_experts=4, top_k=2, dtype=jnp.float32
    ),
    batch=4,
    sequence_length=16,
    steps=30,
    compare_steps=4,
    learning_rate=3e-2,
    warmup=0.05,
    evaluation_batches=2,
)


@pytest.fixture
def tiny(monkeypatch):
    """The preset for machines without a GPU is tiny, and this is such a machine."""
    monkeypatch.setitem(presets.PRESETS, "cpu", TINY)
    monkeypatch.setattr("jax_grouped_gemm.unavailable_reason", lambda: "no GPU in this test")


@pytest.fixture
def library(tmp_path):
    """Forty files; two of them are held out, and tests and installed packages do not count."""
    for index in range(40):
        (tmp_path / f"module{index:02}.py").write_text(f"value = {index}\n")
    for directory in ("test", "site-packages"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "other.py").write_text("not library code\n")
    return tmp_path


class TestCorpus:
    def test_split(self, library):
        corpus = data.load_corpus(library)
        train, held_out = corpus.train.tobytes(), corpus.held_out.tobytes()
        assert corpus.num_files == 40
        assert held_out == b"value = 19\n\nvalue = 39\n"
        for index in range(40):
            assert (f"value = {index}\n".encode() in train) == (index not in (19, 39))
        assert b"not library" not in train + held_out

    def test_standard_library(self):
        first, second = data.load_corpus(), data.load_corpus()
        assert len(first.train) > 1e6 and len(first.held_out) > 1e4
        np.testing.assert_array_equal(first.train, second.train)

    def test_too_few_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=f"found 0 .py files in {tmp_path}"):
            data.load_corpus(tmp_path)

    def test_batches_are_windows_of_the_text(self, rng):
        text = rng.integers(0, 256, size=50, dtype=np.uint8)
        stream = data.batches(text, batch=8, length=6, seed=3)
        first, second = next(stream), next(stream)
        assert first.shape == (8, 7) and first.dtype == np.uint8
        assert (first != second).any()
        windows = {text[start : start + 7].tobytes() for start in range(50 - 6)}
        assert {row.tobytes() for row in first} <= windows
        np.testing.assert_array_equal(next(data.batches(text, 8, 6, seed=3)), first)


class TestMain:
    def test_trains(self, tiny, capsys, tmp_path):
        main(["--steps", "25", "--output", str(tmp_path)])
        out = capsys.readouterr().out
        for expected in ("not available: no GPU in this test", "tokens/s", "held-out loss"):
            assert expected in out
        (run,) = json.loads((tmp_path / "runs.json").read_text())
        assert len(run["curve"]) == 25
        assert run["after"]["train"] < run["before"]["train"] - 0.5
        assert run["after"]["held_out"] < run["before"]["held_out"] - 0.5

    def test_compare_trains_the_same_model_with_each_implementation(self, tiny, capsys, tmp_path):
        main(["--compare", "--seed", "7", "--output", str(tmp_path)])
        reference, stock = json.loads((tmp_path / "runs.json").read_text())
        assert (reference["implementation"], stock["implementation"]) == ("reference", "jax")
        assert len(reference["curve"]) == TINY.compare_steps
        np.testing.assert_allclose(reference["curve"], stock["curve"], atol=1e-3)
        table = capsys.readouterr().out.partition("Comparison\n")[2]
        assert "reference in pure JAX" in table and "jax.lax.ragged_dot" in table

    def test_recipes_train_the_same_model(self, tiny, capsys, tmp_path):
        main(["--recipe", "bf16", "fp8", "--steps", "25", "--output", str(tmp_path)])
        plain, fp8 = json.loads((tmp_path / "runs.json").read_text())
        assert (plain["implementation"], fp8["implementation"]) == ("auto", "auto fp8")
        assert plain["curve"][0] != fp8["curve"][0]
        np.testing.assert_allclose(fp8["curve"], plain["curve"], rtol=2e-2)
        assert "auto fp8" in capsys.readouterr().out.partition("Comparison\n")[2]

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--steps=1"], "1 is too few"),
            (["--implementation=fast"], "invalid choice: 'fast'"),
            (["--recipe=fp4"], "invalid choice: 'fp4'"),
            (["--recipe", "fp8", "--implementation=jax"], "stock JAX has no FP8"),
        ],
    )
    def test_bad_arguments(self, arguments, message, capsys):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err

    def test_kernels_on_request_say_why_not(self, tiny, capsys):
        with pytest.raises(SystemExit):
            main(["--implementation=cuda"])
        assert "--implementation cuda: no GPU in this test" in capsys.readouterr().err

    def test_missing_packages_name_the_extra(self, monkeypatch, capsys):
        monkeypatch.delitem(sys.modules, "jax_grouped_gemm.demo.train", raising=False)
        monkeypatch.setitem(sys.modules, "optax", None)
        with pytest.raises(SystemExit):
            main([])
        captured = capsys.readouterr()
        assert "Environment" in captured.out
        assert "pip install 'jax-grouped-gemm[flax]'" in captured.err


def test_presets_fit_their_heads():
    for preset in presets.PRESETS.values():
        model = preset.model
        assert model.embed % (2 * model.num_heads) == 0
        assert model.top_k <= model.num_experts
        assert dataclasses.replace(preset, batch=3).tokens_per_step == 3 * preset.sequence_length
