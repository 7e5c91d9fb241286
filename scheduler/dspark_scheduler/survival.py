"""Survival: the chance that a drafted token and everything drafted before it will be accepted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .windows import least, most


def survival(confidence: np.ndarray) -> np.ndarray:
    """Turn conditional confidences into survival, `a[r, j] = prod_{i <= j} c[r, i]` (paper, Algorithm 1, line 1).

    The product of factors in [0, 1] never rises along a row, in floating point too (rounding is monotone). Everything
    that is decided from survival leans on this: the best K entries of the matrix are prefixes of the rows.

    Args:
        confidence: [R, γ] floats, `c[r, j] = P(token j accepted | tokens before j accepted)`, calibrated or raw.

    Returns:
        [R, γ] in the dtype of a float32 or float64 input, float64 otherwise; in memory position by position.

    Raises:
        ValueError: not a matrix, or an entry is NaN or outside [0, 1]; the message names the row and the column.
    """
    confidence = np.asarray(confidence)
    if confidence.ndim != 2:
        raise ValueError(f"confidence must be a matrix [requests, block size], got shape {confidence.shape}")
    if confidence.dtype != np.float32:
        confidence = confidence.astype(np.float64, copy=False)
    check_probabilities(confidence, "confidence")
    # The product, one position after the other for all requests at once: np.cumprod along rows of seven is three times
    # as slow. What comes later (allocation, the relay) works by position too, so the layout stays.
    positions = confidence.T.copy()
    for before, here in pairwise(positions):
        here *= before
    return positions.T


def check_probabilities(values: np.ndarray, name: str) -> None:
    """Raise a ValueError naming the first row of `values` [R, γ] that holds NaN or something outside [0, 1]."""
    # NaN counts as either extreme, and fails both comparisons; the slow search for the culprit runs only on failure.
    flat = values.ravel(order="K")
    if flat.size == 0 or (least(flat) >= 0.0 and most(flat) <= 1.0):
        return
    row, column = np.argwhere(~((values >= 0.0) & (values <= 1.0)))[0]
    raise ValueError(f"{name} of row {row} is {values[row, column]} at position {column}: not a probability")
