"""`sglang-dspark`: one command line, whose commands are imported only when they run.

`--help` must answer within a second, and one of the commands imports the whole engine: so the group knows each
command's name and one-line help, and fetches the rest when the command is called.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class Entry:
    """One command: the module and function that implement it, and the line that `--help` shows."""

    module: str
    function: str
    help: str
    passes_through: bool = False  # unknown options go to the function's context (to SGLang) instead of being errors
    own_help: bool = False  # the function answers --help itself


COMMANDS = {
    "serve": Entry(
        "serve", "serve", "Start an OpenAI-compatible server; every SGLang flag passes through.", True, True
    ),
    "doctor": Entry("doctor", "doctor", "Check device, versions, SGLang's interface and the demo files."),
    "profile": Entry("profile", "profile", "Measure this machine's step times and write a cost file.", True),
    "calibrate": Entry("calibrate", "calibrate", "Fit confidence calibration from a file of prompts.", True),
    "simulate": Entry("simulate", "simulate", "Compare window policies on a cost model, without a server."),
    "bench": Entry("bench", "bench", "Measure a running server, with controls before and after."),
    "collect": Entry("collect", "collect", "Let a running server answer prompts, and keep the token ids to train on."),
    "train-draft": Entry("train_draft", "train_draft", "Train a DSpark draft for a target model."),
}


def load(name: str) -> TyperCommand:
    """Import a command and turn its function into a typer command with all its options."""
    entry = COMMANDS[name]
    function = getattr(importlib.import_module(f"sglang_dspark.commands.{entry.module}"), entry.function)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True} if entry.passes_through else {}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, context_settings=settings, add_help_option=not entry.own_help)(function)
    return typer.main.get_command(app)


class LazyCommand(TyperCommand):
    """Stands for a command until it is called: `--help` of the group needs no more than this."""

    def make_context(self, info_name, args, parent=None, **extra):
        return load(self.name).make_context(info_name, args, parent=parent, **extra)


class LazyGroup(TyperGroup):
    """The group of our commands, each a `LazyCommand`."""

    def list_commands(self, ctx) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx, cmd_name):
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else LazyCommand(name=cmd_name, help=entry.help)


app = typer.Typer(cls=LazyGroup, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True, no_args_is_help=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """SGLang, extended so that speculative decoding pays at every load."""
    if version:
        from sglang_dspark import __version__

        print(f"sglang-dspark {__version__}")
        raise typer.Exit()


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="sglang-dspark")


if __name__ == "__main__":
    sys.exit(main())
