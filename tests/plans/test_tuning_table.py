"""Tuned configurations: how plans look them up, and the file that keeps them."""

import importlib.machinery
import importlib.util
import json
import logging
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.tuning import table as tuning_table
from jax_grouped_gemm._src.tuning.table import Build, Tuned, TuningFile, problem_key
from tests.support.tiles import NOT_COMPILED, A, B, C, add_tiles

M, K, N, G = 264, 128, 192, 4

LHS = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
RHS = jax.ShapeDtypeStruct((G, K, N), jnp.bfloat16)
SIZES = jax.ShapeDtypeStruct((G,), jnp.int32)


@pytest.fixture(autouse=True)
def more_tiles(monkeypatch):
    add_tiles(monkeypatch)


def loss(lhs, rhs, sizes):
    return jnp.sum(jgg.ragged_dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)


def keys(function, *arguments) -> list[str]:
    plans = jgg.explain(function, *arguments).plans
    return [problem_key(plan.kernel_problem, plan.terms) for plan in plans]


def table_for(tile, function, *arguments) -> jgg.TuningTable:
    return jgg.TuningTable({key: Tuned(tile, {}) for key in keys(function, *arguments)})


def chosen(function, *arguments) -> list[tuple[jgg.TileConfig, str]]:
    return [(p.tile, p.chosen_by) for p in jgg.explain(function, *arguments).plans]


class TestKey:
    def test_lists_all_that_a_plan_depends_on(self):
        (key,) = keys(jgg.ragged_dot, LHS, RHS, SIZES)
        words = "ragged_noncontracting lhs=mk rhs=gkn lhs_dtype=bfloat16 m=264 k=128 n=192 g=4"
        assert set(words.split()) <= set(key.replace("op=", "").split())
        assert "\n" not in key

    def test_of_different_problems_differ(self):
        def of(function=jgg.ragged_dot, lhs=LHS, rhs=RHS, sizes=SIZES):
            return keys(function, lhs, rhs, sizes)

        square = RHS.update(shape=(G, K, K))
        batched = [x.update(shape=(2, *x.shape)) for x in (LHS, RHS, SIZES)]
        f32 = [x.update(dtype=jnp.float32) for x in (LHS, RHS)]
        found = [
            of(),
            of(lhs=LHS.update(shape=(M + 1, K))),
            of(rhs=square),
            of(partial(jgg.ragged_dot, transpose_rhs=True), rhs=square),
            of(rhs=RHS.update(shape=(2 * G, K, N)), sizes=SIZES.update(shape=(2 * G,))),
            of(partial(jgg.ragged_dot, group_offset=1), sizes=SIZES.update(shape=(2 * G,))),
            of(partial(jgg.ragged_dot, preferred_element_type=jnp.float32)),
            of(lhs=LHS.update(dtype=jnp.float16), rhs=RHS.update(dtype=jnp.float16)),
            of(jgg.ragged_dot, *f32),
            of(partial(jgg.ragged_dot, precision="highest"), *f32),
            of(jax.vmap(jgg.ragged_dot), *batched),
            of(jax.vmap(jgg.ragged_dot, (0, None, 0)), batched[0], RHS, batched[2]),
        ]
        assert len({tuple(key) for key in found}) == len(found)

    def test_is_that_of_what_the_kernel_gets(self):
        """Products that are padded to the same problem share what was measured."""
        padded = LHS.update(shape=(M, K - 1)), RHS.update(shape=(G, K - 1, N))
        assert keys(jgg.ragged_dot, *padded, SIZES) == keys(jgg.ragged_dot, LHS, RHS, SIZES)


class TestPlan:
    def test_takes_what_the_table_has(self):
        table = table_for(A, jgg.ragged_dot, LHS, RHS, SIZES)
        with jgg.use_tiles(table):
            explanation = jgg.explain(jgg.ragged_dot, LHS, RHS, SIZES)
            assert [p.tile for p in explanation.plans] == [A]
            assert f"{A} (from the tuning table)" in str(explanation)
            ((_, chosen_by),) = chosen(jgg.ragged_dot, LHS.update(shape=(M + 8, K)), RHS, SIZES)
            assert chosen_by == "default"
        ((_, chosen_by),) = chosen(jgg.ragged_dot, LHS, RHS, SIZES)
        assert chosen_by == "default"

    def test_takes_it_for_gradients_of_any_order(self):
        def second(lhs, rhs, sizes):
            return sum(map(jnp.sum, jax.grad(loss, (0, 1))(lhs, rhs, sizes)))

        function = jax.grad(second, (0, 1))
        table = table_for(B, function, LHS, RHS, SIZES)

        def inside(*arguments):
            with jgg.use_tiles(table):
                return jgg.ragged_dot(*arguments)

        with jgg.use_tiles(table):
            assert set(chosen(function, LHS, RHS, SIZES)) == {(B, "table")}
        # Computed outside of the context that the forward pass is in.
        pulled_back = jax.grad(lambda *x: jnp.sum(inside(*x).astype(jnp.float32) ** 2), (0, 1))
        assert chosen(pulled_back, LHS, RHS, SIZES) == [(B, "table")] * 3

    def test_looks_up_the_problem_after_vmap(self):
        mapped = jax.vmap(jgg.ragged_dot)
        arguments = [x.update(shape=(2, *x.shape)) for x in (LHS, RHS, SIZES)]
        with jgg.use_tiles(table_for(A, mapped, *arguments)):
            assert chosen(mapped, *arguments) == [(A, "table")]
        with jgg.use_tiles(table_for(A, jgg.ragged_dot, LHS, RHS, SIZES)):
            assert chosen(mapped, *arguments)[0][1] == "default"

    def test_prefers_a_tile_that_was_given(self):
        table = table_for(A, jax.grad(loss, (0, 1)), LHS, RHS, SIZES)
        for outer, inner in (
            (jgg.use_tiles(table), jgg.use_tiles(forward=B)),
            (jgg.use_tiles(forward=B), jgg.use_tiles(table)),
        ):
            with outer, inner:
                found = chosen(jax.grad(loss, (0, 1)), LHS, RHS, SIZES)
            assert sorted(by for _, by in found) == ["override", "table", "table"]
            assert (B, "override") in found

    def test_of_jitted_function_follows_the_table(self):
        function = jax.jit(jgg.ragged_dot)
        for tile in (A, B, A):
            with jgg.use_tiles(table_for(tile, jgg.ragged_dot, LHS, RHS, SIZES)):
                assert chosen(function, LHS, RHS, SIZES) == [(tile, "table")]

    def test_of_scaled_products(self):
        function = jax.grad(
            lambda *x: jnp.sum(jgg.fp8_ragged_dot(*x).astype(jnp.float32) ** 2), (0, 1)
        )
        with jgg.use_tiles(table_for(C, function, LHS, RHS, SIZES)):
            assert chosen(function, LHS, RHS, SIZES) == [(C, "table")] * 3

    def test_refuses_what_is_not_compiled(self):
        with (
            jgg.use_tiles(table_for(NOT_COMPILED, jgg.ragged_dot, LHS, RHS, SIZES)),
            pytest.raises(ValueError, match="tuning table has the tile 96x96.*192x96"),
        ):
            jgg.explain(jgg.ragged_dot, LHS, RHS, SIZES)


class TestTable:
    def test_equality_is_that_of_tiles(self):
        """A table is part of the key of JAX's caches: times must not make it another."""
        table = jgg.TuningTable({"p": Tuned(A, {"t": 1.0}), "q": Tuned(B, {})})
        same = jgg.TuningTable({"q": Tuned(B, {"t": 3.0}), "p": Tuned(A, {"t": 2.0})})
        other = jgg.TuningTable({"p": Tuned(B, {"t": 1.0}), "q": Tuned(B, {})})
        assert table == same and hash(table) == hash(same)
        assert table != other and table != "p"

    def test_is_immutable(self):
        entries = {"p": Tuned(A, {})}
        table = jgg.TuningTable(entries)
        entries["q"] = Tuned(B, {})
        assert set(table.entries) == {"p"}
        with pytest.raises(TypeError):
            table.entries["q"] = Tuned(B, {})

    def test_is_readable(self):
        text = str(jgg.TuningTable({"the problem": Tuned(A, {str(A): 12.34, str(B): 5.0})}))
        assert "the problem" in text and f"12.3 us {A}" in text


HERE = Build.of("cpu")
ENTRIES = {"p": Tuned(A, {str(A): 1.5}), "q": Tuned(B, {})}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sub" / "tuning.json"


class TestFile:
    def test_round_trip(self, path):
        TuningFile(path).add(HERE, ENTRIES)
        assert jgg.load_tuning(path).entries == ENTRIES
        assert jgg.load_tuning(str(path), "cpu") == jgg.TuningTable(ENTRIES)

    def test_is_readable(self, path):
        TuningFile(path).add(HERE, ENTRIES)
        content = json.loads(path.read_text())
        (section,) = content["builds"]
        assert section["device"] == "cpu" and section["version"] == jgg.__version__
        assert section["problems"]["p"] == {
            "tile": {"tile_m": 192, "tile_n": 96, "cluster": 1} | section["problems"]["p"]["tile"],
            "microseconds": {str(A): 1.5},
        }
        assert len(path.read_text().splitlines()) > 10

    def test_adding_keeps_the_rest(self, path):
        other = Build("NVIDIA H100", "9.9", "abc")
        file = TuningFile(path)
        for build, entries in ((other, ENTRIES), (HERE, ENTRIES), (HERE, {"q": Tuned(C, {})})):
            file.add(build, entries)
        assert file.entries(file.read(), other) == ENTRIES
        assert file.entries(file.read(), HERE) == ENTRIES | {"q": Tuned(C, {})}
        assert [p.name for p in path.parent.iterdir() if "tmp" in p.name] == []

    @pytest.mark.parametrize("field", ["device", "version", "extension"])
    def test_of_another_build_is_not_used(self, field, path, caplog):
        other = Build(**{**vars(HERE), field: "other"})
        TuningFile(path).add(other, ENTRIES)
        with caplog.at_level(logging.WARNING, "jax_grouped_gemm"):
            assert jgg.load_tuning(path) == jgg.TuningTable({})
        assert "other" in caplog.text and str(HERE) in caplog.text

    def test_of_another_extension_is_another_build(self, tmp_path, monkeypatch):
        def digest():
            return tuning_table._extension_digest.__wrapped__()

        found = set()
        for name, content in (("a.so", b"1"), ("b.so", b"1"), ("c.so", b"2")):
            (tmp_path / name).write_bytes(content)
            spec = importlib.machinery.ModuleSpec("x", None, origin=str(tmp_path / name))
            monkeypatch.setattr(importlib.util, "find_spec", lambda _, spec=spec: spec)
            found.add(digest())
        assert len(found) == 2
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        assert digest() == "none"

    def test_sections_of_other_builds_may_have_other_configurations(self, path):
        """Such as those of a later version, with options that this one does not know."""
        TuningFile(path).add(HERE, ENTRIES)
        content = json.loads(path.read_text())
        tile = {"tile_m": 64, "shape": "round"}
        problems = {"p": {"tile": tile, "microseconds": {}}}
        content["builds"].append({**vars(HERE), "version": "9.9", "problems": problems})
        path.write_text(json.dumps(content))
        TuningFile(path).add(HERE, {"r": Tuned(C, {})})
        assert jgg.load_tuning(path).entries == ENTRIES | {"r": Tuned(C, {})}
        assert json.loads(path.read_text())["builds"][1]["problems"] == problems

    def test_missing(self, path):
        with pytest.raises(FileNotFoundError):
            jgg.load_tuning(path)
        assert TuningFile(path).read_if_exists(HERE) == {}

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: "",
            lambda text: text[: len(text) // 2],
            lambda text: "[1, 2]",
            lambda text: '{"format": 1}',
            lambda text: text.replace("tile_m", "tile_x"),
            lambda text: text.replace("problems", "solutions"),
            lambda text: text.replace("microseconds", "hours"),
        ],
    )
    def test_damaged(self, damage, path):
        TuningFile(path).add(HERE, ENTRIES)
        damaged = damage(path.read_text())
        path.write_text(damaged)
        with pytest.raises(ValueError, match="tuning.json is not a tuning file, or it is damaged"):
            jgg.load_tuning(path)
        assert path.read_text() == damaged

    def test_of_another_format(self, path):
        TuningFile(path).add(HERE, ENTRIES)
        path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
        with pytest.raises(ValueError, match="format 2.*knows format 1"):
            jgg.load_tuning(path)

    def test_processes_that_add_at_the_same_time_lose_nothing(self, path):
        program = """if True:
            import sys
            from jax_grouped_gemm import TileConfig
            from jax_grouped_gemm._src.tuning.table import Build, Tuned, TuningFile
            file = TuningFile(sys.argv[1])
            build = Build(sys.argv[2], "1", "x")
            print("ready", flush=True)
            sys.stdin.readline()
            for i in range(40):
                file.add(build, {f"{sys.argv[3]}.{i}": Tuned(TileConfig(i + 1, 1, 1), {})})
        """
        devices = ("one", "one", "two")
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, path, device, str(i)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i, device in enumerate(devices)
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.wait(60) for process in processes] == [0, 0, 0]
        file = TuningFile(path)
        for device in ("one", "two"):
            names = [i for i, d in enumerate(devices) if d == device]
            assert file.entries(file.read(), Build(device, "1", "x")) == {
                f"{name}.{i}": Tuned(jgg.TileConfig(i + 1, 1, 1), {})
                for name in names
                for i in range(40)
            }
