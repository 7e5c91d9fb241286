"""Cost models: tiers read upward, extrapolation, monotone fits, files that refuse the wrong machine, and live learning.

Bug classes: the probe below instead of the tier above, a fit that falls, a table used on another GPU, an online model
that a stall poisons or that never believes a lasting change. Strength: planted truths with the noise the issue states
(15 %, 2 % tenfold outliers), several seeds; Hypothesis for monotonicity under nonsense.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_scheduler import (
    AdditiveCostModel,
    CostLearning,
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


def drive(model: OnlineCostModel, truth: AdditiveCostModel, steps: int, rng, loads=(1, 2, 4, 8, 16), outliers=0.02):
    """Feed steps of random loads and windows with 15 % noise and tenfold outliers."""
    for _ in range(steps):
        requests = int(rng.choice(loads))
        tokens = int(requests * rng.integers(1, 7))
        slots = requests * 5 if rng.random() < 0.8 else 0
        seconds = float(truth.step_seconds(requests, tokens, 900 * requests) + truth.head_seconds(slots))
        seconds *= np.exp(rng.normal(0, 0.15)) * (10 if rng.random() < outliers else 1)
        model.observe(requests, tokens, 900 * requests, seconds, slots=slots, length=slots // requests)


def error(model, truth, loads=(1, 2, 4, 8, 16)) -> np.ndarray:
    r, k = (x.ravel() for x in np.meshgrid(loads, [1, 2, 4, 6]))
    return np.abs(model.step_seconds(r, r * k, 900 * r) / truth.step_seconds(r, r * k, 900 * r) - 1)


@pytest.mark.parametrize("seed", range(6))
def test_online_within_five_percent_after_two_hundred_noisy_steps(seed):
    model = OnlineCostModel(cpu())
    truth = cpu(1.25, 0.9e-3)
    drive(model, truth, 200, np.random.default_rng(seed))
    assert error(model, truth).mean() < 0.05


@pytest.mark.parametrize("seed", range(6))
def test_online_believes_a_lasting_change_within_three_hundred_steps(seed):
    rng, model, before, after = np.random.default_rng(seed), OnlineCostModel(cpu()), cpu(), cpu(1.5, 0.75e-3)
    drive(model, before, 200, rng)
    drive(model, after, 300, rng)
    assert error(model, after).mean() < 0.05


def test_online_ignores_a_stall_and_carries_the_scale_to_loads_it_has_not_seen():
    rng, model, truth = np.random.default_rng(0), OnlineCostModel(cpu()), cpu(1.5, 0.75e-3)
    drive(model, truth, 200, rng, loads=(1, 2))
    assert error(model, truth, loads=(16, 32)).max() < 0.12
    before = model.step_seconds(4, 8)
    for _ in range(3):
        model.observe(4, 8, 0, 20.0)
    drive(model, truth, 13, rng, loads=(1, 2), outliers=0)
    assert model.step_seconds(4, 8) == pytest.approx(before, rel=0.08)


def test_online_learns_the_draft_when_its_time_is_told_apart():
    model, truth = OnlineCostModel(cpu()), cpu()
    for requests in [1, 4, 8, 16] * 25:
        head = 3 * truth.head_seconds(requests * 5)
        seconds = float(truth.step_seconds(requests, 2 * requests)) + head
        model.observe(requests, 2 * requests, 0, seconds, slots=requests * 5, length=5, head_seconds=head)
    assert model.draft_seconds(8, 40, 5) == pytest.approx(3 * truth.head_seconds(40), rel=0.1)
    assert float(model.step_seconds(8, 16)) == pytest.approx(float(truth.step_seconds(8, 16)), rel=0.05)


def with_block(model: AdditiveCostModel, scale: float = 1.0, head: bool = True) -> AdditiveCostModel:
    """The model with a draft's forward of its own; without a head it is a draft in one graph."""
    block = ([1, 8, 40, 160], scale * np.array([5e-3, 8e-3, 20e-3, 60e-3]))
    return replace(model, head=model.head if head else None, block=block)


@pytest.mark.parametrize("head", [True, False], ids=["head apart", "one graph"])
def test_online_learns_the_block_by_its_own_ratio(head):
    """A draft that takes twice as long as measured, beside a target that does not; stalls are ignored there too.

    Catches a block's time that is taken for the target's, and one that no step corrects.
    """
    rng, model, truth = (
        np.random.default_rng(0),
        OnlineCostModel(with_block(cpu(), head=head)),
        with_block(cpu(), 2, head),
    )
    for step in range(400):
        requests, length = int(rng.choice([1, 4, 8])), int(rng.integers(1, 6))
        noise = np.exp(rng.normal(0, 0.1, 3)) * np.where(rng.random(3) < 0.02, 10, 1)
        rows, slots = requests * (1 + length), requests * length
        block = float(truth.block_seconds(requests, length) * noise[0])
        sampling = float(truth.head_seconds(slots) * noise[1]) if head else None
        seconds = float(truth.step_seconds(requests, rows)) * noise[2] + block + (sampling or 0.0)
        model.observe(
            requests, rows, 0, seconds, slots=slots, length=length, block_seconds=block, head_seconds=sampling
        )
    for requests, length in ((1, 5), (8, 2), (16, 5)):
        assert model.block_seconds(requests, length) == pytest.approx(truth.block_seconds(requests, length), rel=0.12)
    assert float(model.step_seconds(8, 16)) == pytest.approx(float(truth.step_seconds(8, 16)), rel=0.06)
    assert (model.model.head is None) == (not head)


def test_online_mends_a_block_measured_beside_a_busy_neighbour_by_one_probe_and_is_not_spoiled_by_one_stall():
    """Catches a slow average: while plain decoding seems better only rare probes draft, and they took an hour to mend it."""
    model = OnlineCostModel(replace(cpu(), block=([4, 32], [0.08, 0.16])))

    def drafted(block: float) -> float:
        model.observe(8, 16, 900, 0.05 + block, slots=16, length=2, block_seconds=block, head_seconds=0.002)
        for _ in range(15):
            model.observe(8, 8, 900, 0.042)
        return model.block_seconds(8, 2)

    assert drafted(0.004) == pytest.approx(0.004, rel=0.01)
    assert drafted(0.4) < 0.0047 and drafted(0.004) < 0.0045


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 5), st.floats(1e-4, 50.0), st.integers(0, 1)),
        min_size=16,
        max_size=64,
    )
)
def test_online_never_falls_whatever_it_is_told(steps):
    model = OnlineCostModel(cpu())
    for requests, per_request, seconds, drafted in steps:
        rows, slots = requests * (1 + per_request), 5 * requests * drafted
        model.observe(requests, rows, 100, seconds, slots=slots, length=5 * drafted)
    curve = model.step_seconds(4, np.arange(1, 400))
    assert (np.diff(curve) >= 0).all() and curve[0] >= 0 and np.isfinite(curve).all()
    assert (np.diff(model.step_seconds(np.arange(1, 60), 60)) >= 0).all()
    assert (np.diff(model.draft_seconds(1, np.arange(0, 200), 5)) >= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_online_never_fails_on_times_of_a_machine_gone_mad(seed):
    """Speeds that jump, stalls of thirty times, drafts of almost nothing. Catches a division by a column that has fallen
    to zero: the normal equations were no longer positive definite, and that ended a server."""
    rng, model, truth = np.random.default_rng(seed), OnlineCostModel(cpu()), cpu()
    for step in range(1500):
        if step % 100 == 0:
            requests, pace, free = int(rng.choice([1, 4, 8, 16])), rng.choice([0.3, 1, 1, 3]), rng.choice([1e-6, 1, 1])
        drafts = requests * int(rng.integers(0, 6))
        stall = rng.uniform(1, 30) if rng.random() < 0.02 else 1.0
        head = truth.head_seconds(drafts) * free * float(np.exp(0.3 * rng.standard_normal())) if drafts else None
        seconds = pace * stall * truth.step_seconds(requests, requests + drafts) + (head or 0.0)
        length = -(-drafts // requests)
        model.observe(
            requests, requests + drafts, 200 * requests, seconds, slots=drafts, length=length, head_seconds=head
        )
        assert np.isfinite([model.step_seconds(4, 9), model.draft_seconds(1, 7, 7)]).all()


def test_online_keeps_what_it_knows_of_a_load_that_is_long_past():
    """A few thousand steps of plain decoding after a peak. Catches coefficients in units that grow as the peak fades:
    rounding times such a unit said that a row beyond the present load takes hours, and nobody was drafted for again."""
    rng, truth = np.random.default_rng(0), cpu()
    model = OnlineCostModel(truth, CostLearning(memory=16))
    drive(model, truth, 100, rng, loads=(32,), outliers=0)
    for _ in range(4000):
        requests = int(rng.integers(8, 17))
        model.observe(
            requests,
            requests,
            900 * requests,
            float(truth.step_seconds(requests, requests, 900 * requests)) * np.exp(rng.normal(0, 0.1)),
        )
    assert error(model, truth, loads=(16, 32)).max() < 0.25
    assert model.draft_seconds(32, 160, 5) == pytest.approx(truth.draft_seconds(32, 160, 5), rel=0.25)


def test_online_refuses_times_that_cannot_be():
    model = OnlineCostModel(cpu())
    for seconds, draft in ((0.0, None), (np.nan, None), (np.inf, None), (1.0, 1.5)):
        with pytest.raises(ValueError, match="cannot take"):
            model.observe(1, 1, 0, seconds, slots=5, length=5, head_seconds=draft)
    with pytest.raises(ValueError, match="cannot take"):
        model.observe(1, 1, 0, 1.0, slots=5, length=5, block_seconds=0.6, head_seconds=0.6)
    with pytest.raises(ValueError, match="at least 1"):
        CostLearning(memory=0.5)
