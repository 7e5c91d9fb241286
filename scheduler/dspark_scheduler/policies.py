"""The window policies, once: server, simulator and law tests use these classes. What each reads is its signature.

The condition (paper §4, "non-anticipating"): whether the k-th draft of a request is verified is decided by nothing that
is sampled at k or later in that request. Then the window is, for the acceptance rule, a number fixed in advance, and
the emitted law stays the target's.

A policy is asked twice. `plan` runs before the draft, on survival that is at least two steps old; `windows` says which
drafts the step verifies, as far as the plan has left that open. All of them are without state: what they know is what
they are given.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .budget import plan_budget
from .plan import Plan, Terms
from .relay import ContextSurvival, LaggedSurvival
from .windows import allocate_windows

LAGGED_STEPS = 8  # steps whose mean predicts a request's survival under `lagged`
CASE_ROWS = 32  # rows of survival that a budget should rest on; fewer requests make up for it by older steps


class Policy:
    """What the policies share.

    Attributes:
        reads: the confidence that `windows` needs of this step: "tokens" (of the drafted tokens), "context" (a head
            that reads none), or "nothing".
        chooses: whether the plan depends on survival and cost, so that trying something else may improve it.
    """

    reads = "nothing"
    chooses = True

    def history(self, requests: int) -> int:
        """Steps of evidence that a plan for `requests` requests rests on: so many that it has CASE_ROWS rows."""
        return -(-CASE_ROWS // requests)

    def plan(self, evidence: LaggedSurvival, terms: Terms, mean: np.ndarray) -> Plan:
        """The step's plan.

        Args:
            evidence: survival of `history` steps, at least two steps old.
            terms: of the step.
            mean: [γ] survival of requests without history.

        Raises:
            TypeError: the evidence is a bare array.
        """
        raise NotImplementedError

    def priced(self, plan: Plan, terms: Terms) -> Plan:
        """The plan with its `seconds`, where the policy needs them."""
        return plan

    def windows(self, plan: Plan, survival: np.ndarray | ContextSurvival | None = None) -> np.ndarray:
        """The windows int64 [R] of the step.

        Args:
            plan: of this step.
            survival: of this step, where the plan has left the windows open: [R, k] under `causal`, a ContextSurvival
                under `ahead`, k at least the plan's draft_length.

        Raises:
            TypeError: survival of another type than the policy may read.
            ValueError: survival for a plan whose windows are known.
        """
        if plan.windows is None:
            return self.spend(plan, survival)
        if survival is not None:
            raise ValueError("the windows of this plan are known: they read no survival of this step")
        return plan.windows

    def spend(self, plan: Plan, survival: np.ndarray | ContextSurvival | None) -> np.ndarray:
        """The windows of a plan that has left them open, which most policies never do."""
        raise TypeError(f"{type(self).__name__} leaves no windows open")


class Static(Policy):
    """Everybody verifies as much as the bounds allow."""

    chooses = False

    def plan(self, evidence: LaggedSurvival, terms: Terms, mean: np.ndarray) -> Plan:
        """K is Σ high and the windows are `high`."""
        plan = plan_budget(evidence, terms.at(terms.shape.gamma), mean)
        return replace(plan, windows=plan.high)


class Lagged(Policy):
    """Budget and windows from survival at least two steps old; a history is averaged, to predict this step's.

    Non-anticipating: everything read was computed before the first token of this block was sampled. Older blocks'
    tokens may lie in it, committed or thrown away; what is sampled now uses fresh random numbers, so it does not
    depend on them.
    """

    def history(self, requests: int) -> int:
        """Always the same: a mean over several steps predicts better than the last one."""
        return LAGGED_STEPS

    def plan(self, evidence: LaggedSurvival, terms: Terms, mean: np.ndarray) -> Plan:
        """Plan and windows, from each request's mean over the evidence."""
        averaged = evidence.averaged() if isinstance(evidence, LaggedSurvival) else evidence
        plan = plan_budget(averaged, terms, mean)
        if plan.skip_draft:
            return plan
        values = averaged.filled(mean)[0]
        return replace(plan, windows=allocate_windows(values, plan.tokens, min_window=plan.low, max_window=plan.high))


class Causal(Policy):
    """Budget from survival at least two steps old, spent by the survival of this step (paper §5.2-5.3).

    A history gives the budget several cases to be right in: with few requests one old block says little about this one.

    Non-anticipating: K is fixed before the block, as in `Lagged`. Given K, admission of (r, k) depends on this step's
    survival only through the entries that rank above (r, k), and no later entry of row r does (`allocate_windows`);
    a_{r,k} itself reads the tokens before k.
    """

    reads = "tokens"

    def plan(self, evidence: LaggedSurvival, terms: Terms, mean: np.ndarray) -> Plan:
        """K, with the windows left open."""
        return plan_budget(evidence, terms, mean)

    def spend(self, plan: Plan, survival: np.ndarray | ContextSurvival | None) -> np.ndarray:
        """`plan.tokens` go to the best entries of this step's survival."""
        if not isinstance(survival, np.ndarray):
            raise TypeError(f"policy 'causal' spends its budget by an array [R, k], not by {type(survival).__name__}")
        return allocate_windows(survival, plan.tokens, min_window=plan.low, max_window=plan.high)


class Ahead(Policy):
    """Budget and windows from this step's survival, where confidence is a function of the context alone.

    Whether to draft, and blocks of which length, is decided as in `Causal`: the states behind the confidence cost a
    forward of the draft.

    Non-anticipating: no entry reads a token of the block, so all of it is known before the first one is sampled; an
    unrestricted search may look at everything. Not in the paper.
    """

    reads = "context"

    def plan(self, evidence: LaggedSurvival, terms: Terms, mean: np.ndarray) -> Plan:
        """Whether and how far to draft, and the seconds by which K will be chosen."""
        return self.priced(plan_budget(evidence, terms, mean), terms)

    def priced(self, plan: Plan, terms: Terms) -> Plan:
        """The plan with the seconds of every K that its bounds allow."""
        if plan.skip_draft:
            return plan
        seconds = terms.seconds(range(int(plan.low.sum()), int(plan.high.sum()) + 1), plan.draft_length)
        if terms.max_step_seconds is not None:
            allowed = seconds <= terms.max_step_seconds
            if not allowed.any():  # the cheapest tier, filled
                allowed[len(seconds) - 1 - seconds[::-1].argmin()] = True
            seconds = np.where(allowed, seconds, np.inf)
        return replace(plan, seconds=seconds)

    def spend(self, plan: Plan, survival: np.ndarray | ContextSurvival | None) -> np.ndarray:
        """The best K of this step, spent on its best entries."""
        if not isinstance(survival, ContextSurvival):
            raise TypeError(f"policy 'ahead' plans from ContextSurvival, not from {type(survival).__name__}")
        tokens = self.tokens(plan, survival)
        return allocate_windows(survival.values, tokens, min_window=plan.low, max_window=plan.high)

    def tokens(self, plan: Plan, survival: ContextSurvival) -> int:
        """K: the best budget on this step's survival, over every K that the plan allows."""
        assert plan.seconds is not None  # whoever makes the plan calls `priced`
        values = survival.values
        position = np.arange(values.shape[1])
        forced, admissible = position < plan.low[:, None], position < plan.high[:, None]
        ladder = np.sort(values[admissible & ~forced])[::-1]
        base = len(values) + values[forced].sum(dtype=np.float64)
        expected = base + np.concatenate([[0.0], np.cumsum(ladder, dtype=np.float64)])
        return int(plan.low.sum()) + int(np.argmax(expected / plan.seconds))


POLICIES: dict[str, Policy] = {"causal": Causal(), "lagged": Lagged(), "ahead": Ahead()}
