"""Calibration: planted temperatures come back, from whole and from censored outcomes, and the error falls on unseen
data.

Bug classes: censored blocks counted as failures, a fit that depends on arrival order, a calibrator that cannot shut up
a head that knows nothing, one that never forgets. Strength: 40 000 planted blocks, temperatures within 10 %; censoring
by the very product that the scheduler uses; order independence to the last bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from dspark_scheduler import (
    Fingerprint,
    FingerprintMismatch,
    OnlineCalibrator,
    SequentialTemperatureScaling,
    allocate_windows,
    expected_calibration_error,
    survival,
)
from dspark_scheduler.calibration import sigmoid

PLANTED = np.array([1.6, 2.0, 1.3, 0.8])
MINE = Fingerprint("t", "d", 4, "EPYC", "bfloat16", 1, "sglang 0.5.23")


def blocks(seed: int, count: int = 40000, temperatures=PLANTED, soft: bool = False):
    """Raw logits, outcomes and the at-risk mask of blocks whose true conditional acceptance is σ(z / T)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.2, 1.8, (count, len(temperatures)))
    truth = sigmoid(logits / temperatures)
    hard = rng.random(truth.shape) < truth
    mask = np.cumprod(np.column_stack([np.ones(count), hard[:, :-1]]), axis=1) > 0
    return logits, (truth if soft else hard), mask


def censor(logits: np.ndarray, mask: np.ndarray, per_step: int = 8, budget: int = 12) -> np.ndarray:
    """Windows as the scheduler would choose them, from the uncalibrated survival."""
    values, keep = survival(sigmoid(logits)), np.zeros_like(mask)
    for start in range(0, len(logits), per_step):
        windows = allocate_windows(values[start : start + per_step], budget)
        keep[start : start + per_step] = np.arange(logits.shape[1]) < windows[:, None]
    return mask & keep


def mean_prefix_ece(logits: np.ndarray, accepted: np.ndarray, confidence: np.ndarray) -> float:
    """The paper's figure: ECE of the cumulative product against "prefix accepted", mean over positions."""
    prefix = np.cumprod(accepted, axis=1)
    product = np.cumprod(confidence, axis=1)
    return float(np.mean([expected_calibration_error(product[:, k], prefix[:, k]) for k in range(prefix.shape[1])]))


@pytest.mark.parametrize("objective", ["ece", "nll"])
def test_planted_temperatures_come_back_and_the_error_falls_on_unseen_blocks(objective):
    logits, hard, _ = blocks(0)
    fitted = SequentialTemperatureScaling.fit(logits, hard, objective=objective)
    np.testing.assert_allclose(fitted.temperatures, PLANTED, rtol=0.1)
    fresh, outcome, _ = blocks(1)
    before = mean_prefix_ece(fresh, outcome, sigmoid(fresh))
    after = mean_prefix_ece(fresh, outcome, fitted.apply(fresh))
    assert before > 0.03 and after < 0.01, (before, after)
    assert np.mean(fitted.ece_after) < 0.35 * np.mean(fitted.ece_before)


@pytest.mark.parametrize("soft", [False, True])
def test_outcomes_cut_by_the_window_do_not_bias_the_fit(soft):
    logits, outcome, mask = blocks(2, soft=soft)
    seen = censor(logits, mask)
    assert seen[:, 3].sum() < 0.6 * mask[:, 3].sum()
    fitted = SequentialTemperatureScaling.fit(logits, outcome, seen)
    np.testing.assert_allclose(fitted.temperatures, PLANTED, rtol=0.15)


def test_counting_cut_blocks_as_rejected_would_have_been_seen():
    """The planted fault: every block that was not accepted up to k is a failure at k, also those cut before it."""
    logits, hard, mask = blocks(2)
    seen = censor(logits, mask)
    wrong = SequentialTemperatureScaling.fit(logits, hard & seen, np.ones_like(seen))
    assert np.abs(np.array(wrong.temperatures) / PLANTED - 1).max() > 0.3


def test_soft_labels_need_fewer_blocks():
    def error(soft: bool) -> float:
        runs = [SequentialTemperatureScaling.fit(*blocks(s, 600, soft=soft), objective="nll") for s in range(8)]
        return float(np.mean([np.abs(np.log(np.array(r.temperatures) / PLANTED)).mean() for r in runs]))

    assert error(soft=True) < 0.5 * error(soft=False)


def test_a_position_hardly_seen_keeps_the_temperature_before_it():
    logits, hard, mask = blocks(0, 2000)
    mask[:, 2:] = False
    fitted = SequentialTemperatureScaling.fit(logits, hard, mask)
    assert fitted.temperatures[3] == fitted.temperatures[2] == fitted.temperatures[1]
    assert fitted.samples[2:] == (0, 0)


def test_temperatures_survive_a_file_and_are_refused_elsewhere(tmp_path):
    fitted = SequentialTemperatureScaling.fit(*blocks(0, 3000))
    fitted.save(tmp_path / "sts.json", MINE)
    assert SequentialTemperatureScaling.load(tmp_path / "sts.json", MINE) == fitted
    with pytest.raises(FingerprintMismatch, match="draft 'd' instead of 'e'"):
        SequentialTemperatureScaling.load(
            tmp_path / "sts.json", Fingerprint("t", "e", 4, "EPYC", "bfloat16", 1, "sglang 0.5.23")
        )


def test_outcomes_that_cannot_be_are_refused():
    logits = np.zeros((3, 2))
    fit = SequentialTemperatureScaling.fit
    with pytest.raises(ValueError, match="mask of what was observed"):
        fit(logits, np.full((3, 2), 0.5))
    with pytest.raises(ValueError, match="hole"):
        fit(logits, np.ones((3, 2)), np.array([[False, True]] * 3))
    with pytest.raises(ValueError, match="outside"):
        fit(logits, np.full((3, 2), 1.5), np.ones((3, 2), bool))
    with pytest.raises(ValueError, match="finite"):
        fit(np.full((3, 2), np.nan), np.ones((3, 2)))
    with pytest.raises(ValueError, match="objective"):
        fit(logits, np.ones((3, 2)), objective="mse")
    with pytest.raises(ValueError, match="positive"):
        SequentialTemperatureScaling((1.0, 0.0))


def feed(calibrator: OnlineCalibrator, logits, outcome, mask, per_step: int = 20) -> None:
    for start in range(0, len(logits), per_step):
        part = slice(start, start + per_step)
        calibrator.observe(logits[part], outcome[part], mask[part])
        calibrator.end_step()


@pytest.mark.parametrize("soft", [False, True])
def test_online_recovers_planted_temperatures_from_censored_traffic(soft):
    logits, outcome, mask = blocks(3, soft=soft)
    calibrator = OnlineCalibrator(4)
    feed(calibrator, logits, outcome, censor(logits, mask))
    calibrator.refit()
    np.testing.assert_allclose(calibrator.temperatures, PLANTED, rtol=0.15)
    assert np.abs(calibrator.shifts[:3]).max() < 0.1  # the last one is seen at high confidence alone
    fresh, hard, _ = blocks(4)
    assert mean_prefix_ece(fresh, hard, calibrator.apply(fresh)) < 0.015


def test_online_silences_a_head_that_knows_nothing():
    rng = np.random.default_rng(0)
    logits = rng.normal(3.0, 2.0, (20000, 3))  # sure of itself, and unrelated to
    outcome = rng.random((20000, 3)) < np.array([0.8, 0.5, 0.3])
    calibrator = OnlineCalibrator(3)
    feed(calibrator, logits, outcome, np.cumprod(np.column_stack([np.ones(20000), outcome[:, :2]]), axis=1) > 0)
    confidence = calibrator.apply(logits)
    np.testing.assert_allclose(confidence.mean(axis=0), [0.8, 0.5, 0.3], atol=0.03)
    assert confidence.std(axis=0).max() < 0.03


def test_online_never_inverts_a_head_that_is_wrong_way_round():
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 2.0, (4000, 2))
    calibrator = OnlineCalibrator(2)
    feed(calibrator, logits, rng.random((4000, 2)) < sigmoid(-logits), np.ones((4000, 2), bool))
    calibrator.refit()
    assert (calibrator.temperatures > 100).all()


def test_online_state_is_the_same_whatever_order_the_batches_of_a_step_arrive_in():
    logits, outcome, mask = blocks(5, 640, soft=True)
    states = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        calibrator = OnlineCalibrator(4, refit_every=2)
        for step in range(8):
            for part in order:
                rows = slice(80 * step + 20 * part, 80 * step + 20 * part + 20)
                calibrator.observe(logits[rows], outcome[rows], mask[rows])
            calibrator.end_step()
        states.append(
            (calibrator.temperatures.tobytes(), calibrator.shifts.tobytes(), calibrator.reliability().tobytes())
        )
    assert states[0] == states[1] == states[2]


def test_online_forgets_what_was_before_the_text_changed():
    calibrator = OnlineCalibrator(4, memory=300)
    feed(calibrator, *blocks(6, 12000))
    feed(calibrator, *blocks(7, 12000, temperatures=PLANTED * 2.5))
    np.testing.assert_allclose(calibrator.temperatures[:2], PLANTED[:2] * 2.5, rtol=0.2)


def test_online_positions_hardly_seen_lean_on_the_others():
    logits, outcome, mask = blocks(8, 8000, temperatures=np.full(4, 2.0))
    mask[:, 3] = False
    calibrator = OnlineCalibrator(4)
    feed(calibrator, logits, outcome, mask)
    assert calibrator.temperatures[3] == pytest.approx(2.0, rel=0.1)


def test_online_scores_are_those_of_the_confidence_in_use():
    logits, outcome, mask = blocks(9, 4000)
    calibrator = OnlineCalibrator(4, memory=1e9, refit_every=10**6)
    feed(calibrator, logits, outcome, mask)
    confidence = sigmoid(logits)
    for k in range(4):
        c, y = confidence[mask[:, k], k], outcome[mask[:, k], k]
        assert calibrator.ece()[k] == pytest.approx(expected_calibration_error(c, y), abs=1e-4)
    table = calibrator.reliability()
    assert table.shape == (4, 20, 3) and table[:, :, 0].sum(axis=1) == pytest.approx(mask.sum(axis=0), rel=1e-4)


def test_online_state_survives_a_file(tmp_path):
    calibrator = OnlineCalibrator(4)
    feed(calibrator, *blocks(10, 4000))
    calibrator.refit()
    calibrator.save(tmp_path / "c.json", MINE)
    other = OnlineCalibrator(4)
    other.restore(tmp_path / "c.json", MINE)
    np.testing.assert_allclose(other.temperatures, calibrator.temperatures)
    with pytest.raises(ValueError, match="block size 4, not 3"):
        OnlineCalibrator(3).restore(tmp_path / "c.json", MINE)
