"""Fitting the additive cost model: a basis in which monotone means "no negative coefficient", and least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from .cost import AdditiveCostModel, table_at


@dataclass(frozen=True, eq=False)
class CostBasis:
    """Rows x(R, M, context, slots) with T = x·β; every β >= 0 gives a monotone piecewise linear model and back.

    The columns: 1; one ramp per interval between the knots of α; the same for θ; context; 1 if anything is drafted;
    one ramp per interval of δ. A ramp is 0 before its interval, rises by 1 per unit inside, and stays; the last one
    of a table never ends, which is the extrapolation of `AdditiveCostModel`.

    Attributes:
        alpha_knots, theta_knots, draft_knots: ascending probes; draft_knots may be empty (drafting costs nothing).
        tiers: token counts that M is rounded up to.
    """

    alpha_knots: np.ndarray
    theta_knots: np.ndarray
    draft_knots: np.ndarray
    tiers: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: AdditiveCostModel) -> CostBasis:
        """The basis that holds `model` exactly."""
        return cls(model.alpha[0], model.theta[0], np.empty(0) if model.draft is None else model.draft[0], model.tiers)

    def rows(self, requests: np.ndarray, tokens: np.ndarray, context: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """[N, columns] float64 for N steps; arguments [N], tokens 0 meaning that no target forward ran."""
        ran = (tokens > 0).astype(np.float64)
        padded = _round_up(tokens, self.tiers)
        parts = [
            ran[:, None],
            _ramps(self.alpha_knots, requests) * ran[:, None],
            _ramps(self.theta_knots, padded),
            (context * ran)[:, None],
        ]
        if len(self.draft_knots):
            drafted = (slots > 0)[:, None]
            parts += [drafted.astype(np.float64), _ramps(self.draft_knots, slots) * drafted]
        return np.concatenate(parts, axis=1)

    def coefficients(self, model: AdditiveCostModel) -> np.ndarray:
        """β of a model over this basis' own knots."""
        constant = model.t0 + model.alpha[1][0] + model.theta[1][0]
        parts = [[constant], _slopes(model.alpha), _slopes(model.theta), [model.context]]
        if model.draft is not None:
            parts += [[model.draft[1][0]], _slopes(model.draft)]
        return np.concatenate(parts)

    def model(self, coefficients: np.ndarray) -> AdditiveCostModel:
        """The cost model of β >= 0. What every step pays is t0; both tables start at zero."""
        a, t = max(len(self.alpha_knots) - 1, 0), max(len(self.theta_knots) - 1, 0)
        alpha = np.concatenate([[0.0], np.cumsum(coefficients[1 : 1 + a] * np.diff(self.alpha_knots))])
        theta = np.concatenate([[0.0], np.cumsum(coefficients[1 + a : 1 + a + t] * np.diff(self.theta_knots))])
        draft = None
        if len(self.draft_knots):
            rest = coefficients[2 + a + t :]
            draft = (
                self.draft_knots,
                rest[0] + np.concatenate([[0.0], np.cumsum(rest[1:] * np.diff(self.draft_knots))]),
            )
        return AdditiveCostModel(
            float(coefficients[0]),
            (self.alpha_knots, alpha),
            (self.theta_knots, theta),
            self.tiers,
            float(coefficients[1 + a + t]),
            draft,
        )


def fit_cost_model(
    requests: Sequence[int],
    tokens: Sequence[int],
    seconds: Sequence[float],
    *,
    context: Sequence[float] | float = 0.0,
    slots: Sequence[int] | int = 0,
    alpha_knots: Sequence[float] | None = None,
    theta_knots: Sequence[float] | None = None,
    draft_knots: Sequence[float] = (),
    tiers: Sequence[int] = (),
) -> AdditiveCostModel:
    """Fit T = t0 + α(R) + θ(M) + context·κ + δ(slots) to measured steps by non-negative least squares (scipy).

    Errors are taken relative to the measured time: a step of 200 ms that is 1 % off counts as one of 40 ms. Repeat each
    point a few times and hand in the medians, or hand in everything: both work. α and θ can be told apart only if the
    samples hold several M for one R and several R for one M.

    Args:
        requests, tokens, seconds: one entry per measured step [N].
        context: tokens of context of all requests together, per step or one for all.
        slots: drafted slots, per step or one for all (0: without the draft). tokens 0 with slots > 0: a draft alone.
        alpha_knots, theta_knots: where the tables may bend; None takes the distinct values measured (θ: the tiers).
        draft_knots: as above; empty leaves the draft out.
        tiers: token counts that M is rounded up to.

    Raises:
        ValueError: fewer than two samples, lengths differ, or a time is not positive.
    """
    requests, tokens, seconds = (np.asarray(column, np.float64) for column in (requests, tokens, seconds))
    if requests.ndim != 1 or len(requests) < 2 or requests.shape != tokens.shape or requests.shape != seconds.shape:
        raise ValueError("requests, tokens and seconds must be three sequences of one length, at least 2")
    if not (seconds > 0).all():
        raise ValueError("every step must have taken a positive time")
    context, slots = np.broadcast_to(context, requests.shape), np.broadcast_to(slots, requests.shape)
    padded = _round_up(tokens, tuple(tiers))
    ran = tokens > 0
    basis = CostBasis(
        np.unique(requests[ran]) if alpha_knots is None else np.asarray(alpha_knots, np.float64),
        np.unique(padded[ran]) if theta_knots is None else np.asarray(theta_knots, np.float64),
        np.asarray(draft_knots, np.float64),
        tuple(int(tier) for tier in tiers),
    )
    rows = basis.rows(requests, tokens, context, slots) / seconds[:, None]
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


def _slopes(table: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return np.diff(table[1]) / np.diff(table[0])


__all__ = ["CostBasis", "fit_cost_model", "table_at"]
