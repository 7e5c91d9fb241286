"""What a step teaches the policy that planned it: survival of the whole block, outcomes of what was drafted.

Bug class: a block that is shorter than the confidence that chose its windows (policy `ahead` on a CPU), so that outcomes
have fewer columns than logits; it ended a server under load.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from dspark_scheduler import Fingerprint
from sglang_dspark.learning.confidence import Calibration
from sglang_dspark.learning.report import Record, Report
from sglang_dspark.step.policies import AheadWindows

PRINT = Fingerprint("target", "draft", 4, "cpu", "float32", 1, "sglang 0.5.23")


def test_a_block_shorter_than_its_confidence_is_learned_from_as_far_as_it_was_drafted(tmp_path):
    filed = []
    planner = SimpleNamespace(publish=lambda number, ids, survival: filed.append(survival))
    calibration = Calibration(4, "hidden", "online", tmp_path, PRINT)
    policy = AheadWindows(planner, calibration, None, short_blocks=True)
    record = Record(1, ("a", "b"), np.array([True, False]), 10, None, policy, 3, 7, False, None)
    report = Report(record, np.array([3, 1]), np.array([3, 2]), np.zeros((2, 4)), np.full((2, 3), np.nan))
    assert policy.learn(report).shape == (2, 3)
    assert [survival.shape for survival in filed] == [(2, 4)]
