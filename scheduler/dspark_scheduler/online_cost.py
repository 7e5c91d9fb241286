"""A cost model that keeps itself right: measured at start, then corrected by every step that really ran."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from .cost import AdditiveCostModel
from .cost_fit import CostBasis

HUBER = 3.0  # deviations beyond this many typical ones count for ever less
ANCHOR_REFITS = 64.0  # refits over which the anchor moves
RATIO_RANGE = 10.0  # how far one step may differ from the prior or from the model
REFUTED_SOLUTIONS = 8  # moves of the anchor, all the way to the solution each, when a step was quicker than it allows
TAU = 20.0  # steps over which the typical deviation is averaged


class OnlineCostModel:
    """An additive cost model that learns from the times of real steps.

    Every observation is one row of a weighted non-negative least squares problem in the basis of the prior
    (`CostBasis`), so what comes out is monotone whatever went in. The problem is kept as a matrix and a vector that
    fade with `memory`, and it is solved anew every `refit_every` steps. Three more ideas make it hold up in service:

    * *Anchor.* What the recent steps do not touch (other loads) follows the prior times the ratio by which the recent
      steps differ from the prior: a machine that has become slower is slower everywhere. Target and draft have a
      ratio each.
    * *Slow anchor.* The prior itself moves towards what was learned, over some thousand steps, so that what one load
      taught is not forgotten while the server runs at another.
    * *Robust weights.* A step that is slower than predicted by more than `HUBER` times the typical error is cut back to
      that limit and weighs less by the square of the excess. The typical error is itself a slow average in which one
      step moves little, so one stall is ignored while a lasting change is believed after some tens of steps. A step
      that is *quicker* than that counts in full, and the anchor moves to what it taught at once: whatever else a
      machine does can only delay a step. So a prior that was measured beside a busy neighbour cannot talk the planner
      out of drafting for good.

    Args:
        prior: measured at start-up; its knots, tiers and context term are kept.
        memory: steps after which an observation has faded to 1/e.
        anchor: weight of the anchor, in observations per column. Less learns a wrong shape faster and carries a change
            to other loads less; 0.2 repairs a slope that is 40 times too small and keeps noise out (tests/scheduler).
        refit_every: steps between two solutions.
        noise: relative noise of a step's time that is expected before any was seen.

    Raises:
        ValueError: memory or refit_every below 1, anchor or noise not positive.
    """

    def __init__(
        self,
        prior: AdditiveCostModel,
        *,
        memory: float = 128.0,
        anchor: float = 0.2,
        refit_every: int = 16,
        noise: float = 0.15,
    ) -> None:
        if min(memory, refit_every) < 1 or min(anchor, noise) <= 0:
            raise ValueError("memory and refit_every must be at least 1, anchor and noise above 0")
        self._basis = CostBasis.of(prior)
        self._prior = self._basis.coefficients(prior)
        self._fade = float(np.exp(-1.0 / memory))
        self._anchor = anchor
        self._refit_every = refit_every
        size = len(self._prior)
        draft_size = len(self._basis.draft_knots)  # one for drafting at all, one per interval
        self._is_draft = (np.arange(size) >= size - draft_size).astype(np.int64)
        self._gram, self._moment = np.zeros((size, size)), np.zeros(size)
        self._share = np.zeros(size)  # of each column in a typical step, per unit of its coefficient, at its highest
        # For target and draft: typical |log error|, and Σ w·(observed / prior), Σ w. The prior counts as seen once.
        self._typical = [noise, noise]
        self._ratio_sums = np.full((2, 2), float(anchor))
        self._refuted = False  # a step since the last solution was quicker than the model allowed
        self._pending: list[tuple[float, float, float, float, float]] = []
        self.model = prior
        self.observations = 0

    @property
    def typical_error(self) -> float:
        """Typical |log(observed / predicted)| of recent steps."""
        return self._typical[0]

    def step_seconds(self, requests, tokens, context=0):
        """As `AdditiveCostModel.step_seconds`, with what was learned so far."""
        return self.model.step_seconds(requests, tokens, context)

    def draft_seconds(self, slots, length=None):
        """As `AdditiveCostModel.draft_seconds`, with what was learned so far."""
        return self.model.draft_seconds(slots, length)

    def observe(
        self,
        requests: int,
        tokens: int,
        context: float,
        seconds: float,
        *,
        slots: int = 0,
        draft_seconds: float | None = None,
    ) -> None:
        """Learn from one step.

        Args:
            requests: R that ran.
            tokens: rows of the target's forward pass before padding.
            context: tokens of context of all requests together.
            seconds: the whole step, drafting included.
            slots: slots that were drafted, 0 if the draft was skipped.
            draft_seconds: the draft's part of `seconds` if the platform can tell; None if it cannot.

        Raises:
            ValueError: a time that is not positive and finite, or a draft longer than its step.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"a step cannot take {seconds} seconds")
        if draft_seconds is None:
            self._pending.append((requests, tokens, context, slots, seconds))
        elif 0 < draft_seconds < seconds:
            self._pending.append((requests, tokens, context, 0, seconds - draft_seconds))
            self._pending.append((0, 0, 0, slots, draft_seconds))
        else:
            raise ValueError(f"the draft cannot take {draft_seconds} of {seconds} seconds")
        self.observations += 1
        if self.observations % self._refit_every == 0:
            self._absorb()
            self._solve()

    def _absorb(self) -> None:
        """Fold the pending steps into the normal equations, oldest first."""
        columns = np.array(self._pending, np.float64)
        self._pending.clear()
        rows = self._basis.rows(*columns.T[:4])
        prior = rows @ self._prior
        known = prior > 0  # a draft-only row says nothing if the prior has no draft term
        columns, rows, prior = columns[known], rows[known], prior[known]
        _, tokens, _, slots, seconds = columns.T
        predicted = np.maximum(rows @ self._basis.coefficients(self.model), seconds / RATIO_RANGE)
        errors, weights = self._tame(np.log(seconds / predicted), (tokens == 0).astype(np.int64))
        believed = predicted * np.exp(errors)  # the seconds that were measured, cut back where they stalled
        # Errors are relative to the prior, or to what was measured where that is less; never to a prior near zero.
        reference = np.clip(prior, believed / RATIO_RANGE, believed)
        ratio = np.clip(believed / prior, 1 / RATIO_RANGE, RATIO_RANGE)
        past = self._fade ** len(weights)
        weights = weights * self._fade ** np.arange(len(weights) - 1, -1, -1)
        scaled = rows / reference[:, None]
        self._gram = self._gram * past + (scaled * weights[:, None]).T @ scaled
        self._moment = self._moment * past + scaled.T @ (weights * believed / reference)
        self._ratio_sums *= past
        for part, touched in enumerate((tokens > 0, slots > 0)):
            share = weights * touched
            self._ratio_sums[part] += share @ ratio, share.sum()

    def _tame(self, errors: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Errors cut back and weights, updating the typical error of each part as the steps go by."""
        weights, tamed = np.ones(len(errors)), errors.copy()
        for i, (error, part) in enumerate(zip(errors.tolist(), parts.tolist())):
            size, limit = abs(error), HUBER * self._typical[part]
            if error > limit:
                weights[i], tamed[i] = (limit / size) ** 2, limit
            self._refuted |= error < -limit
            # The mean of |error| is 0.8 of a normal deviation; what one step may add is capped.
            self._typical[part] += (min(size / 0.8, 2 * limit) - self._typical[part]) / TAU
            self._typical[part] = max(self._typical[part], 0.01)
        return tamed, weights

    def _solve(self) -> None:
        """The model that follows from the steps and the anchor; where a step refuted the anchor, from a mended one."""
        scale = (self._ratio_sums[:, 0] / self._ratio_sums[:, 1])[self._is_draft]
        for _ in range(REFUTED_SOLUTIONS if self._refuted else 0):
            self._prior = self._solution(self._prior * scale) / scale
        self._refuted = False
        solution = self._solution(self._prior * scale)
        self.model = self._basis.model(solution)
        self._prior = self._prior + (solution / scale - self._prior) / ANCHOR_REFITS

    def _solution(self, center: np.ndarray) -> np.ndarray:
        """β >= 0 that minimises the faded squared relative errors plus the pull of the anchor to `center`."""
        # Each coefficient is pulled in units of its own size; one that the prior holds near zero, in units that make
        # up a twentieth of the steps at the load that used it most, so that it can still grow. Of the steps now would
        # not do: as that load fades, the unit would grow without end, and what rounding leaves of the load with it.
        self._share = np.maximum(self._share, np.sqrt(np.diag(self._gram) / self._ratio_sums[:, 1].max()))
        unit = np.maximum(center, 0.05 / np.where(self._share > 0, self._share, np.inf))
        unit[unit == 0] = 1.0
        system = self._gram * unit[:, None] * unit + self._anchor * np.eye(len(unit))
        target = self._moment * unit + self._anchor * center / unit
        # A root of the system by its eigenvalues: they may be cut off where rounding has eaten the anchor's share.
        values, vectors = np.linalg.eigh(system)
        root = np.sqrt(np.maximum(values, 1e-3 * self._anchor))
        try:
            solution, _ = nnls(vectors.T * root[:, None], vectors.T @ target / root, maxiter=30 * len(unit))
        except RuntimeError:  # it gave up; a server must not end for want of a better estimate
            return center
        return solution * unit
