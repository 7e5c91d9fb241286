"""A start that cannot work is refused before anything is loaded, with one line that names the flag and what to do.

Bug classes: a mistake that is found only after half a minute of loading; a message that names the wrong flag; a reason
that is lost behind what followed it. How a real server ends is in tests/server/test_serve_ends.py.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dspark.commands import launch, preflight
from sglang_dspark.commands.preflight import PreflightError, plan_start
from sglang_dspark.settings.config import ConfigError
from tests.engine.tiny import tiny_target
from tests.engine.tiny_draft import tiny_draft

SERVE = [sys.executable, "-m", "sglang_dspark.cli", "serve"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory, target) -> Path:
    return tiny_draft(tmp_path_factory.mktemp("draft"), target)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def refused(*argv: object) -> str:
    with pytest.raises((PreflightError, ConfigError, ValueError)) as refusal:
        plan_start([str(word) for word in argv])
    message = str(refusal.value)
    assert "\n" not in message.strip()
    return message


def test_a_mistyped_flag_is_answered_with_the_right_one(target):
    assert refused(target, "--verfy-mode", "off") == "unknown flag --verfy-mode: did you mean --verify-mode?"


@pytest.mark.parametrize("argv", [("--tp-size", "two"), ("--verify-mode", "fast"), ("--port",)], ids=str)
def test_a_value_of_the_wrong_kind_names_the_flag(target, argv):
    assert argv[0] in refused(target, *argv)


def test_a_model_path_that_does_not_exist_is_named(port):
    assert "--model-path /no/such/model: no such folder" in refused("/no/such/model", "--port", port)
    assert "--model-path /no/such/model" in refused("/no/such/model", "--verify-mode", "off", "--port", port)


def test_a_repository_that_nobody_can_reach_is_refused_without_waiting(port, monkeypatch):
    monkeypatch.setattr(preflight, "unreachable", lambda: "the hub cannot be reached to fetch it")
    assert "cannot be reached" in refused("owner/absent-model", "--verify-mode", "off", "--port", port)


def broken(folder: Path, fault: str) -> Path:
    tiny_target(folder)
    if fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "config is no JSON":
        (folder / "config.json").write_text("{")
    elif fault == "no architecture":
        (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))
    elif fault == "no weights":
        (folder / "model.safetensors").unlink()
    elif fault == "weights cut short":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:2000])
    return folder


FAULTS = {
    "no config": "no config.json",
    "config is no JSON": "not JSON",
    "no architecture": "names no `architectures`",
    "no weights": "has no weights",
    "weights cut short": "is damaged",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_model_folder_is_refused_before_it_is_loaded(tmp_path, port, fault):
    message = refused(broken(tmp_path, fault), "--verify-mode", "off", "--port", port)
    assert FAULTS[fault] in message and "--model-path" in message


def test_a_model_without_a_draft_is_told_its_three_choices(target, port):
    message = refused(target, "--port", port)
    for choice in ("--speculative-draft-model-path", "--verify-mode off", "sglang-dspark train-draft"):
        assert choice in message


def test_an_unknown_draft_is_refused_by_its_path_or_its_architecture(target, tmp_path, port):
    with_draft = (target, "--port", port, "--speculative-draft-model-path")
    assert "/no/such/draft" in refused(*with_draft, "/no/such/draft")
    other = tiny_draft(tmp_path, target)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["MysteryModel"]}))
    message = refused(*with_draft, other)
    assert "MysteryModel" in message and "Qwen3DSparkModel" in message


def test_a_draft_of_another_target_is_refused_before_either_is_loaded(tmp_path, draft, port):
    wider = tiny_target(tmp_path, hidden=128)
    message = refused(wider, "--speculative-draft-model-path", draft, "--port", port)
    assert "hidden_size" in message and "128" in message


def test_a_busy_port_is_refused(target, port):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        message = refused(target, "--verify-mode", "off", "--port", port)
    assert f"port {port} on 127.0.0.1 is in use" in message and "--port" in message


@pytest.mark.parametrize(
    "argv", [("--port", "70000"), ("--host", "203.0.113.1"), ("--host", "no.such.invalid")], ids=str
)
def test_an_address_that_cannot_be_listened_on_is_refused(target, argv):
    assert argv[1] in refused(target, "--verify-mode", "off", *argv)


def test_too_little_memory_is_refused_with_both_figures(target, port, monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda: 1 << 29)
    message = refused(target, "--verify-mode", "off", "--port", port)
    assert "0.5 GiB are free" in message and "GiB are needed" in message


def test_the_memory_estimate_counts_weights_in_the_served_dtype_and_the_asked_kv(target):
    config = json.loads((target / "config.json").read_text())
    weights = (target / "model.safetensors").stat().st_size  # stored in float32
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    base = preflight.BASE_BYTES
    assert preflight.estimate_bytes([target], config, 4, 100) - base == weights + 400 * per_token
    assert preflight.estimate_bytes([target], config, 2, 100) - base == weights // 2 + 200 * per_token


def test_a_good_start_is_planned_with_our_algorithm_and_nothing_else_changed(target, draft, port):
    plan = plan_start([str(target), "--speculative-draft-model-path", str(draft), "--port", str(port)])
    assert plan.args.speculative_algorithm == "DSPARK_LOAD_AWARE"
    assert plan.args.model_path == str(target) and plan.args.port == port
    off = plan_start([str(target), "--verify-mode", "off", "--port", str(port)])
    assert off.args.speculative_algorithm is None and off.config.verify_mode == "off"


def test_another_algorithm_passes_through_untouched(target, port):
    plan = plan_start([str(target), "--speculative-algorithm", "NGRAM", "--port", str(port)])
    assert plan.args.speculative_algorithm == "NGRAM"
    assert "DSPARK_LOAD_AWARE" not in plan.argv


def test_a_failed_child_leaves_its_first_reason_and_not_what_followed(tmp_path):
    note = launch.FailureNote(tmp_path / "failure")
    note.file.touch()
    note.write(
        launch.last_line("Scheduler hit an exception: Traceback (most recent call last):\n  x\nValueError: no\n\n")
    )
    note.write("a later error")
    assert note.file.read_text() == "ValueError: no\n"


def lines_of(stderr: str) -> list[str]:
    """What a person reads, without the warnings of libraries."""
    return [
        line for line in stderr.splitlines() if line.strip() and "Warning" not in line and "warnings.warn" not in line
    ]


def test_a_wrong_flag_on_the_command_line_is_one_line_and_status_2():
    done = subprocess.run([*SERVE, "--max-windw", "3"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    (line,) = lines_of(done.stderr)
    assert line == "sglang-dspark serve: unknown flag --max-windw: did you mean --max-window?"


def test_a_draft_that_cannot_be_served_is_one_line_on_the_command_line_and_status_2(target, tmp_path, port):
    draft = tiny_draft(tmp_path, target)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"target_layer_ids": ["0", [2]]}))
    command = [*SERVE, "--model-path", str(target), "--speculative-draft-model-path", str(draft), "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    (line,) = lines_of(done.stderr)
    assert line.endswith(f"{draft / 'config.json'}: draft config: target_layer_ids[0]='0'; it must be a whole number")
