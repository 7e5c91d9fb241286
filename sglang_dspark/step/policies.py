"""How one step's drafts and windows come about: one small class per policy of the scheduler.

The order of the lines in each `draft` is the non-anticipation argument: what sizes the windows stands above the sampling,
or reads only prefixes (`causal`). What each policy decides is in `dspark_scheduler.policies`; here it runs on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dspark_kernels.survival import best_tokens, calibrated_survival
from dspark_kernels.types import upload
from dspark_kernels.windows import allocate_windows
from dspark_scheduler import Plan, Planner, survival
from sglang_dspark.learning.confidence import Calibration
from sglang_dspark.step.head import BlockRun, Head
from sglang_dspark.step.types import Drafted, Limits, Step

if TYPE_CHECKING:
    from sglang_dspark.learning.report import Report


class Policy:
    """A planner with the confidence that its windows follow.

    Args:
        planner: of the scheduler's policy of the same name. calibration: of the confidence that sizes the windows.
        head: draws the drafts. short_blocks: windows are on the host (a CPU), and slots outside them are not drawn.
    """

    def __init__(self, planner: Planner, calibration: Calibration, head: Head, *, short_blocks: bool) -> None:
        self.planner, self.calibration, self.head, self.short_blocks = planner, calibration, head, short_blocks

    def plan(self, step: Step) -> Plan:
        """From survival at least two steps old: whether to draft, how far, how many drafts may be verified, and in which
        bounds; the first rank's on all ranks."""
        own = self.planner.plan(step.number, step.ids, step.context, low=step.low, high=step.high)
        ranks = self.head.ranks
        return own if ranks.alone else self.planner.adopt(ranks.numbers(own.numbers))

    def draft(self, step: Step, plan: Plan, run: BlockRun, tier: int | None) -> Drafted:
        """The step's block and windows. Args: tier: rows that the verification has at most (None: as many as it needs)."""
        raise NotImplementedError

    def learn(self, report: Report) -> np.ndarray | None:
        """File a step's survival for the step after next and teach the calibration.

        Returns: the calibrated confidence float64 [R, k] as it was before this lesson; None if the step had none.
        """
        if report.confidence is None:
            return None
        record = report.record
        confidence = self.calibration.conditional(report.confidence, record.greedy)
        self.planner.publish(record.number, record.ids, survival(confidence))
        # A confidence that knows the windows first is of the whole block, of which no more than the windows is drafted.
        seen = slice(min(confidence.shape[1], record.block_size))
        logits, outcomes, tried = (rows[:, seen] for rows in (report.confidence, report.outcomes, report.tried))
        self.calibration.observe(logits, record.greedy, outcomes, tried)
        return confidence[:, seen]

    def survival(self, step: Step, logits: torch.Tensor) -> torch.Tensor:
        """[R, k] on the device: the chance that draft k and all before it are accepted; 0 where confidence is not finite, so
        that such a request decodes plainly."""
        slope, shift = self.calibration.on_device(logits.device)
        return calibrated_survival(logits, slope, shift, step.rows.greedy).nan_to_num(nan=0.0)

    def _in_windows(self, run: BlockRun, step: Step, plan: Plan, windows: torch.Tensor):
        """The block with its windows known: a CPU draws no slot outside them."""
        if not self.short_blocks:
            return self.head.sample(run, step, plan.draft_length)
        on_host = windows.numpy()
        return self.head.sample(run, step, int(on_host.max()), on_host)


class StaticWindows(Policy):
    """Every request verifies the same number of drafts, as far as its limits allow."""

    def draft(self, step: Step, plan: Plan, run: BlockRun, tier: int | None) -> Drafted:
        # Nothing is decided by confidence here; whole blocks are what calibration learns most from.
        block = self.head.sample(run, step, plan.draft_length)
        return Drafted(block, Limits.of(plan, step).windows, self.head.confidence(run, step, block))


class CausalWindows(Policy):
    """Budget from two steps ago, ranked by this step's survival (DSpark, section 5.2): fresh ranking, no host search.

    Draft k is admitted by its rank among survivals, and its own survival reads only the drafts before it.
    """

    def draft(self, step: Step, plan: Plan, run: BlockRun, tier: int | None) -> Drafted:
        """Sample the plan's draft length for all, then rank by this step's survival under the plan's budget."""
        block = self.head.sample(run, step, plan.draft_length)
        logits = self.head.confidence(run, step, block)
        limits = Limits.of(plan, step)
        windows = allocate_windows(self.survival(step, logits), limits.budget, limits.low, limits.high)
        return Drafted(block, self.head.ranks.tensor(windows.to(torch.int64)), logits)


class LaggedWindows(Policy):
    """Budget and windows from two steps ago: known before the draft runs.

    Where a confidence reads the states alone, a CPU samples only what is verified; otherwise it samples up to the longest
    window for all, because the confidence of a slot needs the token before it.
    """

    def draft(self, step: Step, plan: Plan, run: BlockRun, tier: int | None) -> Drafted:
        """Sample within the plan's windows, or further where the confidence needs the token before."""
        windows = Limits.of(plan, step).windows
        if self.calibration.head == "hidden":
            logits = self.head.hidden_confidence(run)
            return Drafted(self._in_windows(run, step, plan, windows), windows, logits)
        length = int(windows.max()) if self.short_blocks else plan.draft_length
        block = self.head.sample(run, step, length)
        return Drafted(block, windows, self.head.confidence(run, step, block) if length else None)


class AheadWindows(Policy):
    """Budget and windows from this step's survival, which the block's states give before any token is sampled.

    Only drafts whose confidence reads no drafted token can do this. Whether to run the draft at all is still decided
    from two steps ago: the states cost a forward.
    """

    def draft(self, step: Step, plan: Plan, run: BlockRun, tier: int | None) -> Drafted:
        """Budget and rank by the states' survival, then sample within the windows; `tier` bounds the rows, R + budget."""
        logits = self.head.hidden_confidence(run)
        values, limits = self.survival(step, logits), Limits.of(plan, step)
        seconds = self._seconds(plan, values)
        budget = best_tokens(values, seconds, limits.low, limits.high, None if tier is None else tier - step.size)
        windows = allocate_windows(values, budget, limits.low, limits.high).to(torch.int64)
        windows = self.head.ranks.tensor(windows)
        return Drafted(self._in_windows(run, step, plan, windows), windows, logits)

    def _seconds(self, plan: Plan, values: torch.Tensor) -> torch.Tensor:
        """The plan's seconds on the device by K from 0; fewer drafts than the plan's least cost as much as the least."""
        assert plan.seconds is not None  # a plan of `ahead` that drafts has them
        least = int(plan.low.sum())
        seconds = np.full(values.numel() + 1, np.inf)
        seconds[:least], seconds[least : least + len(plan.seconds)] = plan.seconds[0], plan.seconds
        return upload(torch.from_numpy(seconds), values.device)


POLICIES = {"static": StaticWindows, "causal": CausalWindows, "lagged": LaggedWindows, "ahead": AheadWindows}
