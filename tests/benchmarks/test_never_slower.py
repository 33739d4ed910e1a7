"""The benchmark that looks for shapes where ours is slower."""

import json
import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from benchmarks.harness.cases import OPS, Case, Shape
from benchmarks.harness.peer import Call, NotOffered, Role
from benchmarks.never_slower import __main__ as command
from benchmarks.never_slower import cases, exact, programs, report, shapes

ROLES = {
    "ours": Role.OURS,
    "loop": Role.LOOP,
    "dense": Role.CEILING,
    "both": Role.VARIANT,
    "stock": Role.GROUPED,
    "A@A.T": Role.GROUPED,
}


def record(op, ratios, **more):
    peers = {
        name: {"role": ROLES[name].value, "status": "measured", "median_us": 1.0, "us": [1.0]}
        for name in ("ours", *ratios)
    }
    return {"case": f"{op}/0/shape", "op": op, "ratios": ratios, "peers": peers, **more}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of a tiny run in which another process compiles."""
    folder = tmp_path_factory.mktemp("never_slower")
    output, programs_folder = folder / "out.json", folder / "programs"
    options = ["--dry-run", "--commit", "abc", "--programs", str(programs_folder)]
    assert command.main([*options, "--compile-only"]) == {}
    command.main([*options, "--workers", "1", "--output", str(output)])
    return json.loads(output.read_text()), programs_folder


def test_every_operation_has_a_case(results):
    found, _ = results
    assert found["not_measured"] == []
    first = [case for case in found["cases"] if report.AGAIN not in case]
    assert [case["op"] for case in first] == list(shapes.OPS)
    assert set(found["summary"]) == set(shapes.OPS)
    for case in first:
        assert case["peers"]["ours"]["status"] == "measured"
        assert report.worst_ratio(case) is not None
        assert "compiled_here" not in case
    updates = [case for case in first if case["op"] in shapes.UPDATES]
    assert all({"both triangles", "symmetric"} <= set(case["ratios"]) for case in updates)
    # Every product either has a kernel that the plan leaves, or leaves XLA's.
    left = [{"kernel", "XLA"} & set(case["ratios"]) for case in first]
    assert {"kernel"} in left and {"XLA"} in left and {"kernel", "XLA"} not in left


def test_one_case_is_compiled_again(results):
    found, _ = results
    (again,) = [case for case in found["cases"] if report.AGAIN in case]
    assert again["case"] == f"{again[report.AGAIN]}/again"
    assert len(found["cases"]) == len(shapes.OPS) + 1
    assert "Compiled again" in report.texts(found)[-1]


def test_what_is_compiled_stays_and_is_not_compiled_again(results):
    _, folder = results
    store = programs.Store(folder)
    assert store.has("forward/0") and not store.claim("forward/0", "a")
    assert not store.has("forward/1")
    assert store.claim("forward/1", "run") and not store.claim("forward/1", "run")
    assert store.claim("forward/1", "next")
    assert store.load("forward/1") == {}


def test_programs_of_other_sources_are_not_taken(results, monkeypatch):
    _, folder = results
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert not programs.Store(folder).has("forward/0")


def compile_in(connection, op):
    found = cases.case(op, 0, seed=3, tiny=True)
    with jax.enable_x64(found.x64):
        connection.send([programs.compile_here(p, found.operands) for p in found.programs])


def test_a_loaded_program_computes_what_it_computes_here():
    found = cases.case("grouped_gemm_f64", 0, seed=3, tiny=True)
    there, here = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=compile_in, args=(here, "grouped_gemm_f64")
    )
    process.start()
    compiled = dict(zip([p.name for p in found.programs], there.recv(), strict=True))
    process.join()
    with jax.enable_x64(True):
        work = found.work()
        for program in found.programs:
            if compiled[program.name].not_offered:
                continue
            assert not compiled[program.name].failure
            loaded = programs.ProgramPeer(program, compiled[program.name])
            error, good = work.judge(loaded.prepare(work.problem, *work.operands))
            assert good and error.total < 1e-14


def test_what_did_not_compile_elsewhere_is_compiled_here():
    program = programs.Program("double", Role.GROUPED, lambda x: 2 * x)
    failed = programs.Compiled(failure="out of memory")
    call = programs.ProgramPeer(program, failed).prepare(None, jnp.arange(3))
    np.testing.assert_array_equal(call.run(), [0, 2, 4])
    refused = programs.ProgramPeer(program, programs.Compiled(not_offered="no"))
    with pytest.raises(NotOffered, match="no"):
        refused.prepare(None, jnp.arange(3))


def test_workers_that_take_too_long_are_ended():
    seconds = programs.run_workers(2, ["timeit", "-n1", "-r1", "import time; time.sleep(60)"], 0.5)
    assert seconds < 20


@pytest.mark.parametrize("op", shapes.OPS)
def test_a_wrong_element_is_noticed(op):
    """Of each operation, a result with one element missing, or NaN, is wrong."""
    found = cases.case(op, 0, seed=5, tiny=True)
    with jax.enable_x64(found.x64):
        work = found.work()
        right = jax.jit(found.programs[0].function)(*work.operands)
        leaves, tree = jax.tree.flatten(right)
        assert work.judge(Call(lambda: right))[1]
        for value in (0.0, np.nan):
            changed = np.array(leaves[-1])
            largest = np.unravel_index(np.argmax(np.abs(np.tril(changed))), changed.shape)
            changed[largest] = value
            wrong = jax.tree.unflatten(tree, [*leaves[:-1], jnp.asarray(changed)])
            assert not work.judge(Call(lambda wrong=wrong: wrong))[1]


@pytest.mark.parametrize("op", ["forward", "dgrad", "wgrad"])
def test_ragged_references_are_sums_over_the_rows_of_a_group(op, rng):
    case = Case(Shape("s", 3, 20, 8, 12), OPS[op], "zipf", "float32", 1)
    lhs, rhs = rng.standard_normal((20, 8 if op != "dgrad" else 12)), None
    rhs = rng.standard_normal((20, 12) if op == "wgrad" else (3, 8, 12))
    owner = np.repeat(np.arange(3), case.group_sizes)
    one_hot = np.eye(3)[owner]
    equation = {"forward": "mk,gkn,mg->mn", "dgrad": "mn,gkn,mg->mk", "wgrad": "mk,mn,mg->gkn"}[op]
    expected = np.einsum(equation, lhs, rhs, one_hot)
    found = exact.ragged_product(case.problem, lhs, rhs, case.group_sizes)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_error_of_the_worst_row_is_its_own(rng):
    expected = rng.standard_normal((50, 8))
    out = expected.copy()
    out[7] *= 1.5
    error = exact.row_errors(out, expected)
    assert error.worst_row == pytest.approx(0.5) and error.total < 0.25
    expected[3] = out[3] = 0
    assert exact.row_errors(out, expected).worst_row == pytest.approx(0.5)
    out[3, 0] = 1e-3
    assert exact.row_errors(out, expected).worst_row > 1e9


def test_variants_and_ceilings_do_not_count_and_loops_stand_beside():
    ratios = {"loop": 0.5, "dense": 0.4, "both": 0.3, "stock": 0.97}
    found = record("forward", ratios)
    assert report.worst_ratio(found) == (0.97, "stock")
    assert report.worst_ratio(found, report.stands_beside) == (0.5, "loop")
    assert report.worst_ratio(record("forward", {"both": 0.6})) is None
    # The sizes of a list are known when its loop is compiled.
    assert report.worst_ratio(record("grouped_gemm", ratios)) == (0.5, "loop")
    syrk = record("syrk", {"A@A.T": 0.6, "stock": 1.1})
    assert report.worst_ratio(syrk) == (1.1, "stock")
    assert report.worst_ratio(syrk, report.stands_beside) == (0.6, "A@A.T")


def test_the_summary_counts_what_is_under_the_bar():
    ratios = [0.9, 0.98, 1.2, 0.979]
    records = [record("forward", {"stock": ratio, "loop": 0.5}) for ratio in ratios]
    repeated = record("forward", {"stock": 0.1}, again="forward/0/shape")
    summary = report.summarize([*records, repeated])
    assert summary["forward"] == {
        "measured": 4, "cases": 4, "under_0.98": 2, "worst": 0.9, "median": 0.98,
        "beside_cases": 4, "beside_under_0.98": 4, "beside_worst": 0.5, "beside_median": 0.5,
    }  # fmt: skip
    _, slow, beside, faster, *_ = report.texts({"summary": summary, "cases": records})
    assert [line.split()[0] for line in slow.splitlines()[1:]] == ["0.90", "0.98"]
    assert beside.startswith("Under it beside those that do not count: 4")
    assert faster == ""
    kernel = report.texts({"summary": summary, "cases": [record("forward", {"both": 0.9})]})[3]
    assert "0.90 forward/0/shape 1.0 us, both 1.0" in kernel


def test_only_slow_cases_keep_their_rounds():
    skipped = {"role": "variant", "status": "skipped"}
    for ratio, kept in ((0.9, True), (1.1, False)):
        full = record("forward", {"stock": ratio})
        full["peers"]["config1"] = skipped
        found = report.short(full)
        assert set(found["peers"]) == {"ours", "stock"}
        assert ("us" in found["peers"]["ours"]) == kept
        assert found["peers"]["ours"]["median_us"] == 1.0


def test_half_of_what_is_measured_again_is_the_slowest():
    records = [
        record("forward", {"stock": ratio}) | {"case": f"forward/{i}/x"}
        for i, ratio in enumerate([1.5, 0.7, 1.1, 0.9, 2.0, 3.0])
    ]
    chosen = command.chosen_again(records, 4, seed=0)
    assert [each["case"] for each in chosen[:2]] == ["forward/1/x", "forward/3/x"]
    assert len({each["case"] for each in chosen}) == 4


def test_other_kernels_of_a_repeated_case_are_told():
    first = record("forward", {"stock": 0.9})
    repeated = record("forward", {"stock": 1.2}, again=first["case"]) | {"case": "again"}
    found = {"summary": report.summarize([first]), "cases": [first, repeated]}
    assert report.texts(found)[-1].splitlines()[1:] == ["forward/0/shape stock: 0.90 1.20"]
    for each, kernels in ((first, ["a"]), (repeated, ["b"])):
        each["peers"]["ours"]["kernel_names"] = ["ours"]
        each["peers"]["stock"]["kernel_names"] = kernels
    assert report.texts(found)[-1].endswith("0.90 1.20, other kernels: stock")


def test_stock_takes_part_where_it_has_little_to_multiply():
    few = Case(Shape("a", 2, 2048, 1024, 1024), OPS["forward"], "uniform").problem
    many = Case(Shape("b", 64, 4096, 1024, 1024), OPS["forward"], "uniform").problem
    small = Case(Shape("c", 64, 64, 256, 256), OPS["forward"], "uniform").problem
    assert cases.offers_stock(few) and cases.offers_stock(small) and not cases.offers_stock(many)


def test_shapes_are_of_all_kinds_and_within_limits(rng):
    drawn = [shapes.ragged_shape(rng, "bfloat16") for _ in range(200)]
    for shape in drawn:
        assert shape.k % 8 == 0 == shape.n % 8
        assert 2 * shape.rows * shape.k * shape.n <= shapes.MOST_FLOPS
    rows = np.array([shape.rows / shape.groups for shape in drawn])
    assert rows.min() <= 4 and rows.max() >= 256
    update = shapes.UPDATES["syrk"]
    sizes = np.array([shapes.update_shape(rng, update) for _ in range(200)])
    assert sizes[:, 2].min() < 64 and sizes[:, 2].max() > 2048 and sizes[:, 1].min() < 128


@pytest.mark.plans_as_users_get_them
def test_what_is_left_to_xla_is_another_program(extension):
    """JAX keeps what it has lowered, but not for another policy."""
    shapes = (128, 256), (64, 256, 96)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    operands.append(jax.ShapeDtypeStruct((64,), jnp.int32))

    def product(*operands):
        return jgg.ragged_dot(*operands)

    def kernels(function):
        traced = jax.jit(function).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("ragged_noncontracting")

    assert kernels(product) > 0
    left, reason = programs._left_to_xla(product, *operands)
    assert kernels(left) == 0 and "XLA" in reason
