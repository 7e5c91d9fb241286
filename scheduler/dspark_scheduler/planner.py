"""The planner of a running server: one object that a worker asks before a step and tells after it.

budget = planner.budget(step, request_ids, context_tokens)     # before drafting, on the host
w      = planner.windows(survival)                             # or the kernel's allocate_windows with budget.tokens
planner.publish(step, request_ids, survival)                   # this step's survival, for step + 2
planner.observe_step(...); planner.observe_acceptance(...)     # what it cost, what was accepted
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .budget import Budget, best_budget, evidence_values
from .cost import CostModel
from .online_calibration import OnlineCalibrator
from .online_cost import OnlineCostModel
from .policies import POLICIES
from .relay import ContextSurvival, LaggedSurvival, SurvivalRelay
from .skip import DRAFT_PROBES, NEAR_PROBES, PLAIN_PROBES, ProbeClock, ProbeSchedule
from .windows import allocate_windows, window_bounds

PRIOR_CONFIDENCE = 0.7  # what a position is worth before anything was seen
PRIOR_ROWS = 4.0  # as if so many requests had shown it
MEAN_ROWS = 512.0  # requests over which the running mean is taken
LAGGED_STEPS = 8  # steps whose mean predicts a request's survival under policy `lagged`
CASE_ROWS = 32  # rows of survival that a budget should rest on; fewer requests make up for it by older steps


class Planner:
    """Paper §5.2-5.3 with a live cost model, bounds per request, and an off-switch.

    Args:
        gamma: block size.
        cost: seconds of a step; an OnlineCostModel learns from `observe_step`.
        policy: "lagged", "causal" or "ahead" (see `policies`).
        drafting: what the draft computes: "block", "depth" or "windows" (see `best_budget`).
        relay: where survival waits; None makes one with a lag of two steps.
        calibrator: learns from `observe_acceptance`; None if confidence is calibrated elsewhere or not at all.
        min_window, max_window: bounds for every request; may be changed between steps.
        max_step_seconds: ceiling on a step, for an inter-token latency goal; may be changed between steps.
        probes: how rarely to draft while plain decoding wins.
        plain_probes: how rarely to decode plainly while drafting wins; only if the cost model can `observe` it.
        near_probes: how rarely to verify one draft per request more, or less, than the plan says; likewise.

    Raises:
        ValueError: unknown policy, or gamma below 1.
    """

    def __init__(
        self,
        gamma: int,
        cost: CostModel,
        *,
        policy: str = "causal",
        drafting: str = "block",
        relay: SurvivalRelay | None = None,
        calibrator: OnlineCalibrator | None = None,
        min_window: int = 0,
        max_window: int | None = None,
        max_step_seconds: float | None = None,
        probes: ProbeSchedule = DRAFT_PROBES,
        plain_probes: ProbeSchedule = PLAIN_PROBES,
        near_probes: ProbeSchedule = NEAR_PROBES,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {sorted(POLICIES)}")
        if gamma < 1:
            raise ValueError(f"block size {gamma}")
        self.gamma, self.cost, self.policy, self.drafting = gamma, cost, policy, drafting
        self.relay = SurvivalRelay() if relay is None else relay
        self.calibrator = calibrator
        self.min_window, self.max_window, self.max_step_seconds = min_window, max_window, max_step_seconds
        self.running_mean = PRIOR_CONFIDENCE ** np.arange(1.0, gamma + 1.0)
        self.last_budget: Budget | None = None
        self.probe_window = 0  # what every request verifies at least because the last budget is a probe; 0: it is none
        self._mean_rows = PRIOR_ROWS
        self._draft_clock, self._plain_clock = ProbeClock(probes), ProbeClock(plain_probes)
        self._near_clock = ProbeClock(near_probes)
        self._small = False  # whether the last probe was the smaller one of its kind
        self._values: np.ndarray | None = None
        self._low: int | np.ndarray = 0
        self._high: int | np.ndarray = gamma

    def budget(
        self,
        step: int,
        request_ids: Sequence[Hashable],
        context_tokens: float = 0,
        *,
        min_window: np.ndarray | None = None,
        max_window: np.ndarray | None = None,
        context_survival: ContextSurvival | None = None,
    ) -> Budget:
        """Decide what step `step` may verify, or that it should not draft.

        Args:
            step: number of the step, rising.
            request_ids: [R] keys of request and generation, R >= 1.
            context_tokens: tokens of context of all requests together.
            min_window, max_window: [R] bounds of single requests (0 maximum: drafting disabled); the tighter of these
                and the planner's own hold, and a maximum beats a minimum.
            context_survival: this step's survival, for policy "ahead" alone.

        Raises:
            ValueError: policy "ahead" without context_survival, or another policy with it.
        """
        if (self.policy == "ahead") != (context_survival is not None):
            raise ValueError(f"policy {self.policy!r} and context_survival={context_survival is not None} do not fit")
        if context_survival is None:
            history = LAGGED_STEPS if self.policy == "lagged" else -(-CASE_ROWS // len(request_ids))
            evidence = self.relay.read(step, request_ids, self.gamma, history)
            self._learn_mean(evidence)
            evidence = evidence.averaged() if self.policy == "lagged" else evidence
            self._values = evidence_values(evidence, self.running_mean)
        else:
            self._values = evidence_values(context_survival, None)
        self._set_bounds(min_window, max_window)
        plan = self.last_budget = self._probed(self._best(context_tokens, self._low, self._high, True), context_tokens)
        return plan

    def windows(self, survival: np.ndarray | None = None) -> np.ndarray:
        """Windows [R] under the last budget.

        Args:
            survival: [R, γ] of this step for policy "causal"; None for the others, which know all they use.
        """
        budget = self.last_budget
        if budget is None or (self.policy == "causal") != (survival is not None):
            raise ValueError(
                f"windows of policy {self.policy!r} need a budget first"
                f"{' and the survival of this step' if self.policy == 'causal' else ' and nothing else'}"
            )
        values = self._values if survival is None else survival
        if budget.skip_draft:
            return np.zeros(values.shape[-2], np.int64)
        high = np.minimum(self._high, budget.draft_length)
        low = self._low if budget.tokens else 0
        return allocate_windows(values, budget.tokens, min_window=low, max_window=high)

    def publish(self, step: int, request_ids: Sequence[Hashable], survival: np.ndarray) -> None:
        """File this step's survival [R, γ]; it is read two steps from now."""
        self.relay.publish(step, request_ids, survival)

    def observe_step(
        self,
        requests: int,
        tokens: int,
        context: float,
        seconds: float,
        *,
        slots: int = 0,
        draft_seconds: float | None = None,
    ) -> None:
        """Tell what a step took (see `OnlineCostModel.observe`); nothing happens if the cost model is fixed."""
        if isinstance(self.cost, OnlineCostModel):
            self.cost.observe(requests, tokens, context, seconds, slots=slots, draft_seconds=draft_seconds)

    def observe_acceptance(self, logits: np.ndarray, acceptance: np.ndarray, observed: np.ndarray) -> None:
        """Tell what was accepted in a step (see `OnlineCalibrator.observe`), and close the step."""
        if self.calibrator is not None:
            self.calibrator.observe(logits, acceptance, observed)
            self.calibrator.end_step()

    def _best(self, context: float, low: int | np.ndarray, high: int | np.ndarray, allow_skip: bool) -> Budget:
        return best_budget(
            self._values,
            self.cost,
            min_window=low,
            max_window=high,
            context=context,
            max_step_seconds=self.max_step_seconds,
            drafting=self.drafting,
            allow_skip=allow_skip,
        )

    def _probed(self, plan: Budget, context: float) -> Budget:
        """The plan, or now and then another choice, so that no side of a comparison goes stale."""
        requests, learns = self._values.shape[-2], hasattr(self.cost, "observe")
        draft_due, plain_due = self._draft_clock.due(plan.skip_draft), self._plain_clock.due(not plan.skip_draft)
        near_due = self._near_clock.due(not plan.skip_draft)
        self.probe_window = 0
        if draft_due and np.max(self._high) > 0:
            # At least one draft everywhere: confidence without outcomes teaches nothing. Every other probe takes just
            # one: where the believed cost has a false step, the best plan jumps over it and would never refute it.
            self._small = not self._small
            return self._with_window(1, 1 if self._small else self.gamma, context)
        if plain_due and learns and np.max(self._low) == 0:
            seconds = float(self.cost.step_seconds(requests, requests, context))
            return Budget(0, float(requests), seconds, True, 0)
        if near_due and learns:  # a false step may also stand right before or behind the plan
            self._small = not self._small
            window = -(-plan.tokens // requests) - 1 if self._small else plan.tokens // requests + 1
            if 1 <= window <= np.max(self._high) and self._within_ceiling(requests, window, context):
                return self._with_window(window, window, context)
        return plan

    def _within_ceiling(self, requests: int, window: int, context: float) -> bool:
        if self.max_step_seconds is None:
            return True
        seconds = self.cost.step_seconds(requests, requests * (1 + window), context) + self.cost.draft_seconds(
            requests * window, window
        )
        return bool(seconds <= self.max_step_seconds)

    def _with_window(self, least: int, most: int, context: float) -> Budget:
        """A probe: the best plan that drafts and gives every request `least` to `most` drafts where its bounds allow."""
        self.probe_window = least
        high = np.minimum(self._high, most)
        return self._best(context, np.minimum(np.maximum(self._low, least), high), high, False)

    def _set_bounds(self, min_window: np.ndarray | None, max_window: np.ndarray | None) -> None:
        high = self.gamma if self.max_window is None else min(self.max_window, self.gamma)
        if min_window is None and max_window is None:
            self._low, self._high = min(self.min_window, high), high
            return
        wanted = self.min_window if min_window is None else np.maximum(min_window, self.min_window)
        limit = high if max_window is None else np.minimum(max_window, high)
        low, self._high = window_bounds(self._values.shape[-2], self.gamma, wanted, limit)
        self._low = 0 if low is None else low
        self._high = self.gamma if self._high is None else self._high

    def _learn_mean(self, evidence: LaggedSurvival) -> None:
        """Move the running mean per position; from lagged rows only, so that it cannot anticipate either."""
        youngest = evidence.values if evidence.values.ndim == 2 else evidence.values[0]
        known = ~np.isnan(youngest[:, 0])
        rows = int(np.count_nonzero(known))
        if rows == 0:
            return
        mean = (youngest if rows == len(known) else youngest[known]).mean(axis=0, dtype=np.float64)
        self._mean_rows = min(self._mean_rows + rows, MEAN_ROWS)
        self.running_mean = self.running_mean + (mean - self.running_mean) * min(1.0, rows / self._mean_rows)
