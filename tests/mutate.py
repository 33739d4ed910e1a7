"""Changes one line of an operation at a time, and counts the changes that its CPU tests notice.

    python -m tests.mutate rows muon --count 10 --seed 0

An operation is a folder of `jax_grouped_gemm/_src/`. A change is another operator, another constant
or the opposite condition, in a copy of the package. If no test notices a change, either a test is
missing, or the change makes no difference to what the package promises.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "jax_grouped_gemm"

# Patterns in `tests/`: of tests that all operations have in common, and of each operation's tests.
COMMON = ["api/test_errors.py", "api/test_refusals.py"]
TESTS = {
    "expert_parallel": ["*/test_expert_parallel*.py", "api/test_flax_expert_parallel.py"],
    "fp8": ["*/test_fp8*.py", "*/test_recipe*.py", "api/test_quantize.py", "*/test_scaled*.py",
            "api/test_quantized_fp8.py", "api/test_weight_formats.py",
            "transforms/test_partition.py"],
    "lists": ["*/test_grouped_gemm.py", "*/test_rank_k.py", "api/test_symm_product.py"],
    "mlp": ["*/test_mlp*.py", "api/test_ragged_mlp.py", "plans/test_few_rows.py",
            "*/test_decode.py", "*/test_fp8_mlp*.py", "plans/test_recipe_choice.py",
            "plans/test_packed.py"],
    "muon": ["api/test_orthogonalize.py", "api/test_optim.py", "*/test_muon*.py"],
    "optimizer": ["*/test_optimizer*.py"],
    "quantized": ["*/test_quantized_*.py", "api/test_checkpoints.py", "api/test_qwix.py",
                  "*/test_packed*.py", "api/test_weight_formats.py"],
    "ragged": ["api/test_semantics.py", "api/test_ragged*.py", "*/test_ragged_dot.py",
               "api/test_reference.py", "transforms/test_autodiff.py", "transforms/test_vmap.py",
               "*/test_stream_k.py", "plans/test_whole*.py", "plans/test_prediction.py",
               "plans/test_float32_tiles.py"],
    "rows": ["*/test_rows.py", "api/test_routing.py", "api/test_moe_rows.py", "api/test_moe.py"],
}  # fmt: skip

OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


CHECKS = "strict", "frozen", "total"  # keywords that make no difference to correct code


@dataclass(frozen=True)
class Change:
    """A change of a source: `new` replaces the bytes from `start` to `stop`."""

    line: int
    start: int
    stop: int
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def changes(source: bytes) -> list[Change]:
    """Returns all changes of a Python source. Each changes one thing."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def replace(node: ast.expr, new: str) -> Change:
        start = starts[node.lineno - 1] + node.col_offset
        return Change(node.lineno, start, starts[node.end_lineno - 1] + node.end_col_offset, new)

    return [replace(node, f"({new})") for node in _code(ast.parse(source)) for new in _others(node)]


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes to change: no annotations, no texts, and no keywords that check our code."""
    if isinstance(node, ast.keyword) and node.arg in CHECKS:
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _others(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            yield ast.unparse(ast.BinOp(left, OTHER[type(op)](), right))
        case ast.BoolOp(op, values):
            yield ast.unparse(ast.BoolOp(OTHER[type(op)](), values))
        case ast.Compare(left, [op], right):
            yield ast.unparse(ast.Compare(left, [OTHER[type(op)]()], right))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield ast.unparse(operand)
        case ast.Constant(bool(value)):
            yield repr(not value)
        case ast.Constant(int(value) | float(value)):
            yield repr(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.unparse(ast.IfExp(test, orelse, body))


def passes(tests: list[str], package: Path, timeout: float) -> bool:
    """Whether the tests pass with the package in the folder `package`. Hanging tests fail."""
    # With -P, Python does not search the current directory, the checkout, first. pytest appends the
    # checkout to the path (`--import-mode`), so `package` is found before it.
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "--seed=0", "-m", "not gpu"]
    environment = os.environ | {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"}
    try:
        result = subprocess.run(
            [*command, *tests], cwd=ROOT, env=environment, capture_output=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0


def drawn(operation: str, count: int, rng: random.Random) -> list[tuple[Path, Change]]:
    """Draws `count` changes of an operation, each in another line."""
    of_lines: dict[tuple[Path, int], list[Change]] = {}
    for path in sorted((ROOT / PACKAGE / "_src" / operation).rglob("*.py")):
        for change in changes(path.read_bytes()):
            of_lines.setdefault((path, change.line), []).append(change)
    lines = rng.sample(sorted(of_lines), min(count, len(of_lines)))
    return [(path, rng.choice(of_lines[path, line])) for path, line in lines]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", choices=[*TESTS, []], help="default: all")
    parser.add_argument("--count", type=int, default=10, help="changes of each operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one change")
    options = parser.parse_args(arguments)
    for operation in options.operations or TESTS:
        found = {
            str(path) for each in COMMON + TESTS[operation] for path in (ROOT / "tests").glob(each)
        }
        tests = sorted(path for path in found if Path(path).parent.name != "gpu")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(ROOT / PACKAGE, Path(folder, PACKAGE)))
            seen, rng = 0, random.Random(f"{options.seed} {operation}")
            every = drawn(operation, options.count, rng)
            if not passes(tests, copy.parent, options.timeout):
                sys.exit(f"{operation}: the tests fail without any change")
            for path, change in every:
                target = copy / path.relative_to(ROOT / PACKAGE)
                source = target.read_bytes()  # of the copy: the checkout may have changed
                target.write_bytes(change.apply(source))
                survives = passes(tests, copy.parent, options.timeout)
                target.write_bytes(source)
                seen += not survives
                old = source[change.start : change.stop].decode()
                what = f"{path.relative_to(ROOT)}:{change.line}: {old!r} -> {change.new!r}"
                print(f"{'NOT SEEN' if survives else 'seen'}  {what}", flush=True)
        print(f"{operation}: {seen} of {len(every)} changes are seen", flush=True)


if __name__ == "__main__":
    main()
