"""Links of the pages lead somewhere, and their commands name modules and files that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import get_args

import pytest

from jax_grouped_gemm._src import plan
from jax_grouped_gemm._src.ragged.tiles import ALL_ROWS
from tests.docs.test_examples import ROOT, blocks

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "csrc", "examples")),
    ROOT / "benchmarks" / "results" / "README.md",
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings, as GitHub and MkDocs name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_modules_that_exist(page):
    # Search only code blocks, because code spans may have parts of commands.
    commands = "\n".join(block for _, block in blocks(page, "bash"))
    for name in re.findall(r"python -m (\w[\w.]*)", commands):
        assert importlib.util.find_spec(name) is not None, name


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_glossary_has_the_words_of_explain_and_is_short():
    _, *rows = re.findall(r"^\| (?!---)(.*) \|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    assert len(rows) <= 25
    defined = set(re.findall(r"`(\w+)`", " ".join(row.partition(" | ")[0] for row in rows)))
    kernels = plan.XLA, plan.COMPOSED, plan.NOTHING, ALL_ROWS
    assert defined >= {*get_args(plan.Schedule), *(kernel.name for kernel in kernels)}
