"""Fitting the additive cost model: a basis in which monotone means "no negative coefficient", and least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from .cost import AdditiveCostModel, Table


@dataclass(frozen=True, eq=False)
class CostBasis:
    """Rows x(R, M, context, slots, block) with T = x·β; every β >= 0 gives a monotone piecewise linear model and back.

    The columns: 1; one ramp per interval between the knots of α; the same for θ; context; 1 if anything is sampled;
    one ramp per interval of the head's table; the same two for the block's. A ramp is 0 before its interval, rises by
    1 per unit inside, and stays; the last one of a table never ends, which is the extrapolation of
    `AdditiveCostModel`.

    Attributes:
        alpha_knots, theta_knots, head_knots, block_knots: ascending probes; the last two may be empty (no such table).
        tiers: token counts that M is rounded up to.
        whole: as in `AdditiveCostModel`; what a block's rows are is the caller's.
    """

    alpha_knots: np.ndarray
    theta_knots: np.ndarray
    head_knots: np.ndarray
    block_knots: np.ndarray
    tiers: tuple[int, ...] = ()
    whole: int | None = None

    @classmethod
    def of(cls, model: AdditiveCostModel) -> CostBasis:
        """The basis that holds `model` exactly."""

        def knots(table: Table | None) -> np.ndarray:
            return np.empty(0) if table is None else np.asarray(table[0])

        tables = (knots(model.alpha), knots(model.theta), knots(model.head), knots(model.block))
        return cls(*tables, tiers=tuple(model.tiers), whole=model.whole)

    @property
    def parts(self) -> np.ndarray:
        """[columns] int64: 0 for the columns of the target's forward, 1 of the head, 2 of the block."""
        target = 2 + max(len(self.alpha_knots) - 1, 0) + max(len(self.theta_knots) - 1, 0)
        return np.repeat(np.arange(3), [target, len(self.head_knots), len(self.block_knots)])

    def rows(
        self, requests: np.ndarray, tokens: np.ndarray, context: np.ndarray, slots: np.ndarray, block: np.ndarray
    ) -> np.ndarray:
        """[N, columns] float64 for N steps; arguments [N]. Zero `tokens`, `slots` or `block` rows: that part did not run."""
        ran = (tokens > 0).astype(np.float64)
        padded = _round_up(tokens, self.tiers)
        parts = [
            ran[:, None],
            _ramps(self.alpha_knots, requests) * ran[:, None],
            _ramps(self.theta_knots, padded),
            (context * ran)[:, None],
        ]
        for knots, amount in ((self.head_knots, slots), (self.block_knots, block)):
            if len(knots):
                there = (amount > 0).astype(np.float64)[:, None]
                parts += [there, _ramps(knots, amount) * there]
        return np.concatenate(parts, axis=1)

    def coefficients(self, model: AdditiveCostModel) -> np.ndarray:
        """β of a model over this basis' own knots."""
        constant = model.t0 + model.alpha[1][0] + model.theta[1][0]
        parts = [np.array([constant]), _slopes(model.alpha), _slopes(model.theta), np.array([model.context])]
        for table in (model.head, model.block):
            if table is not None:
                parts += [np.array([table[1][0]]), _slopes(table)]
        return np.concatenate(parts)

    def model(self, coefficients: np.ndarray) -> AdditiveCostModel:
        """The cost model of β >= 0. What every step pays is t0; α and θ start at zero."""
        target, head, block = (coefficients[self.parts == part] for part in range(3))
        alpha, theta = np.split(target[1:-1], [max(len(self.alpha_knots) - 1, 0)])
        return AdditiveCostModel(
            float(target[0]),
            _table(self.alpha_knots, 0.0, alpha),
            _table(self.theta_knots, 0.0, theta),
            self.tiers,
            float(target[-1]),
            _table(self.head_knots, head[0], head[1:]) if len(head) else None,
            _table(self.block_knots, block[0], block[1:]) if len(block) else None,
            self.whole,
        )


def fit_cost_model(
    requests: ArrayLike,
    tokens: ArrayLike,
    seconds: ArrayLike,
    *,
    context: ArrayLike = 0.0,
    slots: ArrayLike = 0,
    alpha_knots: Sequence[float] | None = None,
    theta_knots: Sequence[float] | None = None,
    head_knots: Sequence[float] = (),
    tiers: Sequence[int] = (),
) -> AdditiveCostModel:
    """Fit T = t0 + α(R) + θ(M) + context·κ + δ(slots), without a block's table, to measured steps by non-negative least squares (scipy).

    Errors are taken relative to the measured time: a step of 200 ms that is 1 % off counts as one of 40 ms. Repeat each
    point a few times and hand in the medians, or hand in everything: both work. α and θ can be told apart only if the
    samples hold several M for one R and several R for one M.

    Args:
        requests, tokens, seconds: one entry per measured step [N].
        context: tokens of context of all requests together, per step or one for all.
        slots: drafted slots, per step or one for all (0: without the draft). tokens 0 with slots > 0: a draft alone.
        alpha_knots, theta_knots: where the tables may bend; None takes the distinct values measured (θ: the tiers).
        head_knots: as above; empty leaves the draft out.
        tiers: token counts that M is rounded up to.

    Raises:
        ValueError: fewer than two samples, lengths differ, or a time is not positive.
    """
    r, m, times = (np.asarray(column, np.float64) for column in (requests, tokens, seconds))
    if r.ndim != 1 or len(r) < 2 or r.shape != m.shape or r.shape != times.shape:
        raise ValueError("requests, tokens and seconds must be three sequences of one length, at least 2")
    if not (times > 0).all():
        raise ValueError("every step must have taken a positive time")
    tokens_of_context, drafted = (np.broadcast_to(np.asarray(column), r.shape) for column in (context, slots))
    padded = _round_up(m, tuple(tiers))
    ran = m > 0
    basis = CostBasis(
        np.unique(r[ran]) if alpha_knots is None else np.asarray(alpha_knots, np.float64),
        np.unique(padded[ran]) if theta_knots is None else np.asarray(theta_knots, np.float64),
        np.asarray(head_knots, np.float64),
        np.empty(0),
        tuple(int(tier) for tier in tiers),
    )
    rows = basis.rows(r, m, tokens_of_context, drafted, np.zeros(len(r))) / times[:, None]
    # Columns in comparable units, or nnls' own tolerance would drop the small ones (seconds per token of context).
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(rows / scale, np.ones(len(rows)))
    return basis.model(coefficients / scale)


def _round_up(tokens: np.ndarray, tiers: tuple[int, ...]) -> np.ndarray:
    if not tiers:
        return tokens
    place = np.searchsorted(tiers, tokens)
    return np.where((place < len(tiers)) & (tokens > 0), np.asarray(tiers)[np.minimum(place, len(tiers) - 1)], tokens)


def _ramps(knots: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[N, intervals]: how far x has gone into each interval between knots; the last interval never ends."""
    if len(knots) < 2:
        return np.empty((len(x), 0))
    width = np.append(np.diff(knots)[:-1], np.inf)
    return np.clip(np.asarray(x, np.float64)[:, None] - knots[:-1], 0.0, width)


def _slopes(table: Table) -> np.ndarray:
    return np.diff(table[1]) / np.diff(table[0])


def _table(knots: np.ndarray, first: float, slopes: np.ndarray) -> Table:
    return knots, first + np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
