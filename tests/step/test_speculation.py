"""What a server learned is found again, a file of another server is refused, and a damaged one costs a measurement.

Bug class: a cost table or calibration of another model, machine or version that is believed (silent mis-scheduling), or
that keeps the server from starting.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_scheduler import AdditiveCostModel, Fingerprint, FingerprintMismatch
from sglang_dspark.learning.confidence import Calibration
from sglang_dspark.settings.config import ConfigError, DSparkConfig
from sglang_dspark.step import speculation as runtime
from sglang_dspark.step.measure import lower_envelope
from sglang_dspark.step.speculation import Speculation, checkpoint_digest

GAMMA = 4
PRINT = Fingerprint("target", "draft", GAMMA, "cpu", "float32", 1, "sglang 0.5.23")
COST = AdditiveCostModel(
    t0=0.03,
    alpha=([1, 8], [0, 0.01]),
    theta=([1, 40], [0, 0.05]),
    head=([1, 32], [0.001, 0.004]),
    block=([4, 32], [0.002, 0.004]),
)


@pytest.fixture()
def measured(monkeypatch, tmp_path):
    """Counts measurements; state is kept under tmp_path."""
    calls = []
    monkeypatch.setattr(runtime, "measure", lambda *a, **k: calls.append(1) or COST)
    monkeypatch.setattr(runtime, "state_folder", lambda fingerprint: tmp_path / fingerprint.target)
    return calls


def speculation(tmp_path, fingerprint=PRINT, **settings):
    config = SimpleNamespace(block_size=GAMMA, enable_confidence_head=True, has_hidden_confidence=True)
    ranks = SimpleNamespace(json=lambda value: value)
    drafter = SimpleNamespace(
        ranks=ranks, gamma=GAMMA, folder=tmp_path, config=config, head=None, short_blocks=True, on_cpu=True, graph=None
    )
    made = Speculation(DSparkConfig(**settings), drafter, fingerprint, learning=True)
    made.measure(None, 8)
    return made


def test_a_second_start_finds_the_cost_of_the_first(measured, tmp_path):
    first, second = speculation(tmp_path), speculation(tmp_path)
    assert measured == [1]
    assert second.cost.step_seconds(4, 10) == pytest.approx(first.cost.step_seconds(4, 10))


def test_measure_measures_although_a_file_fits(measured, tmp_path):
    speculation(tmp_path)
    speculation(tmp_path, cost_model="measure")
    assert measured == [1, 1]


def test_a_full_disk_ends_no_server_and_is_told(measured, tmp_path, caplog):
    """Saving happens between steps: an error there would take every running request with it."""
    started = speculation(tmp_path)
    folder, started.folder = started.folder, tmp_path / "target" / "cost.json"  # a file: nothing can be made below it
    started.save()
    started.save()
    assert "cost.json" in started.not_saved and sum("could not be saved" in line for line in caplog.messages) == 1
    started.folder = folder
    started.save()
    assert started.not_saved is None


@pytest.mark.parametrize("damage", ["not json", '{"kind": "cost"}', None])
def test_a_damaged_cache_costs_a_measurement_and_not_the_start(measured, tmp_path, damage):
    speculation(tmp_path)
    path = tmp_path / "target" / "cost.json"
    if damage is None:
        body = json.loads(path.read_text())
        body["body"]["surprise"] = 1
        damage = json.dumps(body)
    path.write_text(damage)
    assert speculation(tmp_path).cost is not None and measured == [1, 1]


@pytest.mark.parametrize("fault", ["a file", "a link to itself", "below a file"])
def test_a_cache_folder_that_cannot_be_entered_costs_a_measurement_and_one_line(
    measured, tmp_path, monkeypatch, caplog, fault
):
    """Permissions do not bind root, under whom tests may run: these faults raise as they do, in the same places."""
    folder = tmp_path / "target"
    folder.symlink_to(folder) if fault == "a link to itself" else folder.write_text("")
    if fault == "below a file":
        monkeypatch.setattr(runtime, "state_folder", lambda fingerprint: folder / "server")
    assert speculation(tmp_path).cost is not None and measured == [1]
    assert [line.split(":")[0] for line in caplog.messages if "anew" in line] == ["everything is learned anew"]


def test_a_cost_file_of_another_server_is_refused_and_names_what_differs(measured, tmp_path):
    path = tmp_path / "other.json"
    COST.save(path, Fingerprint("target", "draft", 7, "cpu", "bfloat16", 1, "sglang 0.5.23"))
    with pytest.raises(FingerprintMismatch, match="gamma 7 instead of 4, dtype 'bfloat16' instead of 'float32'"):
        speculation(tmp_path, cost_model=str(path))


def test_what_calibration_learned_is_found_again_by_the_same_server_only(measured, tmp_path):
    first = speculation(tmp_path)
    chance = np.random.default_rng(0)
    logits = chance.normal(size=(64, GAMMA))
    for _ in range(40):  # accepted less often than the head says
        first.calibration.observe(logits, np.zeros(64, bool), np.full((64, GAMMA), 0.2), np.ones((64, GAMMA), bool))
    first.save()
    sure = first.calibration.conditional(logits, np.zeros(64, bool)).mean()
    again = speculation(tmp_path).calibration.conditional(logits, np.zeros(64, bool)).mean()
    other = Calibration(GAMMA, "hidden", "online", tmp_path, Fingerprint("x", "y", GAMMA, "cpu", "float32", 1, "s"))
    assert sure == pytest.approx(0.2, abs=0.05) and again == pytest.approx(sure, abs=0.02)
    assert not other.restore(tmp_path / "target")
    assert other.conditional(logits, np.zeros(64, bool)).mean() > 0.4


def test_switching_drops_what_the_new_mode_never_reads_and_refusals_change_nothing(measured, tmp_path):
    running = speculation(tmp_path, window_policy="causal", min_window=1)
    assert running.switch({"verify_mode": "static", "max_window": 2}).window_policy is None
    assert running.bounds.high == 2
    with pytest.raises(ConfigError, match="block_size is 4"):
        running.switch({"max_window": 9})
    assert running.config.max_window == 2
    assert running.switch({"verify_mode": "off"}).verify_mode == "off" and running.bounds.high == 0


def test_a_server_that_was_switched_off_comes_back_as_it_was_started(measured, tmp_path):
    """Catches a status that speaks of online calibration on a server that was started without."""
    running = speculation(tmp_path, calibration="off", cost_model="measure")
    assert running.switch({"verify_mode": "off"}).calibration == "online", "off reads none, and a check refuses others"
    back = running.switch({"verify_mode": "compact"})
    assert (back.calibration, back.cost_model) == ("off", "measure")


def test_a_checkpoints_digest_moves_with_its_weights_and_its_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(300_000))
    digests = [checkpoint_digest(tmp_path)]
    for at in (0, 299_999):
        content = bytearray(300_000)
        content[at] = 1
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.append(checkpoint_digest(tmp_path))
    (tmp_path / "config.json").write_text('{"block_size": 7}')
    digests.append(checkpoint_digest(tmp_path))
    assert len(set(digests)) == len(digests)


def test_a_delayed_probe_costs_no_more_than_a_larger_one_that_was_not():
    """Catches a table made monotone from below, which carries one delayed probe to every larger size."""
    seconds = {(1, 1): 20.0, (1, 6): 90.0, (2, 2): 21.0, (2, 12): 30.0, (4, 4): 95.0}
    assert lower_envelope(seconds) == {(1, 1): 20.0, (1, 6): 30.0, (2, 2): 21.0, (2, 12): 30.0, (4, 4): 95.0}
    assert lower_envelope({1: 3.0, 2: 2.0, 4: 5.0}) == {1: 2.0, 2: 2.0, 4: 5.0}
