"""Tables out of rounds: accepted length and conditional acceptance by class, and how good the confidence is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark_scheduler.calibration import SequentialTemperatureScaling, expected_calibration_error, sigmoid
from sglang_dspark.prompts.prompts import KINDS
from sglang_dspark.training.speculate import Rounds


@dataclass(frozen=True)
class AcceptanceRow:
    """Of one class: mean tokens committed a round with the bonus, the same from the overlaps (less noise), the
    conditional acceptance at each position, and how many rounds that rests on.
    """

    length: float
    expected_length: float
    conditional: tuple[float, ...]
    rounds: int


def acceptance_table(rounds: Rounds) -> dict[str, AcceptanceRow]:
    """Class name (and "all") -> AcceptanceRow. Rounds cut by a stop or by the token limit count in no mean length."""
    kinds, accepted = np.array(rounds.kinds), np.array(rounds.accepted)
    overlap, whole = np.array(rounds.overlap), ~np.array(rounds.cut)
    table = {}
    for name in (*KINDS, "all"):
        chosen = whole if name == "all" else whole & (kinds == KINDS.index(name))
        if not chosen.any():
            continue
        a, o = accepted[chosen], overlap[chosen]
        reached = [a >= k for k in range(o.shape[1])]
        conditional = tuple(float((a[r] > k).mean()) if r.any() else float("nan") for k, r in enumerate(reached))
        survival = 1 + np.cumprod([o[r, k].mean() if r.any() else 0.0 for k, r in enumerate(reached)]).sum()
        table[name] = AcceptanceRow(float(1 + a.mean()), float(survival), conditional, int(chosen.sum()))
    if len(table) > 2:
        # Classes in equal parts: easy classes give fewer rounds a token, so a mean over rounds would lean to the hard
        # ones.
        classes = [v for name, v in table.items() if name != "all"]
        mean = tuple(float(x) for x in np.nanmean([c.conditional for c in classes], 0))
        table["macro"] = AcceptanceRow(
            float(np.mean([c.length for c in classes])),
            float(np.mean([c.expected_length for c in classes])),
            mean,
            sum(c.rounds for c in classes),
        )
    return table


@dataclass(frozen=True)
class ConfidenceQuality:
    """Per position, over the rounds that reached it: area under the ROC curve and expected calibration error, raw
    and after STS.
    """

    auc: tuple[float, ...]
    ece: tuple[float, ...]
    ece_scaled: tuple[float, ...]
    temperatures: tuple[float, ...]
    samples: tuple[int, ...]


def area_under_roc(score: np.ndarray, positive: np.ndarray) -> float:
    """Probability that a positive's score exceeds a negative's (ties half); nan where one kind is missing."""
    from scipy.stats import rankdata

    n, hits = len(score), int(positive.sum())
    if hits == 0 or hits == n:
        return float("nan")
    return float((rankdata(score)[positive].sum() - hits * (hits + 1) / 2) / (hits * (n - hits)))


def confidence_arrays(rounds: Rounds, head: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits, hard acceptance and the mask of reached positions, each [n, γ]; rounds cut by a stop are left out."""
    whole = ~np.array(rounds.cut)
    logits, accepted = np.array(rounds.confidence[head])[whole], np.array(rounds.accepted)[whole]
    positions = np.arange(logits.shape[1])
    return logits, accepted[:, None] > positions, accepted[:, None] >= positions


def fit_scaling(rounds: Rounds, head: str) -> SequentialTemperatureScaling:
    """STS on these rounds, with the soft outcome Σ min(p, q) where a position was reached."""
    logits, _, reached = confidence_arrays(rounds, head)
    overlap = np.clip(np.array(rounds.overlap)[~np.array(rounds.cut)], 0, 1)
    return SequentialTemperatureScaling.fit(logits, overlap, reached)


def confidence_quality(rounds: Rounds, head: str, scaling: SequentialTemperatureScaling) -> ConfidenceQuality:
    """Quality on rounds that ``scaling`` was not fitted on; outcomes are the hard acceptances."""
    logits, accepted, reached = confidence_arrays(rounds, head)
    raw, scaled = sigmoid(logits), scaling.apply(logits)
    auc, ece, after, samples = [], [], [], []
    for k in range(logits.shape[1]):
        rows = reached[:, k]
        auc.append(area_under_roc(logits[rows, k], accepted[rows, k]))
        ece.append(expected_calibration_error(raw[rows, k], accepted[rows, k].astype(float)))
        after.append(expected_calibration_error(scaled[rows, k], accepted[rows, k].astype(float)))
        samples.append(int(rows.sum()))
    return ConfidenceQuality(tuple(auc), tuple(ece), tuple(after), scaling.temperatures, tuple(samples))
