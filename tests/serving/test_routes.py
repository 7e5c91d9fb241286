"""What the server says of itself, before a server runs: the page's own source, who may switch settings, metrics and their page.

Bug classes: a page that needs the network or keeps a key, a settings route that is open to the network, a metric that the
documentation does not know, a server that takes new work while it ends.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_dspark.serving.metrics import EXTRA_LABELS, METRICS
from sglang_dspark.serving.operation import Draining
from sglang_dspark.serving.routes import PAGE, may_configure


def test_the_page_is_one_file_that_names_no_other_place():
    text = PAGE.read_text()
    assert not re.findall(
        r"""(?:src|href)\s*=\s*["'](?!data:)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", text
    )
    assert len(text) < 60_000


def test_the_page_keeps_no_key_and_writes_no_markup_from_data():
    text = PAGE.read_text()
    for word in (
        "localStorage",
        "sessionStorage",
        "document.cookie",
        "indexedDB",
        "innerHTML",
        "insertAdjacentHTML",
        "eval(",
    ):
        assert word not in text


@pytest.mark.parametrize(
    ("host", "keys", "open_"),
    [
        ("127.0.0.1", {}, True),
        ("localhost", {}, True),
        ("::1", {}, True),
        ("0.0.0.0", {}, False),
        ("192.0.2.1", {}, False),
        ("::", {}, False),
        ("a.host.name", {}, False),
        ("0.0.0.0", {"admin_api_key": "k"}, True),
        ("0.0.0.0", {"api_key": "k"}, True),
    ],
)
def test_settings_are_closed_beyond_this_machine_unless_there_is_a_key(host, keys, open_):
    arguments = SimpleNamespace(**{"host": host, "admin_api_key": None, "api_key": None, **keys})
    assert may_configure(arguments) is open_


DOC = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_every_metric_is_documented_with_its_labels_and_no_other_is():
    rows = {name: labels for name, labels in re.findall(r"^\| `(dspark_\w+)` \|([^|]*)\|", DOC, re.MULTILINE)}
    assert set(rows) == {metric.name for metric in METRICS}
    for metric in METRICS:
        for label in (*([metric.label] if metric.label else []), *EXTRA_LABELS.get(metric.name, ())):
            assert f"`{label}`" in rows[metric.name], (metric.name, label)


def test_a_draining_server_refuses_new_work_but_answers_questions_about_itself():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["method"])

    async def send(message):
        seen.append(message.get("status"))

    for ending, method in ((False, "POST"), (True, "GET"), (True, "POST")):
        asyncio.run(Draining(app, lambda ending=ending: ending)({"type": "http", "method": method}, None, send))
    assert seen == ["POST", "GET", 503, None]
