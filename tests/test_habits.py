"""What a commit is checked by, here and by pre-commit: imports between rooms, format, lint, types.

Bug classes: an arrow that goes up the floors or closes a circle, in a package or between two; a file that nobody formatted;
a None where a type says there is none; a check that pre-commit makes and CI does not. Each tool is also shown a fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = {"sglang_dspark": ROOT, "dspark_scheduler": ROOT / "scheduler", "dspark_kernels": ROOT / "kernels"}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def tool(name: str, *arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run a program that stands beside Python, on this checkout; its output is one text."""
    environment = {"PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys(PACKAGES.values())))} | environment
    command = [Path(sys.executable).with_name(name), *arguments]
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_no_import_goes_up_the_floors_or_round_in_a_circle():
    done = tool("lint-imports", "--no-cache")
    assert done.returncode == 0 and f"{len(CONTRACTS)} kept, 0 broken" in done.stdout, done.stdout


UP = "sglang_dspark.learning.planted -> sglang_dspark.step.worker"
PLANTED = {
    "torch in the mathematics": ({"dspark_scheduler/planted.py": "import torch"}, "dspark_scheduler.planted -> torch"),
    "the engine in the kernels": ({"dspark_kernels/planted.py": "import sglang"}, "dspark_kernels.planted -> sglang"),
    "up": ({"sglang_dspark/learning/planted.py": "from sglang_dspark.step import worker"}, UP),
    "up, inside a function": (
        {"sglang_dspark/learning/planted.py": "def late():\n    from sglang_dspark.step import worker"},
        UP,
    ),
    "across": (
        {"sglang_dspark/repairs/planted.py": "import sglang_dspark.engine.algorithm"},
        "sglang_dspark.repairs.planted -> sglang_dspark.engine.algorithm",
    ),
    "a circle in a room": (
        {
            "sglang_dspark/settings/planted.py": "from . import planted_too",
            "sglang_dspark/settings/planted_too.py": "from . import planted",
        },
        "No cycles are allowed in sglang_dspark.settings",
    ),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_arrow_is_seen(tmp_path, plant):
    files, told = PLANTED[plant]
    for name, folder in PACKAGES.items():
        shutil.copytree(folder / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, source in files.items():
        (tmp_path / file).write_text(source + "\n")
    done = tool("lint-imports", "--no-cache", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and told in done.stdout, done.stdout


def test_the_code_is_as_ruff_wants_it():
    done = tool("ruff", "check", "--no-cache", "--output-format", "concise", ROOT)
    assert done.returncode == 0, done.stdout


def test_every_file_is_formatted(tmp_path):
    done = tool("ruff", "format", "--check", "--no-cache", ROOT)
    assert done.returncode == 0, done.stdout
    (tmp_path / "by_hand.py").write_text("x = { 'a':1 }\n")
    assert tool("ruff", "format", "--check", "--no-cache", tmp_path).returncode == 1


@pytest.mark.parametrize("package", ["scheduler/dspark_scheduler", "sglang_dspark/step"])
def test_the_types_are_right(package, tmp_path):
    done = tool("mypy", package, "--cache-dir", tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_wrong_type_would_be_seen(tmp_path):
    (tmp_path / "wrong.py").write_text("def twice(x: int | None) -> int:\n    return 2 * x\n")
    done = tool("mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path, tmp_path / "wrong.py")
    assert done.returncode == 1 and "Unsupported operand" in done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_that_it_is_typed(package):
    assert (PACKAGES[package] / package / "py.typed").is_file()


def test_what_pre_commit_runs_exists_and_runs_here_too():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    programs = {hook["entry"].split()[0] for hook in local["hooks"]}
    assert programs == {"ruff", "lint-imports", "mypy", "yamllint", "hadolint"}
    assert all(Path(sys.executable).with_name(program).exists() for program in programs)
    here = "".join((ROOT / "tests" / name).read_text() for name in ("test_habits.py", "test_deploy.py"))
    assert all(f'"{program}"' in here for program in programs)
    named = [word for hook in local["hooks"] for word in hook["entry"].split() if word.startswith("deploy/")]
    assert named and all((ROOT / word).is_file() for word in named)


def test_the_picture_of_the_house_has_the_floors_and_rooms_that_are_held():
    """docs/structure.md: the floors of the picture, top to bottom, are the layers of the contract; each room has a line."""
    page = (ROOT / "docs" / "structure.md").read_text()
    (layers,) = [contract["layers"] for contract in CONTRACTS if contract["type"] == "layers"]
    floors = [[room.strip().removeprefix("sglang_dspark.") for room in layer.split("|")] for layer in layers]
    drawn = [line.strip("│ ").split("│") for line in page.split("```")[1].splitlines() if line.strip().startswith("│")]
    assert [[cell.split()[0] for cell in floor] for floor in drawn[:-1]] == floors
    named = {
        word for line in page.splitlines() if line.startswith("| `") for word in line.split("|")[1].split("`")[1::2]
    }
    assert {room for floor in floors for room in floor} <= named
