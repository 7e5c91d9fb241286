"""A CPU server that runs as an accelerator's does: overlap on, no lengths on the host, reports two steps late.

A plugin that only these tests put on the path asks for it, and keeps a ledger: a line for each step that was launched (its
batch in the engine's own order and what the engine was told of it) and one for each report that was read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.bench.local import LocalServer
from tests.server.live import plugin_path, start

LAG = 2
PLUGIN = """
import json
import os

running = None  # the step that is being launched


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_dspark.cpu.defaults.apply_defaults", keep_overlap, HookType.AFTER)
    backend = "sglang_dspark.cpu.attention.backend.CpuAttentionBackend"
    HookRegistry.register(backend + ".__init__", need_no_lengths, HookType.AFTER)
    HookRegistry.register("sglang_dspark.step.worker.DSparkWorker.step", launch, HookType.AROUND)
    HookRegistry.register("sglang_dspark.step.speculation.Speculation.learn", read, HookType.AROUND)


def keep_overlap(result, args):
    args.disable_overlap_schedule = False
    return result


def need_no_lengths(result, backend, runner):
    backend.needs_cpu_seq_lens = False


def note(**line):
    with open(os.environ["OVERLAP_LEDGER"], "a") as ledger:
        ledger.write(json.dumps(line) + "\\n")


def launch(original, worker, batch, *args):
    global running
    running = worker.steps + 1
    on_host, ids = batch.seq_lens_cpu is not None, [req.rid for req in batch.reqs]
    result = original(worker, batch, *args)
    windows = (result.cap_lens - 1).tolist()
    note(launched=running, ids=ids, lengths=result.accept_lens.tolist(), windows=windows, on_host=on_host)
    running = None
    return result


def read(original, speculation, report, meter):
    record, lengths, windows = report.record, report.lengths.tolist(), report.windows.tolist()
    note(read=record.number, ids=record.ids, lengths=lengths, windows=windows, during=running)
    return original(speculation, report, meter)
"""


@dataclass(frozen=True)
class Row:
    """One request in one step."""

    step: int
    rid: str
    length: int
    window: int


class Ledger:
    """What the plugin has written of the steps after the first `skipped`."""

    def __init__(self, path: Path, skipped: int) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.launched = [line for line in lines if line.get("launched", 0) > skipped]
        self.reports = [line for line in lines if line.get("read", 0) > skipped]

    @property
    def lateness(self) -> set[int]:
        """Steps between a launch and its report, over all reports that a step read (the status reads what is left)."""
        return {line["during"] - line["read"] for line in self.reports if line["during"] is not None}

    def rows(self, lines: list[dict]) -> list[Row]:
        """The rows of launches or of reports, in order."""
        step = "launched" if lines is self.launched else "read"
        return [Row(line[step], *row) for line in lines for row in zip(line["ids"], line["lengths"], line["windows"])]

    def reported(self) -> dict[str, list[Row]]:
        """The rows of the reports by request."""
        found = defaultdict(list)
        for row in self.rows(self.reports):
            found[row.rid].append(row)
        return found


@dataclass(frozen=True)
class Overlapped:
    """The server and its ledger."""

    server: LocalServer
    path: Path

    def ledger(self, before: dict) -> Ledger:
        """What was launched and read since the status `before`; asking for a status reads what is not due yet."""
        self.status()
        return Ledger(self.path, before["steps"])

    def status(self) -> dict:
        """Of the only rank."""
        return self.server.get("/dspark/status")["ranks"][0]


def overlapped(pair, folder: Path, *arguments: str) -> Overlapped:
    """A speculating server with the plugin."""
    ledger = folder / "ledger"
    environment = plugin_path(folder, "overlapped", PLUGIN) | {"OVERLAP_LEDGER": str(ledger)}
    target, draft = pair
    server = start(
        folder / "log", "--model-path", str(target), "--speculative-draft-model-path", str(draft), *arguments,
        environment=environment,
    )  # fmt: skip
    return Overlapped(server, ledger)
