"""Probes: now and then a step tries what the plan would not choose, because what is never tried is never corrected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import numpy as np

from .plan import Plan, Terms


@dataclass(frozen=True)
class ProbeRule:
    """How often a step is given up to learn.

    Attributes:
        first: steps between two probes.
        longest: that interval doubles whenever as many probes as there are windows have changed nothing, up to this.
        loss: of throughput, predicted and averaged over time, that probes may cost.
        credit: steps' worth of throughput that may be lost in advance, before it was saved up.
        moved_window: the mean window has changed if it moved by so many drafts since the last probe.
        moved_cost: the cost has changed if its logarithm, for the step last probed, moved by so much since.
    """

    first: int = 32
    longest: int = 128
    loss: float = 0.003
    credit: float = 2.5
    moved_window: float = 0.5
    moved_cost: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.longest or not self.loss > 0:
            raise ValueError(f"need 1 <= first <= longest and a loss above 0, got {self}")


PROBES = ProbeRule()


class Prober:
    """One rule instead of a clock for each doubt: all requests get one window, 0 to γ in turn, within their bounds.

    That looks at every part of the cost curve (a plan beside a false step of the curve, or beyond it, never sees it),
    at plain decoding while drafting wins, and at drafting while plain decoding wins, so that confidence is still
    learned. Whose turn it is: the window that waited longest for what it is predicted to lose, so that all windows
    lose alike and dear ones come more rarely. A probe waits until `ProbeRule.loss` has paid for it.

    Args:
        gamma: block size.
        rule: the constants.
    """

    def __init__(self, gamma: int, rule: ProbeRule) -> None:
        self.rule = rule
        self._tried = np.full(gamma + 1, -np.inf)  # the step at which each window was last tried
        self._steps = 0
        self._saved = rule.credit  # steps' worth of throughput that probes may lose
        self._interval = self._wait = rule.first
        self._quiet = 0  # probes since anything changed or the interval was doubled
        self._mean_window = self._mean_then = 0.0
        self._price: Callable[[], float] | None = None  # of the step last probed, as it is believed now
        self._price_then = 0.0

    def replace(self, plan: Plan, terms: Terms, learns: bool, plan_at: Callable[[Terms], Plan]) -> Plan:
        """The plan, or a probe in its place. One call per planned step.

        Args:
            plan: what the policy chose.
            terms: of the step.
            learns: whether the cost learns from the step; if it does not, only drafts teach anything, and only where
                the plan has none.
            plan_at: makes the policy's plan of other terms.
        """
        self._steps += 1
        self._saved += self.rule.loss
        self._mean_window += (plan.tokens / len(plan.low) - self._mean_window) / self.rule.first
        self._wait -= 1
        if self._wait >= 0 or not (learns or plan.skip_draft):
            return plan
        self._notice_changes()
        self._wait = self._interval
        shortest = 1 if plan.skip_draft else 0  # a rest is no news to itself
        windows = range(max(int(terms.low.min()), shortest), int(terms.high.max()) + 1)
        probes = {window: plan_at(terms.at(window)) for window in windows}
        if terms.max_step_seconds is not None:
            probes = {w: probe for w, probe in probes.items() if probe.step_seconds <= terms.max_step_seconds}
        if not probes:
            return plan
        lost = {window: self._lost(probe, plan) for window, probe in probes.items()}
        window = max(probes, key=lambda w: ((self._steps - self._tried[w]) / lost[w], -lost[w]))
        self._saved = min(self._saved, max(self.rule.credit, lost[window]))
        if lost[window] > self._saved:
            return plan
        self._saved -= lost[window]
        self._remember(window, probes[window], terms)
        return probes[window]

    def _lost(self, probe: Plan, plan: Plan) -> float:
        """What a probe takes, less what it brings, in steps of the plan; at least what is saved between two probes."""
        lost = probe.step_seconds / plan.step_seconds - probe.expected_tokens / plan.expected_tokens
        return max(lost, self.rule.loss * self.rule.first)

    def _remember(self, window: int, probe: Plan, terms: Terms) -> None:
        self._tried[window] = self._steps
        tokens, length = range(probe.tokens, probe.tokens + 1), probe.draft_length
        self._price = lambda: float(terms.seconds(tokens, length)[0])
        self._price_then, self._mean_then = self._price(), self._mean_window
        self._quiet += 1
        if self._quiet >= len(self._tried):
            self._quiet, self._interval = 0, min(2 * self._interval, self.rule.longest)

    def _notice_changes(self) -> None:
        """Whether, since the last probe, the plan's choice moved, or what the cost model says about the probe."""
        if self._price is None:
            return
        moved = abs(log(self._price() / self._price_then)) > self.rule.moved_cost
        if moved or abs(self._mean_window - self._mean_then) > self.rule.moved_window:
            self._quiet, self._interval = 0, self.rule.first
