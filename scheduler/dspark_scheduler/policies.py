"""The three window policies. What each may read is its signature; why that cannot anticipate is its docstring.

The condition (paper §4, "non-anticipating"): whether the k-th draft of a request is verified is decided by nothing that
is sampled at k or later in that request. Then the window is, for the acceptance rule, a number fixed in advance, and
the emitted law stays the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .budget import Budget, evidence_values, plan_budget
from .cost import CostModel
from .relay import ContextSurvival, LaggedSurvival
from .windows import allocate_windows


@dataclass(frozen=True, eq=False)
class Plan:
    """A budget and the windows [R] it was spent on; the windows sum to `budget.tokens`."""

    budget: Budget
    windows: np.ndarray

    def __post_init__(self) -> None:
        if int(self.windows.sum()) != self.budget.tokens:
            raise ValueError(f"windows {self.windows.tolist()} do not spend {self.budget.tokens} tokens")


def lagged(evidence: LaggedSurvival, cost: CostModel, *, missing: np.ndarray | None = None, **options) -> Plan:
    """Budget and windows from survival at least two steps old; a history is averaged, to predict this step's.

    Non-anticipating: everything read was computed before the first token of this block was sampled. Older blocks'
    tokens may lie in it, committed or thrown away; what is sampled now uses fresh random numbers, so it does not
    depend on them.

    Args and errors as `plan_budget`.
    """
    if isinstance(evidence, LaggedSurvival):
        evidence = evidence.averaged()
    values = evidence_values(evidence, missing)
    return _spend(plan_budget(evidence, cost, missing=missing, **options), values, options)


def causal(
    evidence: LaggedSurvival, current: np.ndarray, cost: CostModel, *, missing: np.ndarray | None = None, **options
) -> Plan:
    """Budget from survival at least two steps old, spent by the survival of this step (paper §5.2-5.3).

    A history gives the budget several cases to be right in: with few requests one old block says little about this one.

    Non-anticipating: K is fixed before the block, as in `lagged`. Given K, admission of (r, k) depends on this step's
    survival only through the entries that rank above (r, k), and no later entry of row r does (`allocate_windows`);
    a_{r,k} itself reads the tokens before k.

    Args:
        current: [R, γ] survival of this step.
        Others and errors as `plan_budget`.
    """
    return _spend(plan_budget(evidence, cost, missing=missing, **options), current, options)


def ahead(evidence: ContextSurvival, cost: CostModel, **options) -> Plan:
    """Budget and windows from this step's survival, where confidence is a function of the context alone.

    Non-anticipating: no entry reads a token of the block, so all of it is known before the first one is sampled; an
    unrestricted search may look at everything. Not in the paper.

    Args and errors as `plan_budget`; a LaggedSurvival is a TypeError here.
    """
    if not isinstance(evidence, ContextSurvival):
        raise TypeError(f"policy 'ahead' plans from ContextSurvival, not from {type(evidence).__name__}")
    return _spend(plan_budget(evidence, cost, **options), evidence.values, options)


POLICIES = {"lagged": lagged, "causal": causal, "ahead": ahead}


def _spend(budget: Budget, values: np.ndarray, options: dict) -> Plan:
    if budget.skip_draft:
        return Plan(budget, np.zeros(len(values), np.int64))
    limit = options.get("max_window")
    longest = budget.draft_length if limit is None else np.minimum(limit, budget.draft_length)
    windows = allocate_windows(values, budget.tokens, min_window=options.get("min_window", 0), max_window=longest)
    return Plan(budget, windows)
