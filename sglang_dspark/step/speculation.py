"""Speculation as it is set now: mode, rule, policy and bounds, switchable between steps, and what they learn."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from dspark_scheduler import POLICIES as SCHEDULED
from dspark_scheduler import AdditiveCostModel, Fingerprint, OnlineCostModel, Planner, Static
from sglang_dspark.contract.compatibility import installed_version
from sglang_dspark.learning.cache import can_be_entered, from_cache
from sglang_dspark.learning.confidence import Calibration, Recorder
from sglang_dspark.settings.config import COST_KEYWORDS, DSparkConfig, check_draft
from sglang_dspark.step.measure import measure
from sglang_dspark.step.policies import POLICIES, Policy
from sglang_dspark.step.types import UNBOUNDED, Bounds

if TYPE_CHECKING:
    from sglang_dspark.learning.meter import Meter
    from sglang_dspark.learning.report import Report
    from sglang_dspark.step.drafter import Drafter
    from sglang_dspark.step.verifier import Verifier

logger = logging.getLogger(__name__)

DEFAULT_POLICY = "causal"
SAVE_EVERY = 1024  # decode steps between two saves of what was learned


class Speculation:
    """What a worker asks at every step: `policy` (the one in force) and `bounds`; and who learns from its reports.

    Args:
        config: as the server was started.
        drafter: of this rank; its draft decides which policies are possible.
        fingerprint: of target, draft and machine, for cost and calibration files.
        learning: whether this rank writes files (the first one does).

    Raises:
        ConfigError: a policy or mode that the draft cannot serve.
    """

    def __init__(self, config: DSparkConfig, drafter: Drafter, fingerprint: Fingerprint, *, learning: bool) -> None:
        self.drafter, self.fingerprint, self.learning = drafter, fingerprint, learning
        self.folder = state_folder(fingerprint)
        self.calibrations = {
            head: Calibration(drafter.gamma, head, config.calibration, drafter.folder, fingerprint)
            for head in ("main", "hidden")
        }
        self._cached = can_be_entered(self.folder)
        for calibration in self.calibrations.values() if self._cached else ():
            calibration.restore(self.folder)
        self.cost: AdditiveCostModel | OnlineCostModel | None = None
        self._policies: dict[str, Policy] = {}
        if config.record is not None and learning:
            self.calibrations["main"].recorder = Recorder(Path(config.record), drafter.gamma)
        self.config = self.started = config  # what cannot be switched is read from `started`
        self.not_saved: str | None = None  # why the last attempt to write what was learned failed
        check_draft(config, drafter.config)

    def measure(self, verifier: Verifier, max_requests: int) -> None:
        """Find the step's cost: from the file that was given, the cache, or by timing forwards now."""
        keyword = self.started.cost_model if self.started.cost_model in COST_KEYWORDS else None
        if keyword is None:
            self.cost = AdditiveCostModel.load(self.started.cost_model, self.fingerprint)
            return
        path = self.folder / "cost.json"
        # The first rank looks for the file and tells the others: on two nodes only one may have it.
        found = self.drafter.ranks.json(self._cached_cost(path) if keyword == "auto" else {})
        if not found:
            prior = measure(self.drafter, verifier, max_requests=max_requests)
            self._attempt(lambda: prior.save(path, self.fingerprint))
        else:
            prior = AdditiveCostModel.from_dict(found)
        self.cost = OnlineCostModel(prior)

    def _cached_cost(self, path: Path) -> dict:
        """What an earlier start measured or learned; nothing where it cannot be read."""
        found: dict = {}

        def take_over(path: Path) -> None:
            found.update(AdditiveCostModel.load(path, self.fingerprint).to_dict())

        if self._cached:
            from_cache(path, take_over, "the step's cost")
        return found

    @property
    def policy(self) -> Policy:
        """The one in force."""
        name = "static" if self.config.verify_mode in ("static", "off") else self.policy_name
        if name not in self._policies:
            self._policies[name] = self._made(name)
        return self._policies[name]

    @property
    def calibration(self) -> Calibration:
        """Of the confidence that sizes the windows now."""
        return self.policy.calibration

    @property
    def policy_name(self) -> str:
        """The window policy in force: the configured one, or the default."""
        return self.config.window_policy or DEFAULT_POLICY

    @property
    def caps(self) -> bool:
        """Whether whole blocks are verified and windows only cut what is emitted."""
        return self.config.verify_mode == "cap-accept"

    @property
    def bounds(self) -> Bounds:
        """Acceptance rule and window bounds of requests that ask for none of their own; windows are 0 in mode `off`."""
        c = self.config
        if c.verify_mode == "off":
            return Bounds(c.accept_rule, 0, 0)
        return Bounds(c.accept_rule, c.min_window, UNBOUNDED if c.max_window is None else c.max_window)

    def learn(self, report: Report, meter: Meter) -> None:
        """What a step brought: its survival for the step after next, a lesson for the calibration, and its counts."""
        record = report.record
        meter.settings(self.config)
        confidence = record.policy.learn(report)
        shape, verified = record.policy.planner.shape, int(report.windows.sum())
        drawn = int(shape.slots(record.requests, record.block_size, verified))
        record.slots, record.rows = max(drawn, 1) if record.block_size else 0, report.rows
        record.predicted = self._predicted(record)
        meter.count(report, confidence)

    def learn_time(self, record, meter: Meter) -> None:
        """What a step took, once that is known; its counts came before."""
        meter.time(record)
        seconds, parts = record.times.seconds, record.times.part_seconds()
        if seconds is None or not isinstance(self.cost, OnlineCostModel):
            return
        self.cost.observe(
            record.requests,
            record.rows,
            record.context,
            seconds,
            slots=record.slots,
            length=record.plan.draft_length,
            block_seconds=parts.get("backbone"),
            head_seconds=parts.get("draft") if self.drafter.graph is None else None,
        )

    def switch(self, changes: dict) -> DSparkConfig:
        """Take over new settings between two steps.

        Raises:
            ConfigError: settings that contradict each other or that the draft cannot serve; nothing changes then.
        """
        config = self.config.changed(changes)
        if config.verify_mode != "off":  # which reads neither
            config = config.changed({"cost_model": self.started.cost_model, "calibration": self.started.calibration})
        check_draft(config, self.drafter.config)
        self.config = config
        for policy in self._policies.values():
            policy.planner.max_step_seconds = self._ceiling
        logger.info("speculation is now %s", config)
        return config

    def save(self) -> None:
        """Write what was learned, so that the next server starts with it."""
        self._attempt(self._write)

    def _made(self, name: str) -> Policy:
        hidden = name in ("lagged", "ahead") and self.drafter.config.has_hidden_confidence
        # A CPU samples no slot that nobody verifies where the windows are known first; an accelerator draws whole blocks.
        drafting = ("windows" if name == "ahead" else "depth") if self.drafter.short_blocks else "block"
        assert self.cost is not None  # measured before the server is ready
        planner = Planner(
            self.drafter.gamma,
            self.cost,
            SCHEDULED.get(name, Static()),
            drafting=drafting,
            max_step_seconds=self._ceiling,
        )
        calibration = self.calibrations["hidden" if hidden else "main"]
        return POLICIES[name](planner, calibration, self.drafter.head, short_blocks=self.drafter.short_blocks)

    @property
    def _ceiling(self) -> float | None:
        return None if self.config.max_step_ms is None else self.config.max_step_ms / 1000

    def _predicted(self, record) -> float:
        """The seconds that the cost model gives the step that ran, whatever the plan was; 0 without a cost model."""
        if self.cost is None:
            return 0.0
        draft = self.cost.draft_seconds(record.requests, record.slots, record.plan.draft_length)
        return float(self.cost.step_seconds(record.requests, record.rows, record.context) + draft)

    def _attempt(self, write: Callable[[], None]) -> None:
        """A full disk or a lost folder costs the next server its start, never this one a request: the reason is logged
        when it changes, and stands in the status."""
        if not self.learning:
            return
        reason = None
        try:
            write()
        except OSError as error:
            reason = str(error)
            if reason != self.not_saved:
                logger.error("what was learned could not be saved, so the next server starts without it: %s", reason)
        self.not_saved = reason

    def _write(self) -> None:
        for calibration in self.calibrations.values():
            calibration.save(self.folder)
            if calibration.recorder is not None:
                calibration.recorder.write()
        if isinstance(self.cost, OnlineCostModel):
            self.cost.save(self.folder / "cost.json", self.fingerprint)


def state_folder(fingerprint: Fingerprint) -> Path:
    """Where cost and calibration of exactly this server are kept."""
    digest = hashlib.blake2b(repr(fingerprint).encode(), digest_size=8).hexdigest()
    return Path(platformdirs.user_cache_dir("sglang-dspark")) / "servers" / digest


def fingerprint_of(model_config, draft_folder: Path, gamma: int, device: str, tp: int) -> Fingerprint:
    """The fingerprint of a running server."""
    return Fingerprint(
        target=checkpoint_digest(Path(model_config.model_path)),
        draft=checkpoint_digest(draft_folder),
        gamma=gamma,
        device=device,
        dtype=str(model_config.dtype).removeprefix("torch."),
        tp=tp,
        engine=f"sglang {installed_version()}",
    )


def checkpoint_digest(folder: Path) -> str:
    """A quick digest of a checkpoint: its config, and each weight file's name, size and both ends."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as stream:
            digest.update(stream.read(1 << 16))
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read())
    return digest.hexdigest()
