"""A cost model that keeps itself right: measured at start, then corrected by every step that really ran."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from .cost import AdditiveCostModel, Count, Seconds
from .cost_fit import CostBasis
from .fingerprint import Fingerprint

TARGET, HEAD, BLOCK = range(3)  # the parts of a step that are told apart, as in `CostBasis.parts`


@dataclass(frozen=True)
class CostLearning:
    """How an OnlineCostModel learns. All positive; the values are argued for where they are used.

    Attributes:
        memory: steps after which an observation has faded to 1/e, at least 1.
        anchor: weight of the anchor, in observations per column. Less learns a wrong shape faster and carries a change
            to other loads less; 0.2 repairs a slope that is 40 times too small and keeps noise out (tests/scheduler).
        refit_every: steps between two solutions, at least 1.
        noise: relative noise of a step's time that is expected before any was seen.
        least_noise: below which the typical error is not believed to fall.
        noise_steps: steps over which the typical error is averaged.
        huber: deviations beyond this many typical ones count for ever less.
        refuted_solutions: moves of the anchor, all the way to the solution each, when a step was quicker than it allows.
        most_ratio: how many times one step may differ from the prior or from the model.
        least_share: of a typical step that a coefficient held near zero by the prior may grow in units of.
        least_eigenvalue: of the normal equations, relative to the anchor's share, which rounding may have eaten.
    """

    memory: float = 128.0
    anchor: float = 0.2
    refit_every: int = 16
    noise: float = 0.15
    least_noise: float = 0.01
    noise_steps: float = 20.0
    huber: float = 3.0
    refuted_solutions: int = 8
    most_ratio: float = 10.0
    least_share: float = 0.05
    least_eigenvalue: float = 1e-3

    def __post_init__(self) -> None:
        if min(self.memory, self.refit_every) < 1 or min(getattr(self, field.name) for field in fields(self)) <= 0:
            raise ValueError(f"memory and refit_every must be at least 1, all others above 0: {self}")


class OnlineCostModel:
    """An additive cost model that learns from the times of real steps.

    Every observation is one row of a weighted non-negative least squares problem in the basis of the prior
    (`CostBasis`), so what comes out is monotone whatever went in. The problem is kept as a matrix and a vector that
    fade with `memory`, and it is solved anew every `refit_every` steps. Two more ideas make it hold up in service:

    * *Anchor.* What the recent steps do not touch (other loads) follows the prior times the ratio by which the recent
      steps differ from the prior: a machine that has become slower is slower everywhere. The target, the draft's head
      and its block have a ratio each.
    * *Robust weights.* A step that is slower than predicted by more than `huber` times the typical error is cut back to
      that limit and weighs less by the square of the excess. The typical error is itself a slow average in which one
      step moves little, so one stall is ignored while a lasting change is believed after some tens of steps. A step
      that is *quicker* than that counts in full, and the anchor moves to what it taught at once: whatever else a
      machine does can only delay a step. So a prior that was measured beside a busy neighbour cannot talk the planner
      out of drafting for good.

    Args:
        prior: measured at start-up; its knots, tiers and context term are kept.
        learning: the constants.
    """

    def __init__(self, prior: AdditiveCostModel, learning: CostLearning = CostLearning()) -> None:
        self.learning = learning
        self._basis = CostBasis.of(prior)
        self._prior = self._basis.coefficients(prior)
        self._fade = float(np.exp(-1.0 / learning.memory))
        size = len(self._prior)
        self._gram, self._moment = np.zeros((size, size)), np.zeros(size)
        self._share = np.zeros(size)  # of each column in a typical step, per unit of its coefficient, at its highest
        # By part: typical |log error|, and Σ w·(observed / prior), Σ w. The prior counts as seen once.
        self._typical = [learning.noise] * 3
        self._ratio_sums = np.full((3, 2), learning.anchor)
        self._refuted = False  # a step since the last solution was quicker than the model allowed
        # Of each part that was told apart: step, requests, tokens, context, slots, rows of the block, seconds.
        self._pending: list[tuple[float, ...]] = []
        self.model = prior
        self.observations = 0

    @property
    def typical_error(self) -> float:
        """Typical |log(observed / predicted)| of recent steps."""
        return self._typical[TARGET]

    def step_seconds(self, requests: Count, tokens: Count | range, context: float = 0) -> Seconds:
        """As `AdditiveCostModel.step_seconds`, with what was learned so far."""
        return self.model.step_seconds(requests, tokens, context)

    def draft_seconds(self, requests: Count, slots: Count, length: int) -> Seconds:
        """As `AdditiveCostModel.draft_seconds`, with what was learned so far."""
        return self.model.draft_seconds(requests, slots, length)

    def block_seconds(self, requests: Count, length: int) -> Seconds:
        """As `AdditiveCostModel.block_seconds`, with what was learned so far."""
        return self.model.block_seconds(requests, length)

    def to_dict(self) -> dict:
        """The model that is believed now, as `AdditiveCostModel.to_dict`."""
        return self.model.to_dict()

    def save(self, path: str | Path, fingerprint: Fingerprint) -> None:
        """Write the model that is believed now; `AdditiveCostModel.load` reads it."""
        self.model.save(path, fingerprint)

    def observe(
        self,
        requests: int,
        rows: int,
        context: float,
        seconds: float,
        *,
        slots: int = 0,
        length: int = 0,
        block_seconds: float | None = None,
        head_seconds: float | None = None,
    ) -> None:
        """Learn from one step.

        Args:
            requests: R that ran.
            rows: of the target's forward pass before padding.
            context: tokens of context of all requests together.
            seconds: the whole step, drafting included.
            slots, length: slots that were sampled and the blocks' length, 0 if the draft was skipped.
            block_seconds, head_seconds: what of `seconds` the draft's forward and its head took, as far as the platform
                can tell; None if it cannot. A head without a table of its own (one graph for both) has none to tell.

        Raises:
            ValueError: a time that is not positive and finite, or a draft longer than its step.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"a step cannot take {seconds} seconds")
        block = requests * (self._basis.whole or length) if length else 0
        rest = seconds
        for part, drafted, sampled in ((block_seconds, block, 0), (head_seconds, 0, slots)):
            if part is not None and length:
                rest -= part
                if not (part > 0 and rest > 0):
                    raise ValueError(f"the draft cannot take {part} of {seconds} seconds")
                self._pending.append((self.observations, 0, 0, 0, sampled, drafted, part))
        slots, block = slots if head_seconds is None else 0, block if block_seconds is None else 0
        self._pending.append((self.observations, requests, rows, context, slots, block, rest))
        self.observations += 1
        if self.observations % self.learning.refit_every == 0:
            self._absorb()
            self._solve()

    def _absorb(self) -> None:
        """Fold the pending steps into the normal equations, oldest first."""
        most = self.learning.most_ratio
        columns = np.array(self._pending, np.float64)
        self._pending.clear()
        rows = self._basis.rows(*columns.T[1:6])
        prior = rows @ self._prior
        known = prior > 0  # a row of the draft alone says nothing if the prior has no such table
        columns, rows, prior = columns[known], rows[known], prior[known]
        step, _, tokens, _, slots, block, seconds = columns.T
        predicted = np.maximum(rows @ self._basis.coefficients(self.model), seconds / most)
        parts = np.where(tokens > 0, TARGET, np.where(slots > 0, HEAD, BLOCK))
        errors, weights = self._tame(np.log(seconds / predicted), parts)
        believed = predicted * np.exp(errors)  # the seconds that were measured, cut back where they stalled
        # Errors are relative to the prior, or to what was measured where that is less; never to a prior near zero.
        reference = np.clip(prior, believed / most, believed)
        ratio = np.clip(believed / prior, 1 / most, most)
        past = self._fade**self.learning.refit_every
        weights = weights * self._fade ** (self.observations - 1 - step)
        scaled = rows / reference[:, None]
        self._gram = self._gram * past + (scaled * weights[:, None]).T @ scaled
        self._moment = self._moment * past + scaled.T @ (weights * believed / reference)
        self._ratio_sums *= past
        for sums, touched in zip(self._ratio_sums, (tokens > 0, slots > 0, block > 0)):
            share = weights * touched
            sums += share @ ratio, share.sum()

    def _tame(self, errors: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Errors cut back and weights, updating the typical error of each part as the steps go by."""
        how, weights, tamed = self.learning, np.ones(len(errors)), errors.copy()
        for i, (error, part) in enumerate(zip(errors.tolist(), parts.tolist())):
            size, limit = abs(error), how.huber * self._typical[part]
            if error > limit:
                weights[i], tamed[i] = (limit / size) ** 2, limit
            self._refuted |= error < -limit
            # The mean of |error| is 0.8 of a normal deviation; what one step may add is capped.
            self._typical[part] += (min(size / 0.8, 2 * limit) - self._typical[part]) / how.noise_steps
            self._typical[part] = max(self._typical[part], how.least_noise)
        return tamed, weights

    def _solve(self) -> None:
        """The model that follows from the steps and the anchor; where a step refuted the anchor, from a mended one."""
        scale = (self._ratio_sums[:, 0] / self._ratio_sums[:, 1])[self._basis.parts]
        for _ in range(self.learning.refuted_solutions if self._refuted else 0):
            self._prior = self._solution(self._prior * scale) / scale
        self._refuted = False
        self.model = self._basis.model(self._solution(self._prior * scale))

    def _solution(self, center: np.ndarray) -> np.ndarray:
        """β >= 0 that minimises the faded squared relative errors plus the pull of the anchor to `center`."""
        how = self.learning
        # Each coefficient is pulled in units of its own size; one that the prior holds near zero, in units that make
        # up a twentieth of the steps at the load that used it most, so that it can still grow. Of the steps now would
        # not do: as that load fades, the unit would grow without end, and what rounding leaves of the load with it.
        self._share = np.maximum(self._share, np.sqrt(np.diag(self._gram) / self._ratio_sums[:, 1].max()))
        unit = np.maximum(center, how.least_share / np.where(self._share > 0, self._share, np.inf))
        unit[unit == 0] = 1.0
        system = self._gram * unit[:, None] * unit + how.anchor * np.eye(len(unit))
        target = self._moment * unit + how.anchor * center / unit
        # A root of the system by its eigenvalues: they may be cut off where rounding has eaten the anchor's share.
        values, vectors = np.linalg.eigh(system)
        root = np.sqrt(np.maximum(values, how.least_eigenvalue * how.anchor))
        try:
            solution, _ = nnls(vectors.T * root[:, None], vectors.T @ target / root, maxiter=30 * len(unit))
        except RuntimeError:  # it gave up; a server must not end for want of a better estimate
            return center
        return solution * unit
