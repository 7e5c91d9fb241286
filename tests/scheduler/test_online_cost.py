"""Live learning of a step's cost: what recent steps teach, what they must not spoil, and what stays of the prior.

Bug classes: an online model that a stall poisons or that never believes a lasting change, a part of the step that is taken
for another, a server that ends for want of an estimate. Strength: planted truths with 15 % noise and 2 % tenfold outliers,
several seeds; Hypothesis for monotonicity under nonsense.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_scheduler import AdditiveCostModel, CostLearning, OnlineCostModel

from .test_cost import cpu, with_block


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
