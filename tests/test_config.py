"""The settings object refuses what cannot be meant, and travels unchanged.

Bug classes: a setting that is silently ignored (a typo, a flag the mode never reads), bounds that contradict each
other, and settings lost on the way to SGLang's scheduler process. Each case asserts the flag's name in the message, so
an error that blames the wrong setting fails too.
"""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.settings.config import ACCEPT_RULES, VERIFY_MODES, ConfigError, DSparkConfig

WRONG = [
    ({"verify_mode": "fast"}, "--verify-mode fast"),
    ({"accept_rule": "greedy"}, "--accept-rule greedy"),
    ({"window_policy": "current"}, "--window-policy current"),
    ({"min_window": -1}, "--min-window -1"),
    ({"min_window": 1.5}, "--min-window 1.5"),
    ({"max_window": 0}, "--verify-mode off"),
    ({"max_window": True}, "--max-window True"),
    ({"min_window": 4, "max_window": 3}, "--min-window 4 is above --max-window 3"),
    ({"max_step_ms": 0}, "--max-step-ms 0"),
    ({"max_step_ms": float("nan")}, "--max-step-ms nan"),
    ({"max_step_ms": "20"}, "--max-step-ms 20"),
    ({"cost_model": ""}, "--cost-model"),
    ({"calibration": None}, "--calibration None"),
    ({"verify_mode": "static", "min_window": 2}, "--min-window 2 has no effect with --verify-mode static"),
    ({"verify_mode": "off", "max_window": 2}, "--max-window 2 has no effect with --verify-mode off"),
    ({"verify_mode": "static", "window_policy": "lagged"}, "--window-policy lagged has no effect"),
    ({"verify_mode": "off", "calibration": "off"}, "--calibration off has no effect with --verify-mode off"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_setting_is_refused_by_its_flag(settings, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        DSparkConfig.from_dict({"verify_mode": "compact", **settings})


def test_a_static_window_may_be_narrower_than_the_block():
    assert DSparkConfig(verify_mode="static", max_window=2).max_window == 2


def test_an_unknown_setting_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(ConfigError, match=r"unknown setting max_windows: .*max_window"):
        DSparkConfig.from_dict({"max_windows": 3})


def test_the_settings_cannot_be_changed_after_they_were_checked():
    with pytest.raises(AttributeError):
        DSparkConfig().min_window = -1


def test_a_file_that_does_not_exist_is_refused_and_one_that_does_is_not(tmp_path):
    (tmp_path / "cost.json").write_text("{}")
    DSparkConfig(cost_model=str(tmp_path / "cost.json")).check_files()
    with pytest.raises(ConfigError, match="--calibration .*no such file, and not online or off"):
        DSparkConfig(calibration=str(tmp_path / "absent.json")).check_files()


@given(mode=st.sampled_from(VERIFY_MODES), rule=st.sampled_from(ACCEPT_RULES))
def test_settings_survive_json_and_pickle(mode, rule):
    config = DSparkConfig(verify_mode=mode, accept_rule=rule)
    assert DSparkConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
