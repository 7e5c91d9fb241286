"""The planner of a running server: one object that a worker asks before a step and tells after it.

plan = planner.plan(step, request_ids, context_tokens, low, high)     # before drafting, on the host
w    = planner.policy.windows(plan, survival)                         # or the device's, from the plan's numbers
planner.publish(step, request_ids, survival)                          # this step's survival, for step + 2
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from .cost import CostModel
from .plan import DraftShape, Plan, Terms
from .policies import Policy
from .probes import PROBES, Prober, ProbeRule
from .relay import LaggedSurvival, SurvivalRelay

PRIOR_CONFIDENCE = 0.7  # what a position is worth before anything was seen
PRIOR_ROWS = 4.0  # as if so many requests had shown it
MEAN_ROWS = 512.0  # requests over which the running mean is taken


class Planner:
    """Paper §5.2-5.3 with a live cost model, bounds per request, and an off-switch.

    Args:
        gamma: block size.
        cost: seconds of a step; one that can `observe` is also probed.
        policy: one of `policies`.
        drafting: what the draft computes: "block", "depth" or "windows" (see `DraftShape`).
        max_step_seconds: ceiling on a step, for an inter-token latency goal; may be changed between steps.
        relay: where survival waits; None makes one with a lag of two steps.
        probes: how often to try something else; None never does.

    Raises:
        ValueError: unknown drafting, or gamma below 1.
    """

    def __init__(
        self,
        gamma: int,
        cost: CostModel,
        policy: Policy,
        *,
        drafting: str = "block",
        max_step_seconds: float | None = None,
        relay: SurvivalRelay | None = None,
        probes: ProbeRule | None = PROBES,
    ) -> None:
        self.gamma, self.cost, self.policy = gamma, cost, policy
        self.shape = DraftShape(drafting, gamma)
        self.max_step_seconds = max_step_seconds
        self.relay = SurvivalRelay() if relay is None else relay
        self.running_mean = PRIOR_CONFIDENCE ** np.arange(1.0, gamma + 1.0)
        self._mean_rows = PRIOR_ROWS
        self._prober = None if probes is None or not policy.chooses else Prober(gamma, probes)
        self._terms: Terms | None = None
        self._plan: Plan | None = None

    def plan(
        self,
        step: int,
        request_ids: Sequence[Hashable],
        context_tokens: float = 0,
        low: int | np.ndarray = 0,
        high: int | np.ndarray | None = None,
    ) -> Plan:
        """Decide what step `step` may verify, or that it should not draft.

        Args:
            step: number of the step, rising.
            request_ids: [R] keys of request and generation, R >= 1.
            context_tokens: tokens of context of all requests together.
            low, high: bounds of the windows, numbers or int64 [R] (a high of 0: drafting is disabled); a maximum beats
                a minimum, None is γ.
        """
        requests = len(request_ids)
        terms = Terms.of(self.cost, self.shape, requests, low, high, context_tokens, self.max_step_seconds)
        evidence = self.relay.read(step, request_ids, self.gamma, self.policy.history(requests))
        self._learn_mean(evidence)
        plan = self.policy.plan(evidence, terms, self.running_mean)
        if self._prober is not None:
            learns = hasattr(self.cost, "observe")
            plan = self._prober.replace(plan, terms, learns, lambda t: self._probe(evidence, t))
        self._terms, self._plan = terms, plan
        return plan

    def adopt(self, numbers: np.ndarray) -> Plan:
        """The last plan with the `Plan.numbers` of the first rank, int64 [2 + 3R], in the place of this rank's own."""
        if self._terms is None or self._plan is None:
            raise ValueError("nothing was planned yet")
        return self.policy.priced(self._plan.with_numbers(numbers), self._terms)

    def publish(self, step: int, request_ids: Sequence[Hashable], survival: np.ndarray) -> None:
        """File this step's survival [R, k], 0 <= k <= γ; it is read two steps from now.

        A position that was not drafted falls as the running mean does there. No positions: nothing is filed.
        """
        known = survival.shape[1]
        if known == 0:
            return
        if known < self.gamma:
            falls = self.running_mean[known:] / max(self.running_mean[known - 1], 1e-9)
            survival = np.concatenate([survival, survival[:, -1:] * np.minimum(falls, 1.0)], axis=1)
        self.relay.publish(step, request_ids, survival)

    def _probe(self, evidence: LaggedSurvival, terms: Terms) -> Plan:
        return replace(self.policy.plan(evidence, terms, self.running_mean), probe=True)

    def _learn_mean(self, evidence: LaggedSurvival) -> None:
        """Move the running mean per position; from lagged rows only, so that it cannot anticipate either."""
        youngest = evidence.values[0]
        known = ~np.isnan(youngest[:, 0])
        rows = int(np.count_nonzero(known))
        if rows == 0:
            return
        mean = (youngest if rows == len(known) else youngest[known]).mean(axis=0, dtype=np.float64)
        self._mean_rows = min(self._mean_rows + rows, MEAN_ROWS)
        self.running_mean = self.running_mean + (mean - self.running_mean) * min(1.0, rows / self._mean_rows)
