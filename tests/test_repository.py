"""The repository is what it says it is, and its two commands work on a machine that is not ours.

Bug classes: a folder that shadows a package SGLang imports, a package that a wheel would leave out, a dependency without a
range, and a launcher script that works only where it was written. The script is run with stand-ins for Python and pip, so
nothing is installed.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {"sglang_dspark": ROOT, "dspark_scheduler": ROOT / "scheduler", "dspark_kernels": ROOT / "kernels"}
SOURCES = sorted(path for name, folder in PACKAGES.items() for path in (folder / name).rglob("*.py")) + sorted(
    (ROOT / "tests").rglob("*.py")
)


def test_the_name_kernels_means_the_hugging_face_package_even_from_the_repository_root():
    program = "import kernels; print(kernels.__file__, hasattr(kernels, 'get_kernel'))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert str(ROOT / "kernels") not in found and found.strip().endswith("True")


def test_the_engine_is_pinned_exactly_and_everything_else_has_a_range():
    extras = PROJECT["project"]["optional-dependencies"].values()
    for requirement in PROJECT["project"]["dependencies"] + [line for extra in extras for line in extra]:
        if requirement.startswith("sglang=="):
            assert re.fullmatch(r"sglang==\d+\.\d+\.\d+", requirement)
        else:
            assert re.fullmatch(r"[\w.-]+(\[\w+\])?>=[\d.]+,<[\d.]+", requirement), requirement


def test_a_wheel_would_contain_every_package():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    there = {
        ".".join((name, *path.parent.relative_to(folder / name).parts))
        for name, folder in PACKAGES.items()
        for path in (folder / name).rglob("__init__.py")
    }
    assert listed == there


def own_lines(function: ast.AST) -> int:
    """A function's lines without its docstring and without the functions inside it (which are counted by themselves)."""
    inner = [node for node in ast.walk(function) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))][1:]
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    away = inner + [first] * is_docstring
    return function.end_lineno - function.lineno + 1 - sum(node.end_lineno - node.lineno + 1 for node in away)


def test_every_module_and_function_can_be_read_in_one_sitting():
    too_long = []
    for path in SOURCES:
        text = path.read_text()
        if (lines := len(text.splitlines())) > 300:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and own_lines(node) > 80:
                too_long.append(f"{path.relative_to(ROOT)}: {node.name} has {own_lines(node)} lines")
    assert too_long == []


def test_ci_runs_what_the_readme_tells_a_newcomer_to_run():
    assert "./run test" in (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.search(r'/run" --venv "\S+" test --durations=25 "\$@"', ci)
    assert all(os.access(ROOT / name, os.X_OK) for name in ("run", ".ci/run"))


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the launcher needs, in a folder whose name has a space."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("run", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)


def run(checkout: Path, *arguments: str, only: Path | None = None) -> subprocess.CompletedProcess:
    """Run the launcher; `only` is a folder of stand-ins that shadows the machine's programs."""
    path = os.environ["PATH"] if only is None else f"{only}:/usr/bin:/bin"
    return subprocess.run(
        [str(checkout / "run"), *arguments],
        env={"PATH": path, "HOME": str(checkout)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def installed(checkout: Path, extra: str = "") -> Path:
    """A stand-in for a finished installation, made by the launcher itself with a pip that does nothing."""
    venv = checkout / ".venv"
    script(venv / "bin" / "python", 'echo "python $*" >> "$(dirname "$0")/log"; exit 0')
    script(venv / "bin" / "sglang-dspark", 'echo "sglang-dspark $*"')
    done = run(checkout, *(["test"] if extra else ["doctor"]))
    assert done.returncode == 0, done.stderr
    return venv / "bin" / "log"


def test_the_first_run_installs_and_the_second_starts_at_once(checkout):
    log = installed(checkout)
    assert "-m pip install --disable-pip-version-check --editable" in log.read_text()
    log.unlink()
    again = run(checkout, "serve", "--port", "31000", "a model")
    assert again.stdout == "sglang-dspark serve --port 31000 a model\n"
    assert not log.exists() and again.stderr == ""


def test_a_changed_pyproject_is_installed_again(checkout):
    log = installed(checkout)
    log.unlink()
    (checkout / "pyproject.toml").write_text("# changed\n")
    assert run(checkout, "serve").returncode == 0
    assert "pip install" in log.read_text()


def test_the_tests_need_more_than_the_server_and_the_server_nothing_more_than_the_tests(checkout):
    log = installed(checkout)
    log.unlink()
    assert run(checkout, "test").returncode == 0
    assert "[test]" in log.read_text()
    log.unlink()
    assert run(checkout, "serve").returncode == 0
    assert not log.exists()


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ((), "-m not long"),
        (("--long",), ""),
        (("-k", "x"), "-m not long -k x"),
        (("--long", "-k", "x y"), "-k x y"),
        (("--fast", "-x"), "-m unit and not long -x"),
    ],
    ids=str,
)
def test_the_long_and_the_fast_tests_are_selected_by_their_flag(checkout, given, passed):
    log = installed(checkout, "test")
    log.unlink()
    run(checkout, "test", *given)
    assert log.read_text().splitlines()[-1] == f"python -m pytest -n 2 {passed}".rstrip()


def test_an_old_python_is_named_and_nothing_is_made(checkout, tmp_path):
    for name in ("python3.14", "python3.13", "python3.12", "python3.11", "python3", "python"):
        script(tmp_path / "bin" / name, '[[ $1 == --version ]] && echo "Python 3.9.2"; exit 1')
    done = run(checkout, "serve", only=tmp_path / "bin")
    assert done.returncode == 1 and not (checkout / ".venv").exists()
    assert "no Python 3.11 or newer found (python3 is Python 3.9.2)" in done.stderr


def fake_python(folder: Path, venv: str = "exit 0") -> None:
    """A Python that is new enough and whose `-m venv` does what `venv` says."""
    script(folder / "python3.12", f'[[ $1 == --version ]] && echo "Python 3.12.1"; [[ $2 == venv ]] || exit 0; {venv}')


def test_a_python_without_venv_is_told_what_to_install(checkout, tmp_path):
    fake_python(tmp_path / "bin", 'mkdir -p "$3"; exit 1')
    done = run(checkout, "serve", only=tmp_path / "bin")
    assert done.returncode == 1 and "apt install python3-venv" in done.stderr
    assert not (checkout / ".venv").exists(), "a half-made environment would look finished"


NEW_VENV = (
    'mkdir -p "$3/bin"; printf "#!/usr/bin/env bash\\n%s\\n" "{python}" > "$3/bin/python"; chmod +x "$3/bin/python"'
)


def test_a_full_disk_is_refused_before_the_download(checkout, tmp_path):
    fake_python(tmp_path / "bin", NEW_VENV.format(python="[[ \\$1 != -c ]]"))  # SGLang is not installed
    script(tmp_path / "bin" / "df", 'echo "Filesystem 1024-blocks Used Available"; echo "/dev/x 9 9 5242880 9% /"')
    done = run(checkout, "serve", only=tmp_path / "bin")
    assert done.returncode == 1
    assert "needs 14 GiB free for the installation, 5 GiB are there" in done.stderr and "--venv" in done.stderr


def test_an_installation_without_network_says_so_and_is_tried_again(checkout, tmp_path):
    fake_python(tmp_path / "bin", NEW_VENV.format(python="[[ \\$3 != install ]]"))  # pip install fails
    for _ in range(2):
        done = run(checkout, "serve", only=tmp_path / "bin")
        assert done.returncode == 1 and "Offline?" in done.stderr


def test_another_place_and_another_python_can_be_named(checkout, tmp_path):
    fake_python(tmp_path / "bin", NEW_VENV.format(python="exit 0"))
    elsewhere = tmp_path / "else where" / "venv"
    run(checkout, "--venv", str(elsewhere), "--python", str(tmp_path / "bin" / "python3.12"), "doctor")
    assert elsewhere.is_dir() and not (checkout / ".venv").exists()
    assert "--venv needs a folder" in run(checkout, "--venv").stderr


def test_a_wheel_would_contain_every_data_file():
    """Data is named by pattern, package by package; an editable install hides what is forgotten."""
    packed = set()
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        top, *rest = package.split(".")
        folder = (PACKAGES[top] / top).joinpath(*rest)
        packed |= {path for pattern in patterns for path in folder.glob(pattern)}
    tracked = subprocess.run(
        ["git", "ls-files", *(str(folder / name) for name, folder in PACKAGES.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    data = {ROOT / line for line in tracked if not line.endswith((".py", ".md"))}
    assert data <= packed, sorted(str(path) for path in data - packed)
