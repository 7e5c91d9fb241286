"""Every command that the documentation shows is run, or read by the parser that would run it.

Bug classes: a flag that was renamed in the code and not on the page, a file or a service that is named and gone, a route
that moved, a command that no check looks at. The pages are parsed as Markdown (fences, indented blocks, code in a
sentence) and the comments of deploy/ as lines; a program without a check fails, unless ALLOWED says why it has none.
Run for real: `simulate`, `doctor`, `--help`, `train-draft --dry-run`, the DFlash converter, `bench` up to its first
request. Read by the real parser: `serve`. Held against the files or routes they name: docker, kubectl, curl, scripts.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from sglang_dspark.commands import preflight
from tests.docs_checks import ALLOWED, CHECKS, ROOT, understand
from tests.docs_commands import Command, in_comments, in_markdown, split
from tests.engine.tiny import tiny_target
from tests.engine.tiny_draft import tiny_draft

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
COMMENTED = sorted(path for pattern in ("Dockerfile.*", "*.yaml") for path in (ROOT / "deploy").glob(pattern))
COMMANDS = list(
    dict.fromkeys(
        [command for page in PAGES for command in in_markdown(page, CHECKS)]
        + [command for file in COMMENTED for command in in_comments(file, (*CHECKS, *ALLOWED))]
    )
)
WRONG = """sglang-dspark serve --verify-mod static
sglang-dspark serve --max-step-millis 3
sglang-dspark serve --verify-mode statik
sglang-dspark serve --min-window 4 --max-window 2
sglang-dspark serv
sglang serve --model-path MODEL --speculative-algoritm DSPARK_LOAD_AWARE
./run serve --model-pth MODEL
./run test --lng
sglang-dspark bench --control of --arm static
sglang-dspark bench --controls off
sglang-dspark bench --concurrency 64
sglang-dspark simulate --machine pdp-11
sglang-dspark train-draft --out my-draft --target /path/to/model --gama 4
sglang-dspark train-draft --target /path/to/model
python benchmarks/serving.py --concurency 1
python benchmarks/no_such_file.py
python -m sglang_dspark.bench.nothing
python -m sglang_dspark.bench.dflash DRAFT
curl -s http://127.0.0.1:30000/v1/chat/completion -d '{}'
curl -s http://127.0.0.1:30001/v1/chat/completions -H 'Content-Type: application/json' -d '{"model": "m", "messages": []}'
curl -s http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' -d '{"model": "m", "message": []}'
docker compose up servr
docker compose --profile cuda up server
docker build -f deploy/Dockerfile.rocm -t x .
kubectl apply -f server.yaml
kubectl create secret generic another-secret --from-literal=api-key=x
kubectl port-forward pod/sglang-dspark-... 3000
wget http://127.0.0.1:30000/health
true && git clone somewhere""".splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder in which the placeholders of the pages are models."""
    folder = tmp_path_factory.mktemp("docs")
    tiny_draft(folder / "DRAFT", tiny_target(folder / "MODEL"))
    return folder


@pytest.fixture(autouse=True)
def no_server(monkeypatch, tmp_path):
    """Commands run in a folder of their own; `serve` is read and not started: no port, no download, no model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "check_port", lambda host, port: None)
    monkeypatch.setattr(preflight, "demo_arguments", lambda args, speculates: [])
    monkeypatch.setattr(preflight, "check_models", lambda plan, speculates: None)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_in_the_docs_runs_or_is_understood(command, place):
    understand(command, place)


@pytest.mark.parametrize("line", WRONG)
def test_a_command_with_a_mistake_is_found(line, place):
    with pytest.raises(AssertionError):
        for words in split(line):
            understand(Command(ROOT / "deploy/kubernetes/README.md", tuple(words)), place)


def test_no_line_that_looks_like_a_command_is_passed_over():
    """Counted without the Markdown parser: every line outside tables that begins with a program of ours."""
    texts = {re.sub(r"\W", "", "".join(command.words)) for command in COMMANDS}
    looks = re.compile(
        r"^\s*(?:\$ )?((?:\./run|sglang-dspark|sglang serve|curl|docker|kubectl|python -m|python [a-z]+/) ?.*)",
        re.MULTILINE,
    )
    lines = [match[1].partition("  #")[0] for page in PAGES for match in looks.finditer(page.read_text())]
    missed = [
        line for line in lines if "`" not in line and not line.endswith("\\") and re.sub(r"\W", "", line) not in texts
    ]
    assert len(lines) > 15 and missed == []


def test_a_page_in_another_shell_or_without_a_language_is_not_passed_over(tmp_path):
    (tmp_path / "page.md").write_text("```zsh\nsglang-dspark serve\n```\n")
    with pytest.raises(AssertionError, match="zsh"):
        in_markdown(tmp_path / "page.md", CHECKS)


def test_shell_is_split_into_lists_pipes_substitutions_and_continued_lines():
    text = 'a "b c" \\\n  --d=1 && e | f > g  # h\nk "$(l m)"; n'
    assert split(text) == [["a", "b c", "--d=1"], ["e"], ["f"], ["k", "$(l m)"], ["n"], ["l", "m"]]


def test_the_python_in_the_docs_runs_up_to_the_engine(place, monkeypatch):
    import sglang

    made = []
    monkeypatch.setattr(sglang, "Engine", lambda **given: made.append(given["server_args"]))
    pieces = [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    for code in pieces:
        for name in ("MODEL", "DRAFT"):
            code = code.replace("=...", f"={str(place / name)!r}", 1)
        Path("piece.py").write_text(code)
        runpy.run_path("piece.py")
    assert len(made) == len(pieces) >= 1 and made[0].dspark["accept_rule"] == "block"


def test_every_benchmark_and_every_result_is_in_the_index():
    folder, index = ROOT / "benchmarks", (ROOT / "benchmarks/README.md").read_text()
    there = {path.name for path in folder.glob("*.py")} | {path.name for path in (folder / "results").rglob("*.md")}
    assert {name for name in there if name not in index} == set()


def test_every_link_and_picture_in_the_docs_leads_to_a_file():
    broken = [
        (page.name, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if not target.startswith(("http://", "https://")) and not (page.parent / target).exists()
    ]
    assert broken == []
