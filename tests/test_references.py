"""Every file and module that a docstring, a comment or a page names is in the repository.

Bug class: a sentence that sends its reader to a file that was renamed, moved, or never here. A name with a folder is
looked up from the root, or beside the page that names it, with or without its ending; a bare name must be that of some
file of ours.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = {"sglang_dspark": ROOT, "dspark_scheduler": ROOT / "scheduler", "dspark_kernels": ROOT / "kernels"}
FOLDERS = "docs|tests|benchmarks|deploy|examples|scheduler|kernels|sglang_dspark|dspark_scheduler|dspark_kernels"
NAMED = re.compile(rf"(?<![\w/.:-])((?:\.\./)+[\w/.-]+|(?:\./)?(?:{FOLDERS})/[\w/.-]+|[\w-]+\.(?:md|py))(?![\w/*{{<])")
MODULES = re.compile(rf"(?<![\w/.])((?:{'|'.join(HOMES)})(?:\.\w+)+)")
SGLANGS = {"scheduler.py", "server_args.py"}  # files of SGLang, which pages may speak of
MADE = {"receipt.md", "setup.py"}  # what a command writes
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.splitlines()
NAMES = {path.rpartition("/")[2] for path in TRACKED}
PAGES = [path for path in TRACKED if path.endswith(".md") and not path.startswith("benchmarks/results/receipt")]
SOURCES = [path for path in TRACKED if path.endswith(".py")]


def prose(path: Path) -> str:
    """What a person reads in a file: a page whole, a module's docstrings and comments."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, holders)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*found, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def missing(path: Path, text: str) -> list[str]:
    """Files and modules that `text`, the prose of `path`, names and nobody has."""
    files = [name.rstrip("./") for name in NAMED.findall(text)]
    gone = [name for name in files if not (is_there(name, path) or name in SGLANGS | MADE)]
    return gone + [name for name in MODULES.findall(text) if not is_module(name)]


def is_there(name: str, page: Path) -> bool:
    if "/" not in name:
        return name in NAMES
    package, _, rest = name.removeprefix("./").partition("/")
    places = [HOMES.get(package, ROOT) / package / rest, page.parent / name, ROOT / name]
    inside = [place for place in places if place.resolve().is_relative_to(ROOT)]
    return any(place.exists() or any(place.parent.glob(f"{place.name}.*")) for place in inside)


def is_module(name: str) -> bool:
    """Whether a dotted name is a package or module of ours, or something that one defines."""
    package, *parts = name.split(".")
    place = HOMES[package] / package
    for part in parts:
        if (place / part).is_dir() or (place / f"{part}.py").is_file():
            place = place / part if (place / part).is_dir() else place / f"{part}.py"
            continue
        source = (place / "__init__.py" if place.is_dir() else place).read_text()
        return re.search(rf"\b{part}\b", source) is not None
    return True


@pytest.mark.parametrize("path", PAGES + SOURCES)
def test_what_a_file_names_is_there(path):
    assert missing(ROOT / path, prose(ROOT / path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "Source: no_such_page.md section 2.",
        "see ../shared/style.md",
        "run docs/nothing.md",
        "read `sglang_dspark/engine/gone.py`",
        "`sglang_dspark.no_such_room` holds it",
        "`dspark_kernels.accept.no_such_rule`",
    ],
)
def test_a_name_that_leads_nowhere_is_found(text):
    assert missing(ROOT / "docs" / "page.md", text)


def test_names_that_lead_somewhere_are_not_taken_for_faults():
    text = "design.md, docs/design.md, ../README.md, tests/law, tests/engine/tiny.py, benchmarks/steady, `dspark_kernels.accept`"
    assert missing(ROOT / "docs" / "page.md", text) == []
