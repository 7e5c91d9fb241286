"""Planners of others, to compare with: the paper's Algorithm 1, fixed lengths, thresholds, and a floor look-up."""

from __future__ import annotations

import numpy as np

from .cost import CostModel
from .plan import DraftShape
from .windows import allocate_windows


def early_stop_windows(survival: np.ndarray, cost: CostModel, context: float = 0) -> np.ndarray:
    """Paper, Algorithm 1: admit in falling order of survival of this step, stop at the first that does not pay.

    Non-anticipating by the early stop: whether (r, k) is admitted depends on entries that rank above it alone. It gets
    stuck in front of a jump of the cost curve.

    Args:
        survival: [R, γ] of this step.
        cost: SPS(B) = 1 / step_seconds(R, B).
        context: tokens of context of all requests together.

    Returns:
        [R] int64 windows.
    """
    requests = len(survival)
    ladder = np.sort(survival[survival > 0])[::-1]
    expected = requests + np.concatenate([[0.0], np.cumsum(ladder)])
    rate = expected / cost.step_seconds(requests, requests + np.arange(len(ladder) + 1), context)
    falls = np.nonzero(rate[1:] <= rate[:-1])[0]
    return allocate_windows(survival, int(falls[0]) if len(falls) else len(ladder))


def static_windows(requests: int, length: int) -> np.ndarray:
    """The same window for everyone."""
    return np.full(requests, length, np.int64)


def threshold_windows(confidence: np.ndarray, threshold: float) -> np.ndarray:
    """DeepSpec's `--confidence-threshold`: cut at the first conditional confidence below the threshold (paper, Fig. 5).

    Args:
        confidence: [R, γ] conditional confidence.
        threshold: in [0, 1].
    """
    return np.cumprod(confidence >= threshold, axis=1).sum(axis=1)


def floor_lookup_budget(
    survival: np.ndarray, probes: np.ndarray, steps_per_second: np.ndarray, least: float = 1e-6
) -> int:
    """The K that a planner with a table of steps per second finds when it reads the probe *below* the batch size.

    So does SGLang 0.5.23 with a one-dimensional table: the argmax of (R + Σ a)·SPS(floor(R + K)) over all K.

    Args:
        survival: [R, γ], two steps old.
        probes: ascending batch sizes that were measured.
        steps_per_second: at the probes.
        least: smaller survival is not a candidate.
    """
    requests = len(survival)
    ladder = np.sort(survival[survival >= least])[::-1]
    expected = requests + np.concatenate([[0.0], np.cumsum(ladder)])
    place = np.searchsorted(probes, requests + np.arange(len(expected)), side="right") - 1
    return int(np.argmax(expected * steps_per_second[np.clip(place, 0, len(probes) - 1)]))


def best_schedule(
    cost: CostModel, mean_survival: np.ndarray, requests: int, shape: DraftShape, context: float = 0
) -> int:
    """The fixed length that is best on average at this batch size: what a tuned table length(batch size) holds.

    Args:
        cost: seconds of a step.
        mean_survival: [γ] survival averaged over all requests.
        requests: R.
        shape: what the draft computes.
        context: tokens of context of all requests together.
    """

    def rate(length: int) -> float:
        tokens, run = requests * length, shape.run(length)
        seconds = cost.step_seconds(requests, requests + tokens, context)
        seconds = seconds + cost.draft_seconds(requests, shape.slots(requests, length, tokens), run)
        return requests * (1 + float(mean_survival[:length].sum())) / float(seconds)

    return max(range(len(mean_survival) + 1), key=rate)
