"""`tests/mutate.py` knows all operations, and its changes are Python that differs."""

from __future__ import annotations

import ast
import random

import pytest

from tests import mutate

SOURCE = b'''"""Text of 1."""
def rows(a: int = 2, *, b=True):
    if not a < 3 and b:
        raise ValueError(f"of {a + 1} rows")
    return -a * (a - 1) if a == 4 else a // 5.5
'''


def test_each_operation_has_tests():
    folders = (mutate.ROOT / mutate.PACKAGE / "_src").glob("*/__init__.py")
    operations = {path.parent.name for path in folders} - {"note"}  # which computes nothing
    assert operations == set(mutate.TESTS)
    for patterns in (mutate.COMMON, *mutate.TESTS.values()):
        assert all(list((mutate.ROOT / "tests").glob(pattern)) for pattern in patterns)


def test_changes_of_operators_constants_and_conditions():
    found = mutate.changes(SOURCE)
    assert {change.line for change in found} == {2, 3, 5}  # not texts and annotations
    tree = ast.dump(ast.parse(SOURCE))
    assert all(ast.dump(ast.parse(change.apply(SOURCE))) != tree for change in found)
    new = {change.new for change in found}
    assert {"(3)", "(False)", "(a <= 3)", "(a < 3)", "(not a < 3 or b)", "(a != 4)"} <= new
    assert {"(-a + (a - 1))", "(a + 1)", "(a * 5.5)", "(6.5)"} <= new


@pytest.mark.parametrize("operation", mutate.TESTS)
def test_a_seed_repeats_them(operation):
    one, other = (mutate.drawn(operation, 8, random.Random(3)) for _ in range(2))
    assert one == other and len({(path, change.line) for path, change in one}) == 8
    for path, change in one:
        ast.parse(change.apply(path.read_bytes()))


def test_a_change_is_seen(tmp_path, monkeypatch):
    """A test imports the package from the given folder, and fails if the package is changed."""
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import somewhere\ndef test():\n    assert somewhere.number() == 3\n"
    )
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--seed')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: none\n")
    for number, expected in ((3, True), (4, False)):
        package = tmp_path / f"of_{number}"
        package.mkdir()
        (package / "somewhere.py").write_text(f"def number(): return {number}\n")
        assert mutate.passes(["test_it.py"], package, timeout=60) == expected
