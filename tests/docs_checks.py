"""What each program in the docs is checked by: run, read by its own parser, or held against the files it names."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from sglang_dspark import cli
from sglang_dspark.commands import preflight
from tests.docs_commands import Command

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "openssl": "makes a random key; nothing of ours is in it",
    "printf": "writes a key into a file",
    ".venv-dev/bin/pip": "installs the packages of the dev extra, as pyproject.toml has them",
    "PYTHONPATH=scheduler": "runs pytest on tests/scheduler",
}
PLACEHOLDERS = {"MODEL": "MODEL", "DRAFT": "DRAFT", "EAGLE": "DRAFT", "OUT": "OUT", "/path/to/model": "MODEL"}


def understand(command: Command, place: Path) -> None:
    """Run or check one command.

    Raises:
        AssertionError: it could not be run as it stands, or nothing here can tell.
    """
    program, *words = command.words
    if program in ALLOWED:
        return
    assert program in CHECKS, f"{command}: no check for {program!r}; write one, or say in ALLOWED why there is none"
    try:
        CHECKS[program](command, words, place)
    except (ValueError, SystemExit) as error:
        raise AssertionError(f"{command}: {error}") from error


def our_command(command: Command, words: list[str], place: Path) -> None:
    name, *arguments = words
    assert name in cli.COMMANDS, f"{command}: no such command"
    bare = command.mention and not arguments
    arguments = filled(arguments, place)
    if bare:
        assert invoke([name, "--help"])[0] == 0
    elif name == "serve":
        whole_flags(command, arguments)
        preflight.plan_start(arguments)
    elif name == "bench":
        told = invoke([name, *arguments, "--url", "http://127.0.0.1:9"])[1]
        assert "does not answer" in told, f"{command}: {told[-300:]}"
    elif name == "collect":
        told = invoke([name, *arguments, "--count", "5", "--url", "http://127.0.0.1:9"])[1]
        assert "went away" in told, f"{command}: {told[-300:]}"
    else:
        extra = {"train-draft": ["--dry-run"], "simulate": ["--steps", "2"]}
        assert name in extra, f"{command}: no check for it with arguments"
        status, told = invoke([name, *arguments, *extra[name]])
        assert status == 0, f"{command}: {told[-500:]}"


def filled(words: list[str], place: Path) -> list[str]:
    """Words of a page with models for its placeholders."""
    return [str(place / PLACEHOLDERS[word]) if word in PLACEHOLDERS else word for word in words]


def invoke(argv: list[str]) -> tuple[int, str]:
    """Exit status and output, in one line, of one of our commands in this process."""
    result = CliRunner().invoke(cli.app, argv)
    return result.exit_code, " ".join(result.output.split())


def run_script(command: Command, words: list[str], place: Path) -> None:
    if words[0] == "test":
        text, pytests = (ROOT / "run").read_text(), ("-k", "-x")
        for word in words[1:]:
            known = f" {word}) " in text or word in pytests or not word.startswith("-")
            assert known, f"{command}: ./run test does not know {word}"
    elif words == ["doctor"]:
        doctor(command)
    else:
        our_command(command, words, place)


def doctor(command: Command) -> None:
    """On a small machine it may find a problem, and says so by status 1; everything has to be looked at.

    In a process of its own: it silences loggers and loads plugins.
    """
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dspark.cli", "doctor"], capture_output=True, text=True, check=False
    )
    told = done.stdout + done.stderr
    looked_at = all(word in told for word in ("interface", "demo draft", "problem"))
    assert done.returncode in (0, 1) and looked_at, f"{command}: {told}"


def sglang(command: Command, words: list[str], place: Path) -> None:
    assert words[0] == "serve", f"{command}: only `sglang serve` is known here"
    whole_flags(command, words)
    preflight.config_of_namespace(preflight.parse(words[1:]))


def whole_flags(command: Command, words: list[str]) -> None:
    """SGLang's parser also takes a flag's beginning, which the next flag of that beginning would break."""
    known = preflight.make_parser()._option_string_actions
    cut = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    assert not cut, f"{command}: no flag {cut[0]}"


def python(command: Command, words: list[str], place: Path) -> None:
    """A script has the flags that are given to it; the converter of the DFlash arm is run."""
    if words[:2] == ["-m", "sglang_dspark.bench.dflash"]:
        arguments = filled(words[2:], place)
        shutil.rmtree(place / "OUT", ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["dflash", *arguments])
            runpy.run_module(words[1], run_name="__main__", alter_sys=False)
        assert (Path(arguments[1]) / "config.json").is_file()
        return
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None, f"{command}: no module {words[1]}"
        file, given = Path(spec.origin), words[2:]
    else:
        file, given = ROOT / words[0], words[1:]
    assert file.is_file(), f"{command}: no file {file}"
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    flags = {
        argument.value
        for call in calls
        if getattr(call.func, "attr", "") == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }
    for word in given:
        assert not word.startswith("-") or word.partition("=")[0] in flags, f"{command}: no flag {word}"


def curl(command: Command, words: list[str], place: Path) -> None:
    """Address, route, method and body of a request to our server."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    parser = argparse.ArgumentParser(prog="curl", allow_abbrev=False)
    parser.add_argument("url")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-H", action="append")
    parser.add_argument("-X")
    parser.add_argument("-d")
    given = parser.parse_args(words)
    base, slash, path = given.url.removeprefix("http://").partition("/")
    default = preflight.parse([])
    assert base == f"{default.host}:{default.port}", f"{command}: a server listens on {default.host}:{default.port}"
    method = given.X or ("POST" if given.d else "GET")
    assert any(
        slash + path == route.path and method in route.methods
        for route in app.routes
        if getattr(route, "methods", None)
    ), f"{command}: no such route"
    if given.d:
        assert "Content-Type: application/json" in (given.H or []), f"{command}: the body's type is missing"
        bodies = {"v1/chat/completions": ChatCompletionRequest}
        assert path in bodies, f"{command}: no check for a body of /{path}"
        unknown = set(json.loads(given.d)) - set(bodies[path].model_validate_json(given.d).model_fields_set)
        assert not unknown, f"{command}: unknown fields {unknown}"


def docker(command: Command, words: list[str], place: Path) -> None:
    parser = argparse.ArgumentParser(prog="docker", allow_abbrev=False)
    if words[0] == "build":
        for flag in ("-f", "-t"):
            parser.add_argument(flag)
        parser.add_argument("context")
        assert (ROOT / parser.parse_args(words[1:]).f).is_file(), f"{command}: no such file"
        return
    assert words[0] == "compose", f"{command}: no check for docker {words[0]}"
    parser.add_argument("--profile")
    parser.add_argument("verb", choices=["up"])
    parser.add_argument("services", nargs="*")
    given = parser.parse_args(words[1:])
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    profiles = {name for service in services.values() for name in service.get("profiles", ())}
    assert set(given.services) <= set(services), f"{command}: services are {', '.join(services)}"
    assert given.profile in (None, *profiles), f"{command}: profiles are {profiles}"


def kubectl(command: Command, words: list[str], place: Path) -> None:
    """Files, names, keys and ports that the manifests beside the page hold."""
    folder = command.page.parent
    manifests = "".join(path.read_text() for path in sorted(folder.glob("*.yaml")))
    parser = argparse.ArgumentParser(prog="kubectl", allow_abbrev=False)
    parser.add_argument("-n")
    parser.add_argument("-f", action="append", default=[])
    parser.add_argument("--from-literal", action="append", default=[])
    parser.add_argument("verb", choices=["create", "apply", "port-forward"])
    parser.add_argument("rest", nargs="*")
    given = parser.parse_intermixed_args(words)
    assert all((folder / name).is_file() for name in given.f), f"{command}: a file is missing"
    wanted = [pair.partition("=")[0] for pair in given.from_literal]
    if given.verb == "create":
        assert given.rest[:1] in (["namespace"], ["secret"]), f"{command}: no check for it"
        wanted += [] if given.rest[0] == "namespace" else [given.rest[-1]]
    elif given.verb == "port-forward":
        wanted += [
            f"name: {given.rest[0].removeprefix('pod/').removesuffix('-...')}",
            f"containerPort: {given.rest[1]}",
        ]
    for name in wanted:
        assert re.search(rf"{re.escape(name)}\b", manifests), f"{command}: {name!r} is in no manifest"


CHECKS = {
    "sglang-dspark": our_command,
    "./run": run_script,
    "sglang": sglang,
    "python": python,
    "curl": curl,
    "docker": docker,
    "kubectl": kubectl,
}
