"""The package reads in one direction: no module imports another that, even lazily or for its types alone, imports it.

Bug class: a circle that an import inside a function hides until both modules must change together. Every import
statement of a module counts, wherever it stands.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dspark_kernels

PACKAGE = Path(dspark_kernels.__file__).parent


def imports(source: str) -> set[str]:
    """Names of the package's own modules that a module imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def order(sources: dict[str, str]) -> list[str]:
    """The modules, each after those that it imports. Raises CycleError."""
    return list(
        TopologicalSorter({name: imports(text) & sources.keys() for name, text in sources.items()}).static_order()
    )


def sources() -> dict[str, str]:
    return {path.stem: path.read_text() for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def test_no_module_imports_one_that_imports_it():
    modules = order(sources())
    assert len(modules) > 20 and modules.index("types") < modules.index("accept_triton") < modules.index("accept")


def test_a_lazy_import_back_is_seen():
    planted = sources()
    planted["types"] += "\n\ndef late():\n    from .accept_triton import accept_triton\n    return accept_triton\n"
    with pytest.raises(CycleError):
        order(planted)
