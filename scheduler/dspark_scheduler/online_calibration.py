"""Calibration in service: learns from every verified token, in bounded memory, and forgets."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .calibration import ECE_BINS, check_outcomes, sigmoid
from .fingerprint import Fingerprint, load_measurement, save_measurement

LOGIT_BINS = 48
LOGIT_RANGE = 12.0  # beyond, σ is 0 or 1 to five digits
UNIT = 1 << 20  # outcomes and predictions are counted in whole millionths or so, see OnlineCalibrator


class OnlineCalibrator:
    """Per position, c = σ(z / T_k + b_k), refitted by logistic regression on what was verified lately.

    A temperature alone (the paper's STS) can only sharpen or flatten around one half; with the shift b a confidence
    head that knows nothing ends as the mean acceptance of its position (1/T -> 0), so it can never cost more than no
    head.
    The slope never becomes negative: a head is ranked as it is, or not at all.

    Memory is a histogram: per position and bin of the raw logit, how often it was seen, the sum of the logits, and the
    sum of the outcomes. Positions observed only inside a window and behind an accepted prefix are exactly the
    conditional outcomes c_k predicts, so censoring needs no correction. A position that is hardly ever verified leans
    on the fit over all positions, and that one on the identity.

    Sums are kept in integers until `end_step`, so the state is the same to the last bit whatever the order in which the
    batches of one step arrive.

    Args:
        gamma: positions.
        memory: steps after which an observation has faded to 1/e.
        refit_every: steps between two fits.
        prior: weight, in observations, that pulls a position to the pooled fit and the pooled fit to the identity.

    Raises:
        ValueError: an argument below 1.
    """

    def __init__(self, gamma: int, *, memory: float = 2000.0, refit_every: int = 32, prior: float = 20.0) -> None:
        if gamma < 1 or memory < 1 or refit_every < 1 or prior < 1:
            raise ValueError("gamma, memory, refit_every and prior must be at least 1")
        self.gamma, self.prior, self.refit_every = gamma, prior, refit_every
        self._fade = float(np.exp(-1.0 / memory))
        # Planes: count, Σ logit, Σ outcome.
        self._seen = np.zeros((3, gamma, LOGIT_BINS))
        # Planes: count, Σ predicted, Σ outcome, by bin of the confidence that was in use at the time.
        self._table = np.zeros((3, gamma, ECE_BINS))
        self._fresh = tuple(np.zeros(x.shape, np.int64) for x in (self._seen, self._table))
        self._slope, self._shift = np.ones(gamma), np.zeros(gamma)
        self.steps = 0

    @property
    def temperatures(self) -> np.ndarray:
        """[γ] T_k; at most 1000 (a head that is ignored)."""
        return 1.0 / np.maximum(self._slope, 1e-3)

    @property
    def shifts(self) -> np.ndarray:
        """[γ] b_k."""
        return self._shift.copy()

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Calibrated conditional confidence [.., γ], float64."""
        return sigmoid(np.asarray(logits) / self.temperatures + self._shift)

    def observe(self, logits: np.ndarray, acceptance: np.ndarray, observed: np.ndarray) -> None:
        """Count one batch of blocks; takes effect at `end_step`.

        Args:
            logits: [N, γ] raw confidence logits.
            acceptance: [N, γ] 0/1 or Σ min(p, q); read only where observed.
            observed: [N, γ] bool: verified, and everything before it accepted.

        Raises:
            ValueError: as `SequentialTemperatureScaling.fit`, or another block size.
        """
        logits, labels, mask = check_outcomes(logits, acceptance, observed)
        if logits.shape[1] != self.gamma:
            raise ValueError(f"block size {logits.shape[1]}, made for {self.gamma}")
        confidence = self.apply(logits)[mask]
        position = np.broadcast_to(np.arange(self.gamma), mask.shape)[mask]
        z, y = np.clip(logits[mask], -LOGIT_RANGE, LOGIT_RANGE), labels[mask]
        place = np.minimum(((z / LOGIT_RANGE + 1) * (LOGIT_BINS / 2)).astype(np.int64), LOGIT_BINS - 1)
        bucket = np.minimum((confidence * ECE_BINS).astype(np.int64), ECE_BINS - 1)
        seen, table = self._fresh
        _count(seen, position * LOGIT_BINS + place, (np.ones_like(z), z, y))
        _count(table, position * ECE_BINS + bucket, (np.ones_like(z), confidence, y))

    def end_step(self) -> None:
        """Close a step: fade what is older, add what was observed, refit when due."""
        for old, fresh in zip((self._seen, self._table), self._fresh):
            old *= self._fade
            old += fresh / UNIT
            fresh[:] = 0
        self.steps += 1
        if self.steps % self.refit_every == 0:
            self.refit()

    def refit(self) -> None:
        """Fit slope and shift of all positions, then of each with the pooled fit as its prior."""
        pooled = _logistic(self._seen.sum(axis=1)[:, None, :], np.array([[1.0], [0.0]]), self.prior)
        self._slope, self._shift = _logistic(self._seen, np.repeat(pooled, self.gamma, axis=1), self.prior)

    def reliability(self) -> np.ndarray:
        """[γ, bins, 3]: weight, mean confidence used, mean outcome (NaN where the weight is 0)."""
        count, predicted, outcome = self._table
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.stack([count, predicted / count, outcome / count], axis=-1)

    def ece(self) -> np.ndarray:
        """[γ] expected calibration error of the confidence that was in use; NaN where nothing was seen."""
        with np.errstate(invalid="ignore"):
            return np.abs(self._table[1] - self._table[2]).sum(axis=1) / self._table[0].sum(axis=1)

    def save(self, path: str | Path, fingerprint: Fingerprint) -> None:
        """Write the whole state with what it was learned on."""
        body = {
            "gamma": self.gamma,
            "steps": self.steps,
            "seen": self._seen.tolist(),
            "table": self._table.tolist(),
        }
        save_measurement(path, "online-calibration", fingerprint, body)

    def restore(self, path: str | Path, fingerprint: Fingerprint) -> None:
        """Take over a state written by `save` and refit.

        Raises:
            FingerprintMismatch: naming what differs.
            ValueError: not such a state; nothing was taken over then.
        """
        body = load_measurement(path, "online-calibration", fingerprint)
        try:
            if body["gamma"] != self.gamma:
                raise ValueError(f"it is for block size {body['gamma']}, not {self.gamma}")
            steps = int(body["steps"])
            mine = (self._seen, self._table)
            theirs = [np.asarray(body[name], np.float64) for name in ("seen", "table")]
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is not an online calibration: {error}") from error
        for old, new in zip(mine, theirs):
            if new.shape != old.shape or not np.isfinite(new).all() or steps < 0 or (new[0] < 0).any():
                raise ValueError(f"{path} is not an online calibration: a table is not what this program writes")
        for old, new in zip(mine, theirs):
            old[:] = new
        self.steps = steps
        self.refit()


def _count(planes: np.ndarray, cell: np.ndarray, values: tuple[np.ndarray, ...]) -> None:
    """Add each of `values` [N] to the cells [N] of its integer plane.

    The sums of a batch are whole numbers below 2^53, exact in float64, so the order of the additions cannot matter.
    """
    for plane, value in zip(planes, values):
        plane += np.bincount(cell, np.rint(value * UNIT), plane.size).astype(np.int64).reshape(plane.shape)


def _logistic(seen: np.ndarray, center: np.ndarray, prior: float) -> np.ndarray:
    """Slope >= 0 and shift [2, P] of P logistic regressions on histograms [3, P, bins], pulled to `center` [2, P].

    Newton's method; the pull is a normal prior of deviation one half with the weight of `prior` observations
    (curvature prior/4), and keeps every step defined.
    """
    count, total, outcome = seen
    z = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    slope, shift = center.copy()
    pull = prior / 4.0
    for _ in range(8):
        p = sigmoid(slope[:, None] * z + shift[:, None])
        error, weight = outcome - count * p, count * p * (1 - p)
        gradient = np.stack(
            [(error * z).sum(1) - pull * (slope - center[0]), error.sum(1) - pull * (shift - center[1])]
        )
        a, b, d = (weight * z * z).sum(1) + pull, (weight * z).sum(1), weight.sum(1) + pull
        determinant = a * d - b * b
        move = np.stack([d * gradient[0] - b * gradient[1], a * gradient[1] - b * gradient[0]]) / determinant
        move = np.clip(move, -2.0, 2.0)  # far from the optimum the quadratic model overshoots
        slope, shift = np.maximum(slope + move[0], 0.0), shift + move[1]
    return np.stack([slope, shift])
