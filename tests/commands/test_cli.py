"""The command line answers at once and hands everything on.

Bug classes: an import at the top of a file that makes `--help` take ten seconds (asserted on the modules that were
imported, not on a clock), a flag that is lost or reordered on its way to SGLang's parser, and settings that are parsed
but never reach the scheduler process.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sglang_dspark import cli
from sglang_dspark.commands import serve
from sglang_dspark.settings import flags
from sglang_dspark.settings.config import ConfigError, DSparkConfig

HEAVY = ("torch", "sglang", "transformers", "numpy", "scipy", "matplotlib", "dspark_kernels", "dspark_scheduler")
LIST_HEAVY = f"import atexit, sys; atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules]))"


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["serve", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(argv):
    program = f"{LIST_HEAVY}; sys.argv[1:] = {argv}; from sglang_dspark.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_shows_every_command():
    shown = CliRunner().invoke(cli.app, ["--help"]).output
    for name in cli.COMMANDS:
        assert f"│ {name} " in shown, name
    assert "│ serve " in shown and "│ doctor " in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_that_is_shown_can_be_loaded_and_explains_itself(name):
    result = CliRunner().invoke(cli.app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_an_unknown_command_is_an_error():
    assert CliRunner().invoke(cli.app, ["srve"]).exit_code == 2


ARGV = ["model/folder", "--tp-size", "2", "--port=31000", "--trust-remote-code", "-h2"]


@pytest.mark.parametrize("argv", [ARGV, ["--model-path", "m", "extra", "--verify-mode", "off"], []], ids=str)
def test_serve_hands_its_arguments_on_unchanged_and_in_order(monkeypatch, argv):
    seen = []
    monkeypatch.setattr(serve, "run", lambda argv: seen.append(argv) or 3)
    assert CliRunner().invoke(cli.app, ["serve", *argv]).exit_code == 3
    assert seen == [argv]


def test_the_serve_help_names_every_flag_of_ours():
    shown = CliRunner().invoke(cli.app, ["serve", "--help"]).output
    assert all(flag.option in shown for flag in flags.FLAGS)


def test_the_flags_are_exactly_the_fields_of_the_config():
    without_flag = {"record"}  # `sglang-dspark calibrate` sets it; it is no setting of a server
    assert [flag.name for flag in flags.FLAGS] == [
        name for name in DSparkConfig().to_dict() if name not in without_flag
    ]


def test_the_curl_line_is_a_valid_command_and_shows_no_key():
    args = argparse.Namespace(served_model_name="it's", model_path="m", api_key="secret-key", ssl_certfile=None)
    words = shlex.split(serve.curl_line("http://127.0.0.1:30000", args))
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"
    assert "http://127.0.0.1:30000/v1/chat/completions" in words
    assert "secret-key" not in " ".join(words)


@pytest.fixture(scope="module")
def sglang_parse():
    """SGLang's own parsing of a command line, with its plugins loaded: what `sglang serve` does."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    return lambda *argv: prepare_server_args(["--model-path", "m", *argv])


OURS = ("--speculative-algorithm", flags.ALGORITHM, "--speculative-draft-model-path", "d")


def test_sglangs_own_parser_takes_our_flags_and_they_reach_another_process(sglang_parse):
    arrived = pickle.loads(pickle.dumps(sglang_parse(*OURS, "--verify-mode", "static", "--accept-rule", "token")))
    assert flags.config_of(arrived) == DSparkConfig(verify_mode="static", accept_rule="token")
    assert arrived.speculative_algorithm == flags.ALGORITHM


def test_off_means_no_algorithm_and_no_draft_even_when_both_were_named(sglang_parse):
    arrived = sglang_parse(*OURS, "--verify-mode", "off", "--speculative-num-draft-tokens", "5")
    assert arrived.speculative_algorithm is None
    assert arrived.speculative_draft_model_path is None
    assert arrived.speculative_num_draft_tokens is None
    assert flags.config_of(arrived).verify_mode == "off"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--verify-mode", "static"], "add --speculative-algorithm DSPARK_LOAD_AWARE"),
        (
            ["--speculative-algorithm", "EAGLE", "--accept-rule", "token"],
            "no effect with --speculative-algorithm EAGLE",
        ),
        (["--speculative-algorithm", "EAGLE", "--verify-mode", "off"], "contradicts --speculative-algorithm EAGLE"),
        ([*OURS, "--max-window", "0"], "--max-window 0"),
        ([*OURS, "--cost-model", "/no/such/file"], "--cost-model /no/such/file: no such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_sglangs_own_command_refuses_a_wrong_setting_with_one_line_and_status_2(sglang_parse, capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        sglang_parse(*argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_an_engine_made_without_a_command_line_gets_the_defaults_or_what_was_attached(sglang_parse):
    from sglang.srt.server_args import ServerArgs

    assert flags.config_of(ServerArgs(model_path="m")) == DSparkConfig()
    chosen = DSparkConfig(accept_rule="coupled")
    assert flags.config_of(flags.attach(ServerArgs(model_path="m"), chosen)) == chosen


def test_settings_for_another_algorithm_are_refused_before_anything_is_loaded():
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    flags.add_flags(parser)  # SGLang's parser may have ours already
    args = parser.parse_args(["--verify-mode", "static"])
    args.speculative_algorithm = "DSPARK"
    with pytest.raises(ConfigError, match="--speculative-algorithm DSPARK"):
        flags.config_of_namespace(args)
