"""The demo, `python -m jax_grouped_gemm`: its text, its training, and what it prints and saves."""

import dataclasses
import gc
import json
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")
pytest.importorskip("optax", reason="Optax is not installed")
pytest.importorskip("tqdm", reason="tqdm is not installed")

import jax_grouped_gemm as jgg  # noqa: E402
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
    """Makes the preset for machines without a GPU tiny, and hides any GPU of this machine."""
    monkeypatch.setitem(presets.PRESETS, "cpu", TINY)
    monkeypatch.setattr("jax_grouped_gemm.unavailable_reason", lambda: "no GPU in this test")


@pytest.fixture(scope="module")
def trained():
    """Returns a cache of runs by preset and options, which determine the results of a run."""
    return {}


@pytest.fixture
def trained_once(trained, monkeypatch):
    """Makes `train` return the earlier run with equal preset and options, if there is one."""
    from jax_grouped_gemm.demo import train as training

    train = training.train

    def train_once(preset, corpus, **options):
        key = repr((preset, sorted(options.items())))
        if key not in trained:
            trained[key] = train(preset, corpus, **options)
        return trained[key]

    monkeypatch.setattr(training, "train", train_once)


@pytest.fixture
def library(tmp_path):
    """Returns a folder with 40 files (2 will be held out), and with tests and packages to skip."""
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
    def test_trains(self, tiny, trained_once, capsys, tmp_path):
        main(["--steps", "25", "--output", str(tmp_path)])
        out = capsys.readouterr().out
        for expected in ("no GPU in this test", "tokens/s", "without kernels", "held-out loss"):
            assert expected in out
        (run,) = json.loads((tmp_path / "runs.json").read_text())
        assert len(run["curve"]) == 25
        assert run["after"]["train"] < run["before"]["train"] - 0.5
        assert run["after"]["held_out"] < run["before"]["held_out"] - 0.5

    def test_compare_trains_the_same_model_with_each_implementation(
        self, tiny, trained_once, capsys, tmp_path
    ):
        main(["--compare", "--seed", "7", "--output", str(tmp_path)])
        reference, stock = json.loads((tmp_path / "runs.json").read_text())
        assert (reference["implementation"], stock["implementation"]) == ("xla", "jax")
        assert len(reference["curve"]) == TINY.compare_steps
        np.testing.assert_allclose(reference["curve"], stock["curve"], atol=1e-3)
        table = capsys.readouterr().out.partition("Comparison\n")[2]
        assert "reference in pure JAX" in table and "jax.lax.ragged_dot" in table

    @pytest.mark.parametrize("at, asked", [("compile", "48855261184 bytes."), ("run", "45.5GiB.")])
    def test_stock_out_of_memory_is_a_row(self, at, asked, tiny, monkeypatch, capsys, tmp_path):
        """If stock JAX runs out of memory, a row says so, and the next run can use its memory."""
        from jax_grouped_gemm.demo import train as training

        def refused(*_):
            message = f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {asked}"
            raise jax.errors.JaxRuntimeError(message)

        held = []

        def make_train_step(graph):
            held.append(sum(x.nbytes for x in jax.live_arrays()))
            return refused if at == "compile" and len(held) == 1 else made["step"](graph)

        def make_evaluation(*args):
            return refused if at == "run" and len(held) == 1 else made["evaluation"](*args)

        made = dict(step=training.make_train_step, evaluation=training.make_evaluation)
        monkeypatch.setattr(training, "make_train_step", make_train_step)
        monkeypatch.setattr(training, "make_evaluation", make_evaluation)
        gc.collect()
        before = sum(x.nbytes for x in jax.live_arrays())
        options = ["--implementation", "jax", "reference", "--output", str(tmp_path)]
        main(["--compare", *options])
        first, second = (size - before for size in held)
        assert second < 1.1 * first
        (run,) = json.loads((tmp_path / "runs.json").read_text())
        assert run["implementation"] == "xla"
        stock, reference = capsys.readouterr().out.partition("Comparison\n")[2].splitlines()[1:3]
        assert "reference in pure JAX" in reference
        assert stock.split()[0] == "jax" and "out of memory: asked for 45.5" in stock

    def test_says_how_much_was_free(self, monkeypatch):
        from jax_grouped_gemm.demo import train as training

        class Device:
            def __init__(self, used):
                self.used = used

            def memory_stats(self):
                return {"bytes_limit": 60 * 2**30, "bytes_in_use": self.used * 2**30}

        monkeypatch.setattr(jax, "devices", lambda: [Device(10), Device(20), Device(50)])
        said = training.shortage("RESOURCE_EXHAUSTED: failed to allocate 45.50GiB.", 2)
        assert said == "out of memory: asked for 45.50 GiB while 40.00 of 60.00 GiB were free"

    def test_nothing_fits(self, tiny, monkeypatch, capsys):
        from jax_grouped_gemm.demo import train as training

        def _train(*_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        monkeypatch.setattr(training, "_train", _train)
        with pytest.raises(SystemExit, match="does not fit"):
            main(["--steps=2"])
        assert "auto: out of memory" in capsys.readouterr().out

    def test_other_errors_are_not_memory(self, tiny, monkeypatch):
        from jax_grouped_gemm.demo import train as training

        def _train(*_):
            raise jax.errors.JaxRuntimeError("INTERNAL: invalid argument")

        monkeypatch.setattr(training, "_train", _train)
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            main(["--compare"])

    def test_recipes_train_the_same_model(self, tiny, trained_once, capsys, tmp_path):
        main(["--recipe", "bf16", "fp8", "bf16", "--steps", "25", "--output", str(tmp_path)])
        plain, fp8 = json.loads((tmp_path / "runs.json").read_text())
        assert (plain["implementation"], fp8["implementation"]) == ("auto bf16", "auto fp8")
        assert plain["curve"][0] != fp8["curve"][0]
        np.testing.assert_allclose(fp8["curve"], plain["curve"], rtol=4e-2)
        assert "auto fp8" in capsys.readouterr().out.partition("Comparison\n")[2]

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--steps=1"], "1 is too few"),
            (["--implementation=fast"], "invalid choice: 'fast'"),
            (["--recipe=fp4"], "invalid choice: 'fp4'"),
            (["--recipe", "fp8", "--implementation=jax"], "stock JAX has no FP8"),
            (["--steps=abc"], "'abc' is not a whole number"),
            (["--seed=-1"], "-1 is not between 0 and 2^32 - 1"),
            (["--seed=99999999999999999999"], "99999999999999999999 is not between 0"),
            (["--compare", "--implementation=jax"], "name another --implementation"),
        ],
    )
    def test_bad_arguments(self, arguments, message, capsys):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        "options, expected",
        [
            (["--recipe=fp8"], ["xla fp8", "jax"]),
            (["--recipe", "preset", "fp8"], ["xla", "xla fp8", "jax"]),
            (["--recipe=bf16"], ["xla bf16", "jax bf16"]),
            (["--implementation=auto"], ["auto", "jax"]),
            (["--implementation", "jax", "reference"], ["jax", "xla"]),
        ],
    )
    def test_compare_honours_its_options(
        self, options, expected, tiny, trained_once, capsys, tmp_path
    ):
        main(["--compare", *options, "--steps=4", "--seed=7", "--output", str(tmp_path)])
        runs = json.loads((tmp_path / "runs.json").read_text())
        assert [run["implementation"] for run in runs] == expected
        header, *rows = capsys.readouterr().out.partition("Comparison\n")[2].splitlines()
        assert "x stock" in header
        ratios = {run["implementation"]: row for run, row in zip(runs, rows, strict=False)}
        (stock,) = (row for name, row in ratios.items() if name.startswith("jax"))
        assert " 1.00 " in stock

    def test_bf16_is_bfloat16(self, tiny, trained_once, tmp_path):
        main(["--recipe", "preset", "bf16", "--steps=25", "--output", str(tmp_path)])
        float32, half = json.loads((tmp_path / "runs.json").read_text())
        assert (float32["implementation"], half["implementation"]) == ("auto", "auto bf16")
        assert 0 < abs(float32["curve"][0] - half["curve"][0]) < 0.1

    def test_output_that_cannot_be_written_ends_at_once(self, tiny, capsys, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(SystemExit):
            main(["--output", str(tmp_path / "file")])
        captured = capsys.readouterr()
        assert f"--output {tmp_path / 'file'}: cannot write there" in captured.err
        assert captured.out == ""

    def test_says_why_there_is_no_picture(self, tiny, trained_once, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        main(["--steps=25", "--output", str(tmp_path)])
        assert "needs Matplotlib" in capsys.readouterr().out
        assert [path.name for path in tmp_path.iterdir()] == ["runs.json"]

    def test_interrupt_keeps_the_curve(self, tiny, monkeypatch, capsys, tmp_path):
        """Ctrl-C in step 8 of the second of three runs keeps the losses of its first 7 steps."""
        drawn = []

        def batches(*args, **options):
            for index, batch in enumerate(data.batches(*args, **options)):
                drawn.append(index)
                if len(drawn) > 30 and index == 7:
                    signal.raise_signal(signal.SIGINT)
                yield batch

        monkeypatch.setattr("jax_grouped_gemm.demo.train.batches", batches)
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            main(["--recipe", "preset", "bf16", "fp8", "--output", str(tmp_path)])
        assert signal.getsignal(signal.SIGINT) is before
        whole, cut = json.loads((tmp_path / "runs.json").read_text())
        assert len(whole["curve"]) == TINY.steps and not whole["interrupted"]
        assert len(cut["curve"]) == 7 and cut["interrupted"]
        assert "interrupted after 7 steps" in capsys.readouterr().out

    def test_interrupt_between_runs_keeps_the_others(self, tiny, monkeypatch, tmp_path):
        from jax_grouped_gemm.demo import train as training

        evaluations = []

        def make_evaluation(*args):
            evaluations.append(args)
            if len(evaluations) == 2:
                raise KeyboardInterrupt
            return make(*args)

        make = training.make_evaluation
        monkeypatch.setattr(training, "make_evaluation", make_evaluation)
        with pytest.raises(KeyboardInterrupt):
            main(["--recipe", "preset", "bf16", "--steps=3", "--output", str(tmp_path)])
        (run,) = json.loads((tmp_path / "runs.json").read_text())
        assert len(run["curve"]) == 3

    def test_version(self, capsys):
        with pytest.raises(SystemExit) as exit:
            main(["--version"])
        assert exit.value.code == 0
        assert jgg.__version__ in capsys.readouterr().out

    def test_help_names_defaults(self, capsys):
        with pytest.raises(SystemExit):
            main(["--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert "``" not in out
        assert "100 for cpu, 400 for h200" in out and "default 0" in out

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


class TestDevices:
    def test_trains_as_one_device_does(self, tiny, trained_once, capsys, tmp_path):
        """Four devices that divide experts and tokens train with the losses of one device."""
        runs = []
        for devices in ("1", "4"):
            main(["--steps", "25", "--devices", devices, "--output", str(tmp_path / devices)])
            runs.append(json.loads((tmp_path / devices / "runs.json").read_text())[0])
        printed = capsys.readouterr().out
        assert "4 divide experts and tokens" in printed
        assert "4 experts on 4 devices" in printed
        one, many = runs
        np.testing.assert_allclose(many["curve"][:6], one["curve"][:6], rtol=2e-3)
        assert many["devices"] == 4 and many["largest_share"] >= 1

    def test_the_optimiser_quantises_divided_experts(self, tiny, tmp_path):
        main(["--steps", "3", "--recipe", "fp8", "fp8-layers", "--devices", "2"]
             + ["--output", str(tmp_path)])  # fmt: skip
        by_optimizer, by_layers = json.loads((tmp_path / "runs.json").read_text())
        np.testing.assert_allclose(by_optimizer["curve"], by_layers["curve"], rtol=2e-3)

    @pytest.mark.parametrize(
        ("devices", "reason"),
        [
            ("3", "must divide the 4 experts, got 3"),
            ("0", "0 is not positive"),
            ("99", "there are"),
        ],
    )
    def test_numbers_that_cannot_be(self, devices, reason, tiny, capsys):
        with pytest.raises(SystemExit):
            main(["--devices", devices])
        assert reason in capsys.readouterr().err
