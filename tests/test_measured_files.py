"""What the cache holds never ends a start, and what a draft computes never ends a server.

Bug classes: a file that may not be read treated worse than one that is damaged; a state taken over by half; one
request's confidence that is not finite spoiling what all requests learn from, or its own windows.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from dspark_scheduler import Fingerprint, OnlineCalibrator
from dspark_scheduler.fingerprint import load_measurement, save_measurement
from sglang_dspark.learning.confidence import Calibration

GAMMA = 3
MINE = Fingerprint("t", "d", GAMMA, "cpu", "bfloat16", 1, "sglang 0.5.23")


def calibration(tmp_path: Path) -> Calibration:
    return Calibration(GAMMA, "main", "online", tmp_path, MINE)


def learned(tmp_path: Path) -> Calibration:
    """A calibration that has seen fifty steps, and its state in `tmp_path`."""
    mine, rng = calibration(tmp_path), np.random.default_rng(1)
    for _ in range(50):
        mine.observe(rng.normal(size=(8, GAMMA)), np.arange(8) < 4, rng.random((8, GAMMA)), np.ones((8, GAMMA), bool))
    mine.save(tmp_path)
    return mine


def may_not_be_read(file: Path, monkeypatch) -> None:
    """Permissions do not bind root, under whom tests may run."""
    read = Path.read_text

    def refuse(self, *args, **kwargs):
        if self == file:
            raise PermissionError(13, "Permission denied", str(file))
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)


def damage(file: Path, how: str, monkeypatch) -> None:
    if how == "unreadable":
        may_not_be_read(file, monkeypatch)
    elif how == "cut short":
        file.write_text(file.read_text()[:100])
    else:
        content = json.loads(file.read_text())
        content["body"]["table"] = [["x"]]
        file.write_text(json.dumps(content))


@pytest.mark.parametrize("how", ["unreadable", "cut short", "of the wrong shape"])
def test_a_calibration_in_the_cache_that_is_of_no_use_is_learned_anew(tmp_path, monkeypatch, caplog, how):
    learned(tmp_path)
    damage(tmp_path / "calibration-main-sampled.json", how, monkeypatch)
    with caplog.at_level(logging.WARNING):
        mine = calibration(tmp_path)
        assert mine.restore(tmp_path)  # the greedy half is whole
    assert [record.message.startswith("calibration is learned anew: ") for record in caplog.records] == [True]
    assert mine.online["sampled"].steps == 0 and mine.online["greedy"].steps == 50
    fresh = OnlineCalibrator(GAMMA)
    logits = np.linspace(-2, 2, GAMMA)[None]
    np.testing.assert_array_equal(mine.online["sampled"].apply(logits), fresh.apply(logits))


def test_an_empty_cache_is_no_news(tmp_path, caplog):
    assert not calibration(tmp_path).restore(tmp_path / "absent")
    assert not caplog.records


def test_a_measured_file_that_may_not_be_read_is_refused_like_a_damaged_one(tmp_path, monkeypatch):
    save_measurement(tmp_path / "cost.json", "server-cost", MINE, {})
    may_not_be_read(tmp_path / "cost.json", monkeypatch)
    with pytest.raises(ValueError, match="cost.json is not a server-cost file: it cannot be read"):
        load_measurement(tmp_path / "cost.json", "server-cost", MINE)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_confidence_that_is_not_finite_promises_nothing_and_leaves_the_others_alone(tmp_path, number):
    mine, logits, greedy = learned(tmp_path), np.linspace(-1, 1, 4 * GAMMA).reshape(4, GAMMA), np.zeros(4, bool)
    right = mine.conditional(logits, greedy)
    logits[2, 1] = number
    found = mine.conditional(logits, greedy)
    np.testing.assert_array_equal(found[2], 0.0)
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(right, 2, 0))


def test_a_confidence_that_is_not_finite_teaches_nothing_is_counted_and_logged_once(tmp_path, caplog):
    mine, other, rng = learned(tmp_path), learned(tmp_path), np.random.default_rng(2)
    for _ in range(20):
        logits, outcome, seen = rng.normal(size=(4, GAMMA)), rng.random((4, GAMMA)), np.ones((4, GAMMA), bool)
        greedy = np.array([True, False, False, True])
        other.observe(logits[1:], greedy[1:], outcome[1:], seen[1:])
        logits[0, 0] = np.nan
        mine.observe(logits, greedy, outcome, seen)
    assert mine.not_finite == 20 and other.not_finite == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    probe = np.zeros((2, GAMMA)), np.array([True, False])
    np.testing.assert_array_equal(mine.conditional(*probe), other.conditional(*probe))
