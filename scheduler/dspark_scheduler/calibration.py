"""Calibration offline: Sequential Temperature Scaling (paper §4, "STS"), made fit for censored and soft outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .fingerprint import Fingerprint, load_measurement, save_measurement

ECE_BINS = 20
# The paper gives no grid. Ratio 1.06 between neighbours: finer than what 10 000 blocks can tell apart.
GRID = np.geomspace(0.1, 10.0, 81)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in float64, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * np.asarray(x, np.float64)))


def expected_calibration_error(
    predicted: np.ndarray, outcome: np.ndarray, *, bins: int = ECE_BINS, by: np.ndarray | None = None
) -> float:
    """Σ_b |Σ_{n in b} predicted_n - outcome_n| / N over equal-width bins.

    Args:
        predicted: [N] probabilities.
        outcome: [N] 0/1 or soft labels in [0, 1].
        bins: number of bins on [0, 1].
        by: [N] values in [0, 1] that choose the bin; None is `predicted` (the usual ECE).
    """
    if len(predicted) == 0:
        return float("nan")
    by = predicted if by is None else by
    index = np.minimum((by * bins).astype(np.int64), bins - 1)
    return float(np.abs(np.bincount(index, predicted - outcome, bins)).sum() / len(predicted))


@dataclass(frozen=True)
class SequentialTemperatureScaling:
    """One temperature per position: c_k = σ(z_k / T_k).

    Attributes:
        temperatures: T_1..T_γ, positive.
        ece_before, ece_after: per position, the objective at T = 1 and at the fitted temperatures (fitting data).
        samples: how many blocks each position was fitted on.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 < t < float("inf") for t in self.temperatures):
            raise ValueError(f"temperatures must be positive and finite, got {self.temperatures}")

    @classmethod
    def fit(
        cls,
        logits: np.ndarray,
        accepted: np.ndarray,
        observed: np.ndarray | None = None,
        *,
        objective: str = "ece",
        grid: np.ndarray = GRID,
        bins: int = ECE_BINS,
        min_samples: int = 50,
    ) -> SequentialTemperatureScaling:
        """Fit T_1..T_γ from left to right, those before fixed (paper: "Sequential").

        The paper minimises the ECE of the cumulative product against "prefix k accepted". Under load that outcome is
        censored: beyond its window a block has none, and keeping blocks that were rejected early while dropping those
        that reached the end of their window would call every deep position worse than it is. So position k is fitted on
        the blocks at risk (verified at k, accepted before it), comparing conditional confidence with conditional
        outcome in bins of the *cumulative* product: windows are chosen by that product, so within a bin the censoring
        is independent of the outcome. Without censoring the two are the same in expectation, since a block is at risk
        at k with the probability that its first k-1 factors say.

        Args:
            logits: [N, γ] raw confidence logits.
            accepted: [N, γ] whether each token was accepted, or the acceptance probability Σ min(p, q) (soft, and
                free of sampling noise); read only where observed.
            observed: [N, γ] bool: verified, and everything before it accepted. None: accepted is 0/1 and nothing was
                cut, so the mask follows from it.
            objective: "ece" as in the paper, or "nll", the mean log loss (a proper score; steadier on few samples).
            grid: temperatures that are tried.
            bins: equal-width bins of the cumulative product on [0, 1].
            min_samples: positions with fewer observed blocks keep the temperature of the position before (1 at first).

        Raises:
            ValueError: shapes differ, a label outside [0, 1], soft labels without a mask, a mask with holes, or an
                unknown objective.
        """
        logits, labels, mask = check_outcomes(logits, accepted, observed)
        if objective not in ("ece", "nll"):
            raise ValueError(f"objective {objective!r} is neither 'ece' nor 'nll'")
        survival = np.ones(len(logits))
        raw = np.cumprod(sigmoid(logits), axis=1)
        chosen: list[float] = []
        before, after, samples = [], [], []
        for k in range(logits.shape[1]):
            rows = mask[:, k]
            z, y, a = logits[rows, k], labels[rows, k], survival[rows]
            losses = [_loss(objective, z, y, a, t, bins) for t in grid] if rows.sum() >= min_samples else None
            chosen.append(float(grid[int(np.argmin(losses))]) if losses else (chosen[-1] if chosen else 1.0))
            survival = survival * sigmoid(logits[:, k] / chosen[-1])
            before.append(expected_calibration_error(sigmoid(z), y, bins=bins, by=raw[rows, k]))
            after.append(expected_calibration_error(sigmoid(z / chosen[-1]), y, bins=bins, by=survival[rows]))
            samples.append(int(rows.sum()))
        return cls(tuple(chosen), tuple(before), tuple(after), tuple(samples))

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Calibrated conditional confidence [.., γ], float64, for logits [.., γ]."""
        logits = np.asarray(logits)
        if logits.shape[-1] != len(self.temperatures):
            raise ValueError(f"{logits.shape[-1]} positions, fitted for {len(self.temperatures)}")
        return sigmoid(logits / np.asarray(self.temperatures))

    def save(self, path: str | Path, fingerprint: Fingerprint) -> None:
        """Write the temperatures with what they were fitted on."""
        body = {name: list(getattr(self, name)) for name in ("temperatures", "ece_before", "ece_after", "samples")}
        save_measurement(path, "calibration", fingerprint, body)

    @classmethod
    def load(cls, path: str | Path, fingerprint: Fingerprint | None) -> SequentialTemperatureScaling:
        """Read temperatures fitted on exactly this (None: on anything); raises FingerprintMismatch naming what differs."""
        body = load_measurement(path, "calibration", fingerprint)
        try:
            return cls(**{name: tuple(values) for name, values in body.items()})
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a calibration file: {error}") from error


def _loss(objective: str, z: np.ndarray, y: np.ndarray, before: np.ndarray, temperature: float, bins: int) -> float:
    confidence = sigmoid(z / temperature)
    if objective == "ece":
        return expected_calibration_error(confidence, y, bins=bins, by=before * confidence)
    # log σ(x) and log(1 - σ(x)) without overflow.
    return float(np.mean(np.logaddexp(0.0, z / temperature) - y * z / temperature))


def check_outcomes(
    logits: np.ndarray, accepted: np.ndarray, observed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits float64, labels float64 (0 where unobserved), mask bool, all [N, γ]; raises ValueError as `fit` says."""
    logits, labels = np.asarray(logits, np.float64), np.asarray(accepted, np.float64)
    if logits.ndim != 2 or labels.shape != logits.shape:
        raise ValueError(f"logits {logits.shape} and outcomes {labels.shape} must be two matrices [N, γ]")
    if observed is None:
        if not ((labels == 0) | (labels == 1)).all():
            raise ValueError("soft labels need the mask of what was observed")
        mask = np.cumprod(np.column_stack([np.ones(len(labels)), labels[:, :-1]]), axis=1) > 0
    else:
        mask = np.asarray(observed, bool)
        if mask.shape != logits.shape:
            raise ValueError(f"the mask {mask.shape} must have the shape {logits.shape}")
        if (mask[:, 1:] & ~mask[:, :-1]).any():
            raise ValueError("a position is observed only if all before it were: the mask has a hole")
    labels = np.where(mask, labels, 0.0)
    if not (np.isfinite(logits[mask]).all() and ((labels >= 0) & (labels <= 1)).all()):
        raise ValueError("an observed logit is not finite, or an observed outcome lies outside [0, 1]")
    return logits, labels, mask
