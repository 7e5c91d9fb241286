"""What is wrong with a user's input is one kind of error, so that a command need not know who found it.

Bug class: a new error that a command does not catch, which then ends in a traceback instead of one line and status 2.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import typer

from sglang_dspark.commands import serve
from sglang_dspark.errors import UserError

PACKAGE = Path(serve.__file__).parents[1]
# Ends the process by itself: SGLang would log an ordinary exception of a plugin and start without it.
NOT_FOR_USERS = {"CompatibilityError": "SystemExit"}


def test_every_error_class_of_ours_is_a_user_error():
    found = {
        node.name: [ast.unparse(base) for base in node.bases]
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    }
    assert len(found) > 5 and found.pop("UserError") == ["ValueError"]
    assert found == {name: [NOT_FOR_USERS.get(name, "UserError")] for name in found}


def test_serve_answers_any_user_error_with_one_line_and_status_2(monkeypatch, capsys):
    class Unheard(UserError):
        pass

    def refuse(argv):
        raise Unheard("--flag 3:\n  use 2")

    monkeypatch.setattr("sglang_dspark.commands.preflight.plan_start", refuse)
    with pytest.raises(typer.Exit) as ended:
        serve.run([])
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "sglang-dspark serve: --flag 3: use 2\n"
