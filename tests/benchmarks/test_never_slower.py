"""The benchmark that looks for shapes where ours is slower."""

import json

import numpy as np

from benchmarks import never_slower
from benchmarks.harness.peer import Role


def record(op, ratios, roles):
    peers = {name: {"role": roles[name].value, "median_us": 1.0} for name in ratios}
    peers["ours"] = {"role": Role.OURS.value, "median_us": 2.0}
    return {"case": f"{op}/0/shape", "op": op, "ratios": ratios, "peers": peers}


def test_every_operation_has_a_case(tmp_path):
    output = tmp_path / "out.json"
    never_slower.main(["--dry-run", "--commit", "abc", "--output", str(output)])
    results = json.loads(output.read_text())
    assert results["not_measured"] == []
    assert [case["op"] for case in results["cases"]] == list(never_slower.OPS)
    assert set(results["summary"]) == set(never_slower.OPS)
    for case in results["cases"]:
        assert case["peers"]["ours"]["status"] == "measured"
        assert never_slower.worst_ratio(case) is not None
    updates = [case for case in results["cases"] if case["op"] in never_slower.UPDATES]
    assert all({"both triangles", "kernel"} <= set(case["ratios"]) for case in updates)


def test_variants_and_ceilings_do_not_count():
    roles = {"loop": Role.LOOP, "dense": Role.CEILING, "both": Role.VARIANT, "stock": Role.GROUPED}
    found = record("a", {"loop": 1.1, "dense": 0.5, "both": 0.6, "stock": 0.97}, roles)
    assert never_slower.worst_ratio(found) == (0.97, "stock")
    assert never_slower.worst_ratio(record("a", {"both": 0.6}, roles)) is None


def test_the_summary_counts_what_is_under_the_bar():
    ratios = [0.9, 0.98, 1.2, 0.979]
    records = [record("a", {"loop": ratio}, {"loop": Role.LOOP}) for ratio in ratios]
    summary = never_slower.summarize(records)
    assert summary == {"a": {"cases": 4, "under_0.98": 2, "worst": 0.9, "median": 0.98}}
    _, slow = never_slower.texts({"summary": summary, "cases": records})
    assert [line.split()[0] for line in slow.splitlines()] == ["0.90", "0.98"]


def test_shapes_are_of_all_kinds_and_within_limits(rng):
    shapes = [never_slower.ragged_shape(rng, "bfloat16") for _ in range(200)]
    for shape in shapes:
        assert shape.k % 8 == 0 == shape.n % 8
        assert 2 * shape.rows * shape.k * shape.n <= never_slower.MOST_FLOPS
    rows = np.array([shape.rows / shape.groups for shape in shapes])
    assert rows.min() <= 4 and rows.max() >= 256
    update = never_slower.UPDATES["syrk"]
    drawn = np.array([never_slower.update_shape(rng, update) for _ in range(200)])
    assert drawn[:, 2].min() < 64 and drawn[:, 2].max() > 2048 and drawn[:, 1].min() < 128
