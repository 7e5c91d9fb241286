"""`sglang-dspark serve`: check the command line, start SGLang with our algorithm, and say how to call it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import NoReturn

import typer

from sglang_dspark.errors import UserError
from sglang_dspark.settings.flags import FLAGS

EXIT_USAGE = 2
_QUESTION = "Explain in one sentence what a library is."


def serve(ctx: typer.Context) -> None:
    """Start an OpenAI-compatible server. Without --model-path it serves the demo pair on 127.0.0.1:30000."""
    argv = list(ctx.args)
    if "-h" in argv or "--help" in argv:
        print_help()
        return
    if "--help-all" in argv:
        from sglang_dspark.commands.preflight import make_parser

        make_parser().print_help()
        return
    raise typer.Exit(run(argv))


def run(argv: list[str]) -> int:
    """Start a server with SGLang's and our flags; returns the exit status when it has ended."""
    from sglang_dspark.commands.preflight import plan_start

    try:
        plan = plan_start(argv)
    except UserError as error:
        fail(str(error))
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    require_our_plugin()
    server_args = prepare_server_args(list(plan.argv))
    from sglang_dspark.commands.launch import launch

    return launch(server_args, lambda: announce(server_args.url(), plan.args, plan.config.verify_mode))


def require_our_plugin() -> None:
    """SGLang only logs a plugin that failed to load, and would then refuse our flags one by one: say it once."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if FLAGS[0].option not in parser._option_string_actions:
        fail("SGLang did not load our plugin (see above; SGLANG_PLUGINS may leave it out): run `sglang-dspark doctor`")


def fail(message: str) -> NoReturn:
    """One line on stderr, then exit status 2."""
    print(f"sglang-dspark serve: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(EXIT_USAGE)


def announce(url: str, args: argparse.Namespace, mode: str) -> None:
    """Print the address and a request that works as it stands."""
    print(f"\nsglang-dspark is ready at {url} (verify mode {mode}). Try:\n\n{curl_line(url, args)}\n", flush=True)


def curl_line(url: str, args: argparse.Namespace) -> str:
    """A shell command that asks the server a question."""
    body = {
        "model": args.served_model_name or args.model_path,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": _QUESTION}],
    }
    command = ["curl", "-s", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if args.api_key:
        command += ["-H", "Authorization: Bearer YOUR_API_KEY"]  # never print the key itself
    if args.ssl_certfile:
        command.append("--insecure")
    return shlex.join([*command, "-d", json.dumps(body)])


def print_help() -> None:
    """Our flags, and where the others are; reads nothing of SGLang, so it answers at once."""
    print("Usage: sglang-dspark serve [MODEL] [flags]\n")
    print("Start an OpenAI-compatible SGLang server whose drafts are verified with DSPARK_LOAD_AWARE.\n")
    print("Without MODEL (or --model-path) the demo pair is served on 127.0.0.1:30000. Every flag of SGLang's server")
    print("passes through; `sglang-dspark serve --help-all` lists them. Ours are:\n")
    for flag in FLAGS:
        value = "|".join(flag.choices) if flag.choices else flag.metavar
        print(f"  {flag.option} {value}\n      {flag.help}")
