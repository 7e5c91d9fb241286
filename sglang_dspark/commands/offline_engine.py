"""An engine for the commands that measure one: built from serve's own command line, without an HTTP server."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def measured_engine(argv: list[str], **settings) -> Iterator:
    """Start an Engine for `argv` (serve's flags) with `settings` over our own flags; yields the engine.

    Raises:
        typer.Exit: a flag, path or draft that serve would refuse, with its one line.
    """
    from sglang_dspark.commands.preflight import plan_start
    from sglang_dspark.commands.serve import fail
    from sglang_dspark.errors import UserError

    try:
        plan = plan_start(argv)
    except UserError as error:
        fail(str(error))
    from sglang import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_dspark.settings.flags import attach, config_of

    load_plugins()
    server_args = prepare_server_args(list(plan.argv))
    config = dataclasses.replace(config_of(server_args), **settings)
    engine = Engine(server_args=attach(server_args, config))
    try:
        yield engine
    finally:
        engine.shutdown()


def status_of_first_rank(engine) -> dict:
    """What `/dspark/status` would answer for the first rank."""
    return engine.get_server_info()["internal_states"][0]["dspark"]


def arguments_of(ctx: typer.Context) -> list[str]:
    """Everything on the command line that the command does not know: serve's and SGLang's flags."""
    return list(ctx.args)
