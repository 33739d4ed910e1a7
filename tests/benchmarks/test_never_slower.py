"""Tests of the benchmark that looks for shapes for which our functions are slower."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from benchmarks.harness import exact
from benchmarks.harness.cases import OPS, Case, Shape
from benchmarks.harness.peer import Call, NotOffered, Role
from benchmarks.never_slower import __main__ as command
from benchmarks.never_slower import cases, programs, report, shapes

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


def test_every_operation_has_a_case(tmp_path):
    output = tmp_path / "out.json"
    options = ["--dry-run", "--commit", "abc", "--workers", "2", "--output", str(output)]
    command.COMMAND.main(options)
    found = json.loads(output.read_text())
    assert found["not_measured"] == []
    assert [case["op"] for case in found["cases"]] == list(shapes.OPS)
    assert set(found["summary"]) == set(shapes.OPS)
    for case in found["cases"]:
        assert case["peers"]["ours"]["status"] == "measured"
        assert report.worst_ratio(case) is not None
    # If the plan takes XLA, our kernel is measured too, and if it takes our kernel, XLA's product.
    left = [{"kernel", "XLA"} & set(case["ratios"]) for case in found["cases"]]
    assert {"kernel"} in left and {"XLA"} in left and {"kernel", "XLA"} not in left


def test_a_program_that_is_not_offered_or_fails_says_so_when_it_is_prepared():
    def refused(x):
        raise NotOffered("no")

    peer = programs.ProgramPeer(programs.Program("double", Role.GROUPED, lambda x: 2 * x), [1])
    np.testing.assert_array_equal(peer.prepare(None, 3).run(), 6)
    peer = programs.ProgramPeer(programs.Program("none", Role.GROUPED, refused), [1])
    with pytest.raises(NotOffered, match="no"):
        peer.prepare(None, 3)


@pytest.mark.parametrize("op", shapes.OPS)
def test_a_wrong_element_is_noticed(op):
    """A result with one element missing or NaN is wrong for every operation."""
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
    # A loop over a list counts, because the sizes of a list are known when it is compiled.
    assert report.worst_ratio(record("grouped_gemm", ratios)) == (0.5, "loop")
    syrk = record("syrk", {"A@A.T": 0.6, "stock": 1.1})
    assert report.worst_ratio(syrk) == (1.1, "stock")
    assert report.worst_ratio(syrk, report.stands_beside) == (0.6, "A@A.T")


def test_the_summary_counts_what_is_under_the_bar():
    ratios = [0.9, 0.98, 1.2, 0.979]
    records = [record("forward", {"stock": ratio, "loop": 0.5}) for ratio in ratios]
    summary = report.summarize(records)
    assert summary["forward"] == {
        "measured": 4, "cases": 4, "under_0.98": 2, "worst": 0.9, "median": 0.98,
        "beside_cases": 4, "beside_under_0.98": 4, "beside_worst": 0.5, "beside_median": 0.5,
    }  # fmt: skip
    _, slow, beside, wrong = report.texts({"summary": summary, "cases": records})
    assert [line.split()[0] for line in slow.splitlines()[1:]] == ["0.90", "0.98"]
    assert beside.startswith("Under it, next to peers that do not count: 4")
    assert wrong == ""


def test_only_slow_cases_keep_their_rounds():
    skipped = {"role": "variant", "status": "skipped"}
    for ratio, kept in ((0.9, True), (1.1, False)):
        full = record("forward", {"stock": ratio})
        full["peers"]["config1"] = skipped
        found = report.short(full)
        assert set(found["peers"]) == {"ours", "stock"}
        assert ("us" in found["peers"]["ours"]) == kept
        assert found["peers"]["ours"]["median_us"] == 1.0


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
    g, n, k = np.array([shapes.stack_of_hundreds(rng) for _ in range(200)]).T
    assert 128 <= g.min() < 200 and g.max() > 500 and 512 <= n.min() and n.max() <= 1024
    assert (2 * g * n * n * k).max() > shapes.MOST_FLOPS


@pytest.mark.plans_as_users_get_them
def test_what_is_left_to_xla_is_another_program(extension):
    """JAX caches what it has lowered, but lowers a function again under another policy."""
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
