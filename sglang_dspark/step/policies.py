"""How one step's drafts and windows come about: one small class per policy, and what each may read.

A policy is asked twice. `budget` runs before the draft and decides whether to draft at all; `draft` runs on the block's
states and returns the drafted tokens with their windows. The order of the lines in each `draft` is the
non-anticipation argument: what sizes the windows stands above the sampling, or reads only prefixes (`causal`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dspark_kernels.types import BlockDraft
from dspark_scheduler import Budget, ContextSurvival, Planner, allocate_windows, plan_budget, survival
from sglang_dspark.learning.confidence import Calibration
from sglang_dspark.learning.step_cost import ServerCost

if TYPE_CHECKING:
    from sglang_dspark.step.drafter import Drafter
    from sglang_dspark.step.types import Step


@dataclass
class Drafted:
    """A step's block: tokens and laws, windows int64 [R] on the host, and the confidence behind them (None: none)."""

    block: BlockDraft
    windows: np.ndarray
    logits: np.ndarray | None = None  # float [R, k] raw confidence of the drafted tokens


class StaticWindows:
    """Every request verifies the same number of drafts, as far as its limits allow."""

    drafting = "depth"
    head = "main"

    def __init__(self, drafter: Drafter, calibration: Calibration) -> None:
        self.drafter, self.calibration = drafter, calibration

    def budget(self, step: Step) -> Budget:
        length = int(step.high.max())
        return Budget(int(step.high.sum()), float(step.size), 0.0, length == 0, length)

    def draft(self, step: Step, states: torch.Tensor, budget: Budget) -> Drafted:
        # Nothing is decided by confidence here; whole blocks are what calibration learns most from.
        block, logits = self.drafter.propose(states, step, budget.draft_length)
        return Drafted(block, step.high, logits)

    def publish(self, step: Step, drafted: Drafted | None) -> None:
        """Nothing waits for survival here."""


class PlannedWindows:
    """What the load-aware policies share: a planner, calibrated confidence, and the relay that is two steps late."""

    drafting = "depth"  # the draft computes one length for all requests
    head = "main"  # which confidence sizes the windows

    def __init__(
        self, drafter: Drafter, planner: Planner, cost: ServerCost, calibrations: dict[str, Calibration]
    ) -> None:
        self.drafter, self.planner, self.cost = drafter, planner, cost
        self.calibration = calibrations[self.head]

    def budget(self, step: Step) -> Budget:
        """From survival at least two steps old: whether to draft, how far, and how many drafts may be verified."""
        self.cost.requests = step.size
        own = self.planner.budget(step.number, step.ids, step.context, min_window=step.low, max_window=step.high)
        self.planner.last_budget = self.drafter.ranks.budget(own)
        return self.planner.last_budget

    def publish(self, step: Step, drafted: Drafted | None) -> None:
        """File this step's survival for the step after next; a position that was not drafted takes the running mean."""
        if drafted is None or drafted.logits is None:
            return
        values = self.survival(step, drafted.logits)
        missing = self.planner.gamma - values.shape[1]
        if missing:
            mean = self.planner.running_mean
            steps = mean[values.shape[1] :] / max(mean[values.shape[1] - 1], 1e-9)
            values = np.concatenate([values, values[:, -1:] * np.minimum(steps, 1.0)], axis=1)
        self.planner.publish(step.number, step.ids, values)

    def survival(self, step: Step, logits: np.ndarray) -> np.ndarray:
        return survival(self.calibration.conditional(logits, step.greedy))


class CausalWindows(PlannedWindows):
    """Budget from two steps ago, ranked by this step's survival (paper, section 5.2): fresh ranking, no host search.

    Draft k is admitted by its rank among survivals, and its own survival reads only the drafts before it.
    """

    def draft(self, step: Step, states: torch.Tensor, budget: Budget) -> Drafted:
        block, logits = self.drafter.propose(states, step, budget.draft_length)
        windows = self.drafter.ranks.numbers(self.planner.windows(self.survival(step, logits)))
        return Drafted(block, windows, logits)


class LaggedWindows(PlannedWindows):
    """Budget and windows from two steps ago: known before the draft runs.

    Where a confidence reads the states alone, the head samples only what is verified; otherwise it samples up to the
    longest window for all, because the confidence of a slot needs the token before it.
    """

    @property
    def head(self) -> str:
        return "hidden" if self.drafter.config.has_hidden_confidence else "main"

    def draft(self, step: Step, states: torch.Tensor, budget: Budget) -> Drafted:
        windows = self.drafter.ranks.numbers(self.planner.windows())
        length = int(windows.max())
        if self.head == "hidden":
            logits = self.drafter.hidden_confidence(states).cpu().numpy()
            return Drafted(self.drafter.sample(states, step, length, windows), windows, logits)
        block, logits = self.drafter.propose(states, step, length)
        return Drafted(block, windows, logits if length else None)


class AheadWindows(PlannedWindows):
    """Budget and windows from this step's survival, which the block's states give before any token is sampled.

    Only drafts whose confidence reads no drafted token can do this. Whether to run the draft at all is still decided
    from two steps ago: the states cost a forward.
    """

    drafting = "windows"
    head = "hidden"

    def draft(self, step: Step, states: torch.Tensor, budget: Budget) -> Drafted:
        logits = self.drafter.hidden_confidence(states).cpu().numpy()
        evidence = ContextSurvival(self.survival(step, logits), reads_drafted_tokens=False)
        high = np.minimum(step.high, budget.draft_length)
        low = np.minimum(np.maximum(step.low, self.planner.probe_window), high)  # a probe is one for every request
        plan = plan_budget(
            evidence,
            self.cost,
            min_window=low,
            max_window=high,
            context=step.context,
            max_step_seconds=self.planner.max_step_seconds,
            drafting="windows",
            block=budget.draft_length,
            allow_skip=False,
        )
        windows = self.drafter.ranks.numbers(
            allocate_windows(evidence.values, plan.tokens, min_window=low, max_window=high)
        )
        block = self.drafter.sample(states, step, int(windows.max()), windows)
        return Drafted(block, windows, logits)


POLICIES = {"causal": CausalWindows, "lagged": LaggedWindows, "ahead": AheadWindows}
