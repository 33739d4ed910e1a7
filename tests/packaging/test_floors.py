"""Each folder of the package imports only from lower floors, and nothing private of JAX."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jax_grouped_gemm"
FLOORS = (
    {"_src"},
    {"_src/note"},
    {"_src/quantized"},
    {"_src/ragged", "_src/rows", "_src/lists"},
    {"_src/fp8", "_src/muon"},
    {"_src/mlp", "checkpoint_policies"},
    {"_src/expert_parallel", "_src/optimizer"},
    {"adapters", "moe", "optim"},
    {"flax", ""},
    {"demo"},
    {"__main__"},
)
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(parts: tuple[str, ...]) -> str:
    """Returns the folder or public module of a module, "" for the package itself."""
    if parts[:1] == ("_src",):
        is_folder = len(parts) > 1 and (PACKAGE / "_src" / parts[1]).is_dir()
        return f"_src/{parts[1]}" if is_folder else "_src"
    return parts[0] if parts else ""


def parts_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the modules of the package that a module imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        package, *inner = node.module.split(".")
        if package == PACKAGE.name:
            for alias in node.names:
                whole = PACKAGE.joinpath(*inner, alias.name)
                is_module = whole.is_dir() or whole.with_suffix(".py").exists()
                yield (*inner, alias.name) if is_module else tuple(inner)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_from_below(path):
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    here = room(parts_of(path))
    for parts in imported(path):
        there = room(parts)
        assert there == here or floor[there] < floor[here], ".".join(parts)


def test_the_map_has_every_shared_file_and_folder():
    folder = PACKAGE / "_src"
    map_of = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    names = {path.stem for path in folder.iterdir() if path.stem.isidentifier()}
    missing = {name for name in names if not name.startswith("__") and f"`{name}`" not in map_of}
    assert not missing


PLANNING = {"choice", "device", "explain", "fallback", "fp64", "plan", "prediction", "problem"}
PLANNING |= {"schedule", "sizes", "split_in_kernel", "tile_choices", "tiles", "whole"}
"""Names of the modules that describe problems, choose kernels, predict times and explain plans."""
MOST_LINES_OF_PLANNING, MOST_OF_CODE = 5765, 3676


def lines_of_code(text: str) -> set[int]:
    """Returns the lines that are neither blank nor comments nor docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def test_planning_is_short():
    planning = [path.read_text() for path in MODULES if path.stem in PLANNING]
    assert sum(len(text.splitlines()) for text in planning) <= MOST_LINES_OF_PLANNING
    assert sum(len(lines_of_code(text)) for text in planning) <= MOST_OF_CODE


STAGES = {"Op": "primitive.py", "BilinearOp": "primitive.py", "ffi_call": "call.py"}
"""For each of these functions, the only file of an operation's folder that may call it."""
MOST_LINES = 400


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_stage_of_an_operation_has_its_file(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            assert path.name == STAGES.get(called, path.name), called


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_short(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


PRIVATE = {"lowering.py": "jax._src.dispatch", "autodiff.py": "jax._src.core"}
"""The private module that a file may import. After an `ImportError` the file takes a slower way."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_nothing_private_of_jax(path):
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    packages = ("jax", "jaxlib", "flax", "optax")
    private = [
        name
        for name in modules
        if name.split(".")[0] in packages and any(part.startswith("_") for part in name.split("."))
    ]
    allowed = PRIVATE.get(path.name)
    assert all(allowed and f"{name}.".startswith(f"{allowed}.") for name in private), private
