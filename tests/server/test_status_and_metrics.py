"""What the server tells of itself is true: status and metrics agree, divide by what they say, and guard what they guard.

Bug classes: a count made twice or lost between the step, the status and /metrics; a settings route that is open to other
sites' pages or to endless bodies; a server that loses what it learned, or takes new work, while it ends.
The sums are checked against the token counts that the clients were given, so a step that is counted twice or not at all
cannot pass.
"""

from __future__ import annotations

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sglang_dspark.serving.metrics import METRICS
from sglang_dspark.serving.routes import MAX_BODY
from tests.server.live import wait_for_refusal

KEY = {"Authorization": "Bearer the-admin-key"}
DOC = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def configure(server, expect: int = 200, headers: dict | None = None, **request) -> dict:
    answer = httpx.post(
        server.url + "/dspark/config", headers=KEY if headers is None else headers, timeout=60, **request
    )
    assert answer.status_code == expect, answer.text
    return answer.json()


def status(server) -> dict:
    return server.get("/dspark/status")["ranks"][0]


def metrics(server) -> dict[str, float]:
    """Sums over all labels, by name."""
    sums: dict[str, float] = {}
    for line in httpx.get(server.url + "/metrics/", follow_redirects=True).text.splitlines():
        if line.startswith("dspark_") and "_bucket" not in line:
            name, _, value = line.replace("{", " {", 1).partition(" ")
            sums[name] = sums.get(name, 0) + float(value.rsplit(" ", 1)[-1])
    return sums


@pytest.mark.parametrize(
    "mode", [{"verify_mode": "static"}, {"verify_mode": "compact", "min_window": 1}], ids=lambda m: m["verify_mode"]
)
def test_what_was_counted_is_what_the_clients_were_given(watched, mode):
    configure(watched, json={"min_window": 0, **mode})
    before = status(watched)
    answers = watched.generate(
        [f"The river ran {i}" for i in range(10)], max_new_tokens=24, ignore_eos=True, temperature=1
    )
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [24] * 10
    after = status(watched)
    gained = {name: after["tokens"][name] - before["tokens"][name] for name in after["tokens"]}
    assert gained["committed"] == 10 * 23, "the first token of each comes from the prefill"
    assert gained["committed"] == gained["accepted"] + after["requests"] - before["requests"]
    assert gained["accepted"] <= gained["verified"] <= gained["drafted"] <= gained["offered"]
    assert gained["accepted"] > 0, "the mode was not exercised"


def test_status_adds_up_and_metrics_say_the_same(watched):
    time.sleep(1)  # what the server has counted is copied to /metrics a few times a second
    told, scrape = status(watched), metrics(watched)
    tokens, acceptance = told["tokens"], told["acceptance"]
    assert sum(w * n for w, n in enumerate(told["windows"])) == tokens["verified"]
    assert sum(told["windows"]) == told["requests"]
    assert sum(acceptance["accepted"]) == tokens["accepted"]
    assert told["rows"] - told["padding"] == tokens["verified"] + told["requests"]
    assert acceptance["tried"][0] >= acceptance["accepted"][0] >= acceptance["tried"][1]
    for name in ("verified", "accepted", "offered", "drafted"):
        assert scrape[f"dspark_drafts_{name}_total"] == tokens[name]
    assert scrape["dspark_tokens_committed_total"] == tokens["committed"]
    assert scrape["dspark_steps_total"] == told["steps"] and scrape["dspark_step_seconds_count"] == told["timed_steps"]
    assert scrape["dspark_step_seconds_sum"] == pytest.approx(told["seconds"]["step"])
    assert scrape["dspark_settings_changes_total"] == told["settings_changes"] >= 2
    assert scrape["dspark_settings"] == 1
    assert {m.name for m in METRICS if m.kind != "histogram"} <= set(scrape)


def test_the_status_holds_what_the_page_draws(watched):
    told = status(watched)
    assert sum(row["steps"] for row in told["history"]) <= told["steps"] and told["history"]
    assert {row["up_to"] for row in told["by_load"]} & {8, 16}
    assert told["cost"]["recent"] and len(told["cost"]["curve"]["rows"]) == len(told["cost"]["curve"]["seconds"])
    assert [len(f["tokens_per_second"]) for f in told["cost"]["forecast"]] == [told["gamma"] + 1] * len(
        told["cost"]["forecast"]
    )
    assert "The river ran" not in str(told), "no text of a prompt"


def fields(value, inside: str = "") -> set[str]:
    """Names of all objects' fields, except where names are data (kinds of requests, products of the target)."""
    if isinstance(value, list):
        return set().union(*(fields(item, inside) for item in value))
    if not isinstance(value, dict):
        return set()
    names = set() if inside in ("calibration_error", "reliability", "padded") else set(value)
    return names.union(*(fields(item, name) for name, item in value.items()))


def test_every_field_of_the_status_is_documented(watched):
    body = watched.get("/dspark/status")
    assert body["may_configure"] is True and body["needs_key"] is True
    documented = set(re.findall(r"[a-z_0-9]+", DOC))
    assert fields(body) - documented == set()


def test_health_by_generation_works_under_speculation(watched):
    assert httpx.get(watched.url + "/health_generate", timeout=60).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["no key", "another key"])
def test_settings_need_the_admin_key(watched, headers):
    before = status(watched)["config"]
    configure(watched, 401, headers, json={"verify_mode": "off"})
    assert status(watched)["config"] == before


def test_another_sites_page_cannot_change_settings_even_with_the_key(watched):
    configure(watched, 403, {**KEY, "Origin": "http://elsewhere.example"}, json={"verify_mode": "off"})
    configure(watched, 200, {**KEY, "Origin": watched.url}, json={"verify_mode": "compact"})


@pytest.mark.parametrize(
    ("body", "code"), [(b"x" * (MAX_BODY + 1), 413), (b"[1]", 400), (b"{", 400), (b"", 400), (b"\xff\xfe", 400)]
)
def test_a_body_that_is_no_small_object_is_refused(watched, body, code):
    assert configure(watched, code, content=body)["error"]["type"] == "dspark_config"


def test_a_server_told_to_end_finishes_what_runs_refuses_what_comes_and_keeps_what_it_learned(watched, state):
    configure(watched, json={"verify_mode": "compact", "min_window": 1})
    with ThreadPoolExecutor(1) as background:
        steps = status(watched)["steps"]
        running = background.submit(
            watched.generate, ["The river ran"] * 3, max_new_tokens=1800, ignore_eos=True, temperature=1
        )
        while status(watched)["steps"] == steps:
            assert not running.done()
        watched.process.send_signal(signal.SIGTERM)
        refused = wait_for_refusal(watched.url)
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "shutting_down"
        assert [a["meta_info"]["completion_tokens"] for a in running.result()] == [1800] * 3
    assert watched.process.wait(60) == 0
    saved = {path.name for path in state.rglob("*.json")}
    assert "cost.json" in saved and any(name.startswith("calibration") for name in saved)
