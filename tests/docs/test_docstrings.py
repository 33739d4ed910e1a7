"""Docstrings describe the parameters that functions have, and no others."""

from __future__ import annotations

import inspect
import re
import types

import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe, optim
from tests.docs.test_examples import ROOT


def public() -> dict[str, object]:
    """Returns the public functions and classes by name."""
    found = {f"jgg.{name}": getattr(jgg, name) for name in jgg.__all__}
    for module in (moe, optim):
        found |= {f"{module.__name__}.{n}": x for n, x in vars(module).items() if n[0] != "_"}
    try:
        from jax_grouped_gemm.flax import linen, nnx
    except ImportError:
        pass
    else:
        found |= {"linen.MoE": linen.MoE, "nnx.MoE": nnx.MoE}
    return {
        name: x
        for name, x in found.items()
        if callable(x) and getattr(x, "__module__", "").startswith("jax_grouped_gemm")
    }


def documented(docstring: str) -> list[str]:
    """Returns the names that the Args of a docstring describe."""
    section = re.search(r"^( *)Args:\n(.*?)(?=^\1\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    if not section:
        return []
    entries = re.findall(
        rf"^{section[1]}  ([\w*][\w*, \n]*?):(?=\s)", section[2], flags=re.MULTILINE
    )
    return [name.strip() for entry in entries for name in entry.split(",")]


def test_every_public_name_has_a_place_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: jax_grouped_gemm\.(\S+)$", pages, re.MULTILINE))
    names = {n for n in jgg.__all__ if not isinstance(getattr(jgg, n), types.ModuleType)}
    for name, module in (("moe", moe),):
        own = {
            n for n, x in vars(module).items() if getattr(x, "__module__", "").startswith("jax_")
        }
        names |= {
            f"{name}.{n}" for n in own if n[0] != "_" and f"{n} as {n}" in inspect.getsource(module)
        }
    assert names - shown == {"__version__"}


DESCRIBED = {name: x for name, x in public().items() if documented(inspect.getdoc(x) or "")}


def test_no_docstring_names_a_private_module():
    for name, subject in public().items():
        members = vars(subject).items() if isinstance(subject, type) else ()
        for member, x in (("", subject), *((n, x) for n, x in members if n[0] != "_")):
            assert "_src" not in (inspect.getdoc(x) or ""), (name, member)


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_parameters(name):
    subject = DESCRIBED[name]
    names = documented(inspect.getdoc(subject))
    # Flax's metaclass hides the signature of a module.
    own = vars(subject).get("__init__") if isinstance(subject, type) else None
    parameters = inspect.signature(own or subject).parameters.values()
    kinds = {p.name: p.kind for p in parameters if p.name not in ("self", "parent", "name")}
    has_options = inspect.Parameter.VAR_KEYWORD in kinds.values()
    bare = [each.lstrip("*") for each in names]
    assert len(set(bare)) == len(bare)
    # A docstring may also describe options that the function passes on to another function.
    assert has_options or set(bare) <= set(kinds)
    options = {n for n, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD}
    assert set(kinds) - options <= set(bare)
