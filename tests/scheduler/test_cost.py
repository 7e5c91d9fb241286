"""Cost models: tiers read upward, extrapolation, monotone fits, and files that refuse the wrong machine.

Bug classes: the probe below instead of the tier above, a block that is not paid for, a fit that falls, a table used on
another GPU. Strength: planted truths, read back exactly or fitted from noisy samples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark_scheduler import (
    AdditiveCostModel,
    Fingerprint,
    FingerprintMismatch,
    OnlineCostModel,
    fit_cost_model,
)
from dspark_scheduler.cost import DENSE

# This CPU (facts): rows -> ms of one forward of SmolLM2-135M in bf16.
ROWS = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]
SECONDS = np.maximum.accumulate([35, 34, 38, 40, 41, 47, 49, 57, 63, 81, 95, 122, 147, 203]) / 1000


def cpu(scale: float = 1.0, alpha: float = 0.5e-3) -> AdditiveCostModel:
    return AdditiveCostModel(
        2e-3,
        ([1, 32], [0.0, 31 * alpha]),
        (ROWS, SECONDS * scale),
        (),
        1e-7,
        ([5, 20, 40, 80], [2.1e-3, 3.2e-3, 4.8e-3, 7.5e-3]),
    )


def with_block(model: AdditiveCostModel, scale: float = 1.0, head: bool = True) -> AdditiveCostModel:
    """The model with a draft's forward of its own; without a head it is a draft in one graph."""
    block = ([1, 8, 40, 160], scale * np.array([5e-3, 8e-3, 20e-3, 60e-3]))
    return replace(model, head=model.head if head else None, block=block)


def test_tokens_are_rounded_up_to_the_tier_that_runs():
    model = AdditiveCostModel(1.0, ([1], [0.0]), ([8, 16, 32], [1.0, 2.0, 4.0]), tiers=(8, 16, 32))
    assert model.step_seconds(1, np.array([1, 8, 9, 16, 17, 32])).tolist() == [2.0, 2.0, 3.0, 3.0, 5.0, 5.0]
    assert model.padded(np.array([1, 9, 33])).tolist() == [8, 16, 33]
    assert model.step_seconds(1, 40) == pytest.approx(1 + 4 + 8 * 2 / 16)  # above the last tier: itself, last slope
    assert float(model.step_seconds(1, 9000)) == pytest.approx(1 + 4 + (9000 - 32) * 2 / 16)  # beyond the dense table


@pytest.mark.parametrize("tokens", [range(3, 40), range(3, 40, 7), range(5, 5), range(DENSE - 3, DENSE + 3)])
def test_a_range_of_tokens_costs_what_each_of_them_costs(tokens):
    model = AdditiveCostModel(1.0, ([1], [0.0]), ([8, 16, 32], [1.0, 2.0, 4.0]), tiers=(8, 16, 32))
    assert model.step_seconds(1, tokens).tolist() == [float(model.step_seconds(1, m)) for m in tokens]


def test_arrays_broadcast_and_terms_add():
    model = AdditiveCostModel(1.0, ([1, 3], [0.0, 2.0]), ([1, 2], [0.0, 10.0]), context=0.5, head=([2, 4], [3.0, 5.0]))
    got = model.step_seconds(np.array([[1], [2], [5]]), np.array([1, 2]), 2)
    assert got.tolist() == [[2.0, 12.0], [3.0, 13.0], [6.0, 16.0]]
    assert model.draft_seconds(1, np.array([0, 1, 3, 6]), 6).tolist() == [0.0, 3.0, 4.0, 7.0]
    assert model.draft_seconds(1, 0, 0) == 0.0 and model.draft_seconds(1, 3, 3) == 4.0


def test_a_block_is_paid_for_by_its_rows_whatever_is_drawn_from_it():
    """On an accelerator the draft is one graph: a block's table, and none for the head."""
    short = AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]), head=([2, 4], [3.0, 5.0]), block=([2, 10], [1.0, 5.0]))
    assert short.draft_seconds(2, np.array([0, 3]), 3).tolist() == [3.0, 7.0]
    assert short.draft_seconds(2, 0, 0) == short.block_seconds(2, 0) == 0.0
    whole = AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]), block=([2, 10], [1.0, 5.0]), whole=5)
    assert whole.draft_seconds(2, 6, 3) == whole.block_seconds(2, 1) == 5.0
    with pytest.raises(ValueError, match="whole block"):
        AdditiveCostModel(1.0, ([1], [0.0]), ([1], [0.0]), whole=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": ([2, 1], [0, 1])},
        {"theta": ([1, 2], [2, 1])},
        {"theta": ([1], [-1])},
        {"tiers": (4, 4)},
        {"t0": -1.0},
        {"context": -1.0},
        {"alpha": ([], [])},
        {"head": ([1, 2], [0])},
        {"block": ([1, 2], [2, 1])},
        {"theta": ([1], [np.nan])},
    ],
)
def test_a_table_that_falls_or_is_unsorted_is_refused(wrong):
    with pytest.raises(ValueError):
        AdditiveCostModel(**{"t0": 1.0, "alpha": ([1], [0]), "theta": ([1], [0]), **wrong})


MINE = Fingerprint("t", "d", 5, "EPYC", "bfloat16", 1, "sglang 0.5.23")


def test_a_file_is_read_back_exactly_and_refused_on_another_machine(tmp_path):
    path = tmp_path / "deep" / "cost.json"
    model = with_block(cpu())
    model.save(path, MINE)
    assert AdditiveCostModel.load(path, MINE).to_dict() == model.to_dict()
    OnlineCostModel(model).save(path, MINE)
    np.testing.assert_allclose(AdditiveCostModel.load(path, MINE).step_seconds(3, 9), model.step_seconds(3, 9))
    other = Fingerprint("t", "d", 7, "H200", "bfloat16", 1, "sglang 0.5.23")
    with pytest.raises(FingerprintMismatch, match="gamma 5 instead of 7, device 'EPYC' instead of 'H200'$"):
        AdditiveCostModel.load(path, other)
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(ValueError, match="another version of this program"):
        AdditiveCostModel.load(path, MINE)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a cost file"):
        AdditiveCostModel.load(path, MINE)
    with pytest.raises(ValueError, match="keys"):
        AdditiveCostModel.from_dict({"t0": 1})


def test_a_fit_recovers_a_planted_model_from_noisy_samples():
    rng, truth = np.random.default_rng(0), cpu()
    requests = rng.integers(1, 33, 600)
    tokens = requests * rng.integers(1, 7, 600)
    context, slots = rng.integers(0, 400000, 600), np.where(rng.random(600) < 0.5, requests * 5, 0)
    seconds = (truth.step_seconds(requests, tokens, context) + truth.head_seconds(slots)) * rng.normal(1, 0.03, 600)
    got = fit_cost_model(
        requests,
        tokens,
        seconds,
        context=context,
        slots=slots,
        alpha_knots=[1, 8, 32],
        theta_knots=ROWS[::2],
        head_knots=[5, 40, 160],
    )
    r, m = np.meshgrid([1, 4, 16, 32], [1, 2, 4, 6])
    np.testing.assert_allclose(got.step_seconds(r, r * m), truth.step_seconds(r, r * m), rtol=0.05)
    assert got.context == pytest.approx(truth.context, rel=0.3)
    assert got.head_seconds(80) == pytest.approx(float(truth.head_seconds(80)), rel=0.25)


def test_a_fit_of_exact_tier_timings_is_exact():
    truth = AdditiveCostModel(5e-3, ([1, 8], [0.0, 1e-3]), ([8, 16, 64], [1e-3, 2e-3, 9e-3]), tiers=(8, 16, 64))
    r, m = (x.ravel() for x in np.meshgrid([1, 8], [8, 13, 16, 40]))
    got = fit_cost_model(r, m, truth.step_seconds(r, m), tiers=(8, 16, 64))
    np.testing.assert_allclose(got.step_seconds(r, m), truth.step_seconds(r, m), rtol=1e-9)
    with pytest.raises(ValueError, match="positive"):
        fit_cost_model([1, 2], [1, 2], [1.0, 0.0])
