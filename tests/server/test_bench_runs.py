"""A benchmark of a real server: a failed run is no result, settings are put back, and nobody outside is asked.

Bug classes: a receipt that is written although requests failed, settings left switched behind, a model hub that is asked
for a tokenizer (20 s of retries a run without a network; every look-up of an address is seen).
"""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from typer.testing import CliRunner

from sglang_dspark import cli
from sglang_dspark.bench import traffic
from sglang_dspark.bench.arms import parse_arm
from sglang_dspark.bench.bracket import execute, plan_to_dict
from sglang_dspark.bench.server import Server, ServerError, run_load, without_hub
from tests.bench.test_bench import plan


def test_a_run_with_failed_requests_is_no_result(dspark, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "hello"}], "temperature": -1.0}]
    traffic.save_rows(rows, tmp_path / "chat.jsonl", 8)
    with pytest.raises(ServerError):
        run_load(Server(dspark.url), tmp_path / "chat.jsonl", 1, 1, stop_at_end=False)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Hosts other than this machine whose address anybody in this process looks up; none of them is found."""
    hosts, look_up = [], socket.getaddrinfo

    def watch(host, *args, **kwargs):
        if host in ("127.0.0.1", "localhost", b"127.0.0.1"):
            return look_up(host, *args, **kwargs)
        hosts.append(host)
        raise socket.gaierror("no network in this test")

    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", watch)
    return hosts


def test_a_run_asks_no_hub_for_the_tokenizer_by_the_served_name(dspark, tmp_path, monkeypatch, asked):
    traffic.save_rows([{"messages": [{"role": "user", "content": "hello"}]}], tmp_path / "chat.jsonl", 8)
    monkeypatch.setattr("sglang_dspark.bench.server.without_hub", contextlib.nullcontext)  # the paths alone must do
    server = Server(dspark.url)
    assert server.tokenizer_path().is_dir()
    monkeypatch.setattr(Server, "model_name", lambda self: "nobody/served-under-this-name")
    load = run_load(server, tmp_path / "chat.jsonl", 1, 1, stop_at_end=False)
    assert load["completed"] == 1 and asked == []


@pytest.mark.parametrize("name", ["nobody/no-such-tokenizer", "/srv/models/on-the-servers-machine", "a b c"])
def test_a_tokenizer_that_is_not_here_is_refused_with_the_flag_and_without_a_network(name, dspark, tmp_path, asked):
    with pytest.raises(ServerError, match="--tokenizer"):
        run_load(Server(dspark.url, tokenizer=name), tmp_path / "none.jsonl", 1, 1, stop_at_end=False)
    assert asked == []


def test_what_the_generator_would_fetch_on_its_own_is_not_fetched(asked):
    from transformers import AutoTokenizer

    with without_hub(), pytest.raises(OSError):
        AutoTokenizer.from_pretrained("nobody/no-such-tokenizer")
    assert asked == []


def test_settings_are_put_back_even_where_a_benchmark_fails(dspark, monkeypatch):
    dspark.configure(verify_mode="static", min_window=0, max_window=2)

    def fail(*args, **kwargs):
        assert dspark.get("/dspark/status")["ranks"][0]["config"]["verify_mode"] == "off", "the arm was not set"
        raise ServerError("planted")

    monkeypatch.setattr("sglang_dspark.bench.bracket.run_load", fail)
    with pytest.raises(ServerError, match="planted"):
        execute(plan(), {"chat": [{"messages": []}]}, Server(dspark.url), print)
    config = dspark.get("/dspark/status")["ranks"][0]["config"]
    assert (config["verify_mode"], config["max_window"]) == ("static", 2)


def test_one_command_measures_a_server_and_leaves_a_receipt(dspark, tmp_path):
    dspark.configure(verify_mode="compact", min_window=0, max_window=None)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"class": "chat", "messages": [{"role": "user", "content": f"The river ran {i}"}]}) + "\n"
            for i in range(4)
        )
    )
    arguments = [
        "bench",
        "--url",
        dspark.url,
        "--control",
        "static-2",
        "--arm",
        "compact+min-1",
        "--prompts",
        str(prompts),
        "--concurrency",
        "2",
        "--requests",
        "4",
        "--output-tokens",
        "12",
        "--out",
        str(tmp_path / "receipt"),
    ]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    body = json.loads((tmp_path / "receipt/receipt.json").read_text())
    assert body["plan"] == json.loads(
        json.dumps(
            plan_to_dict(
                plan(control=parse_arm("static-2"), treatments=(parse_arm("compact+min-1"),), output_tokens=12)
            )
        )
    )
    (measured,) = body["cells"]
    assert [run["arm"] for run in measured["runs"]] == ["static-2", "compact+min-1", "static-2"]
    for run in measured["runs"]:
        assert run["load"]["completed"] == 4 and run["load"]["total_output_tokens"] == 12 + 7 + 15 + 10
        assert 1 <= run["steps"]["tokens_per_step"] <= 5 and run["steps"]["step_ms"] > 0
    assert (
        measured["runs"][0]["steps"]["windows"][3:] == [0, 0] and sum(measured["runs"][1]["steps"]["windows"][1:]) > 0
    )
    text = (tmp_path / "receipt/receipt.md").read_text()
    assert "Rule, written before the run" in text and "compact+min-1" in text
    assert (tmp_path / "receipt/chat.png").stat().st_size > 5000
    assert dspark.get("/dspark/status")["ranks"][0]["config"]["verify_mode"] == "compact"
