"""The comparison of neighbouring blocks: a drift of the machine and a block that was not full leave no trace in it.

Catches: on and off exchanged, blocks paired across a drift, a block with fewer requests taken for a quick one.
"""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.toggles import blocks_of, gain


def test_a_gain_is_found_under_a_drift_and_beside_blocks_that_were_not_full():
    lines = []
    for block in range(80):
        on = block % 4 in (0, 3)
        seconds = 0.02 * (1 + 0.01 * block) * (1.0 if on else 1.03)  # the machine gets slower by the block
        requests = 16 if block == 10 else 32
        lines.append(json.dumps([on, [(seconds * requests / 32, requests)] * 30]))
    ratio, error, pairs, on = gain(blocks_of(lines, 32))
    assert ratio == pytest.approx(1.03, abs=2e-3) and error < 2e-3 and pairs == 39
    assert math.isclose(on, 20 * 1.395, rel_tol=0.02)
