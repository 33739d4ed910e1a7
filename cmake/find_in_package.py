"""Prints the path of a file or directory inside an installed Python package.

Usage: find_in_package.py PACKAGE RELATIVE_PATH

The package is located but not imported: its own dependencies may be missing.
"""

import importlib.util
import sys
from pathlib import Path


def find(package: str, relative_path: str) -> Path:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # a parent of a dotted name is missing
        spec = None
    # A namespace package may be spread over several directories.
    for directory in spec.submodule_search_locations if spec else ():
        path = Path(directory, relative_path)
        if path.exists():
            return path
    sys.exit(
        f"{relative_path} was not found in the Python package {package!r}. "
        "It comes with the dependency group `build` of pyproject.toml: "
        "install them, or build with pip's build isolation."
    )


if __name__ == "__main__":
    print(find(*sys.argv[1:]))
