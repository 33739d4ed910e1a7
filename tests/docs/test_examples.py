"""Runs the Python examples of README and docs unchanged, one after the other on each page."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from jax_grouped_gemm._src.op import ops

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Returns the code blocks in a language, each with the line number of its opening fence."""
    text = page.read_text()
    return [
        (text.count("\n", 0, block.start()) + 1, block[2])
        for block in BLOCK.finditer(text)
        if block[1] == language
    ]


def pages(language: str) -> list[Path]:
    found = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in found if blocks(page, language)]


@pytest.mark.parametrize("page", pages("python"), ids=lambda page: str(page.relative_to(ROOT)))
def test_python(page, monkeypatch, capsys):
    # A page may change how much is logged.
    logger = logging.getLogger("jax_grouped_gemm")
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))
    # A page may also define an operation.
    known = dict(ops)
    namespace = {"__name__": "example"}
    for line, block in blocks(page, "python"):
        # Compile with the page's own line numbers, so that tracebacks show them.
        code = compile("\n" * line + block, str(page), "exec", dont_inherit=True)
        exec(code, namespace)
    for primitive in ops.keys() - known.keys():
        del ops[primitive]
    if page == ROOT / "README.md":
        # The first example prints the explanation of its gradients.
        assert abs(namespace["dw"]).sum() > 0
        printed = capsys.readouterr().out
        assert "ragged_noncontracting" in printed and "ragged_contracting" in printed
