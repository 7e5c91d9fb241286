"""Calibration and the budget of policy `ahead` on the device. Separates another affine map (temperature against slope,
shift before or after, the wrong kind's numbers) and another search (bounds, ties, a forbidden K) from the host's own.

Strength: 200 random batches against `OnlineCalibrator.apply` and `best_budget`, fitted slopes and shifts far from one
and zero; swapping the two kinds moves a survival by > 0.05.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_kernels import allocate_windows, best_tokens, calibrated_survival
from dspark_scheduler import AdditiveCostModel, DraftShape, OnlineCalibrator, Terms
from dspark_scheduler import allocate_windows as allocate_on_host
from dspark_scheduler.budget import reference_budget

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)


def fitted(gamma: int, seed: int) -> OnlineCalibrator:
    """A calibrator that has learned from a head which is too sure of itself, and off by a constant."""
    g, calibrator = np.random.default_rng(seed), OnlineCalibrator(gamma, refit_every=1)
    for _ in range(20):
        logits = g.normal(0.5, 2.0, (64, gamma))
        chance = 1 / (1 + np.exp(-(0.4 * logits - 0.7 + 0.1 * seed)))
        calibrator.observe(logits, (g.random(logits.shape) < chance).astype(float), np.ones(logits.shape, bool))
        calibrator.end_step()
    return calibrator


def test_survival_is_the_calibrators_own_for_either_kind_and_for_shorter_blocks():
    gamma, g = 5, np.random.default_rng(0)
    kinds, draft = [fitted(gamma, 0), fitted(gamma, 5)], np.linspace(0.7, 1.6, gamma)  # the draft's own temperatures
    slope = torch.tensor(np.stack([1 / (draft * c.temperatures) for c in kinds]), dtype=torch.float32)
    shift = torch.tensor(np.stack([c.shifts for c in kinds]), dtype=torch.float32)
    assert float((slope * torch.from_numpy(draft).float() - 1).abs().max()) > 0.3 and float(shift.abs().max()) > 0.2
    logits, greedy = g.normal(0, 3, (40, gamma)), g.random(40) < 0.5
    conditional = np.where(greedy[:, None], kinds[1].apply(logits / draft), kinds[0].apply(logits / draft))
    for k in (gamma, 2):
        raw = torch.tensor(logits[:, :k], dtype=torch.float32)
        ours = calibrated_survival(raw, slope, shift, torch.from_numpy(greedy))
        np.testing.assert_allclose(ours.numpy(), np.cumprod(conditional[:, :k], axis=1), atol=2e-6)
        swapped = calibrated_survival(raw, slope, shift, torch.from_numpy(~greedy))
        assert float((ours - swapped).abs().max()) > 0.05


def step_costs(g: np.random.Generator, requests: int, gamma: int, jagged: bool) -> AdditiveCostModel:
    rows = np.arange(1, requests * (gamma + 1) + 1)
    seconds = np.cumsum(g.random(len(rows)) * (g.random(len(rows)) < 0.3)) + 1 if jagged else 1 + 0.02 * rows
    return AdditiveCostModel(0.0, ([1], [0.0]), (rows, seconds))


@SETTINGS
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 7), st.booleans(), st.booleans())
def test_the_best_budget_is_the_hosts_and_its_windows_are_too(seed, requests, gamma, bounded, jagged):
    g = np.random.default_rng(seed)
    survival = np.cumprod(g.random((requests, gamma)).astype(np.float32) ** 0.3, axis=1)
    high = g.integers(0, gamma + 1, requests) if bounded else np.full(requests, gamma)
    low = np.minimum(g.integers(0, 3, requests), high) if bounded else np.zeros(requests, np.int64)
    cost = step_costs(g, requests, gamma, jagged)
    seconds = torch.tensor(cost.step_seconds(requests, requests + np.arange(requests * gamma + 1)))
    bounds = torch.from_numpy(low), torch.from_numpy(high)
    tokens = best_tokens(torch.from_numpy(survival), seconds, *bounds)
    assert tokens.shape == (1,) and int(low.sum()) <= int(tokens) <= int(high.sum())

    options = {"min_window": low, "max_window": high}
    if high.any():
        terms = Terms.of(cost, DraftShape("block", gamma), requests, low, high)
        host, _ = reference_budget(survival, terms, gamma)
        value = lambda k: _committed(survival, k, low, high) / float(cost.step_seconds(requests, requests + k))
        assert value(int(tokens)) >= value(host) * (1 - 1e-9), (int(tokens), host)
        if not jagged:
            assert int(tokens) == host
    windows = allocate_windows(torch.from_numpy(survival), tokens, *bounds)
    assert windows.tolist() == allocate_on_host(survival, int(tokens), **options).tolist()
    assert int(windows.sum()) == int(tokens)


def _committed(survival: np.ndarray, budget: int, low: np.ndarray, high: np.ndarray) -> float:
    windows = allocate_on_host(survival, budget, min_window=low, max_window=high)
    return len(survival) + sum(float(row[:w].sum(dtype=np.float64)) for row, w in zip(survival, windows))


def test_a_budget_keeps_to_the_rows_of_its_graph_and_off_what_is_forbidden():
    survival, zero = torch.full((2, 3), 0.9), torch.zeros(2, dtype=torch.int64)
    flat = torch.ones(7)
    assert int(best_tokens(survival, flat, zero, zero + 3)) == 6
    assert int(best_tokens(survival, flat, zero, zero + 3, most=4)) == 4
    assert int(best_tokens(survival, flat, zero + 2, zero + 3, most=1)) == 4, "what must be verified is"
    assert int(best_tokens(survival, torch.tensor([1.0, 1, 1, torch.inf, torch.inf, 9, 9]), zero, zero + 3)) == 2
