"""Speculation as it is set now: mode, rule, policy and bounds, switchable between steps, and what they need."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import torch

from dspark_scheduler import Fingerprint, Planner
from dspark_scheduler.fingerprint import load_measurement, save_measurement
from sglang_dspark.engine.compatibility import installed_version
from sglang_dspark.learning.confidence import Calibration, Recorder
from sglang_dspark.learning.step_cost import ServerCost
from sglang_dspark.settings.config import COST_KEYWORDS, DSparkConfig, check_draft
from sglang_dspark.step.measure import measure
from sglang_dspark.step.policies import POLICIES, PlannedWindows, StaticWindows
from sglang_dspark.step.types import UNBOUNDED, Bounds

if TYPE_CHECKING:
    from sglang_dspark.step.drafter import Drafter
    from sglang_dspark.step.verifier import Verifier

logger = logging.getLogger(__name__)

COST_KIND = "server-cost"
SAVE_EVERY = 1024  # decode steps between two saves of what was learned


class Speculation:
    """What a worker asks at every step: `windows` (the policy in force) and `bounds`.

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
        for calibration in self.calibrations.values():
            calibration.restore(self.folder)
        self.cost: ServerCost | None = None
        self._planned: dict[str, PlannedWindows] = {}
        self._static = StaticWindows(drafter, self.calibrations["main"])
        if config.record is not None and learning:
            self.calibrations["main"].recorder = Recorder(Path(config.record), drafter.gamma)
        self.config = self.started = config  # what cannot be switched is read from `started`
        self.not_saved: str | None = None  # why the last attempt to write what was learned failed
        self._check(config)

    def measure(self, verifier: Verifier, max_requests: int) -> None:
        """Find the step's cost: from the file that was given, the cache, or by timing forwards now."""
        keyword = self.started.cost_model if self.started.cost_model in COST_KEYWORDS else None
        if keyword is None:
            body = load_measurement(self.started.cost_model, COST_KIND, self.fingerprint)
            self.cost = ServerCost.from_dict(body, learn=False)
            return
        path = self.folder / "cost.json"
        # The first rank looks for the file and tells the others: on two nodes only one may have it.
        body = self.drafter.ranks.json(self._cached_cost(path) if keyword == "auto" else None)
        if body is None:
            body = measure(self.drafter, verifier, max_requests=max_requests)
            self._attempt(lambda: save_measurement(path, COST_KIND, self.fingerprint, body))
        self.cost = ServerCost.from_dict(body, learn=True)

    def _cached_cost(self, path: Path) -> dict | None:
        if not path.is_file():
            return None
        try:
            body = load_measurement(path, COST_KIND, self.fingerprint)
            ServerCost.from_dict(body, learn=True)  # a body that cannot be read is no cost either
            return body
        except ValueError as error:
            logger.warning("the step's cost is measured anew: %s", error)
            return None

    @property
    def windows(self) -> PlannedWindows | StaticWindows:
        if self.config.verify_mode in ("static", "off"):
            return self._static
        return self._policy(self.policy_name)

    @property
    def calibration(self) -> Calibration:
        """Of the confidence that sizes the windows now."""
        return self.windows.calibration

    @property
    def policy_name(self) -> str:
        return self.config.window_policy or default_policy(self.drafter)

    @property
    def bounds(self) -> Bounds:
        c = self.config
        if c.verify_mode == "off":
            return Bounds(c.accept_rule, 0, 0)
        return Bounds(c.accept_rule, c.min_window, UNBOUNDED if c.max_window is None else c.max_window)

    def switch(self, changes: dict) -> DSparkConfig:
        """Take over new settings between two steps.

        Raises:
            ConfigError: settings that contradict each other or that the draft cannot serve; nothing changes then.
        """
        config = self.config.changed(changes)
        if config.verify_mode != "off":  # which reads neither
            config = config.changed({"cost_model": self.started.cost_model, "calibration": self.started.calibration})
        self._check(config)
        self.config = config
        for policy in self._planned.values():
            self._apply_ceiling(policy.planner)
        logger.info("speculation is now %s", config)
        return config

    def save(self) -> None:
        """Write what was learned, so that the next server starts with it."""
        self._attempt(self._write)

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
        if self.cost is not None and self.started.cost_model in COST_KEYWORDS:
            save_measurement(self.folder / "cost.json", COST_KIND, self.fingerprint, self.cost.to_dict())

    def _policy(self, name: str) -> PlannedWindows:
        if name not in self._planned:
            kind = POLICIES[name]
            # For `ahead` the planner only says whether to draft: its windows come from this step's survival too.
            planner = Planner(
                self.drafter.gamma, self.cost, policy="lagged" if name == "lagged" else "causal", drafting=kind.drafting
            )
            self._apply_ceiling(planner)
            self._planned[name] = kind(self.drafter, planner, self.cost, self.calibrations)
        return self._planned[name]

    def _apply_ceiling(self, planner: Planner) -> None:
        ceiling = self.config.max_step_ms
        planner.max_step_seconds = None if ceiling is None else ceiling / 1000

    def _check(self, config: DSparkConfig) -> None:
        check_draft(config, self.drafter.config)


def default_policy(drafter: Drafter) -> str:
    """`ahead` where the host may wait for the block's states (a CPU) and the draft allows it, else `causal`.

    On the CPU of benchmarks/results/steady.md the three have the same mean over 1 to 16 clients (1.19), and only `ahead`
    plans its budget from the very step.
    """
    on_cpu = torch.device(drafter.runner.device).type == "cpu"
    return "ahead" if on_cpu and drafter.config.has_hidden_confidence else "causal"


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
