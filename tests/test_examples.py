"""The examples that need no server run as they stand; the others are in tests/engine and tests/server.

Bug class: an example that a renamed function broke, which only its first reader would notice.
"""

from __future__ import annotations

from pathlib import Path

from examples import own_policy

ROOT = Path(__file__).parents[1]


def test_a_policy_of_ones_own_is_simulated_beside_ours():
    results = {(r.load.concurrency, r.policy): r.tokens_per_second for r in own_policy.compare("gpu", steps=40)}
    assert len(results) == 12
    mine, whole, ours = "more_likely_than_not", "static-7", "causal"
    assert results[1, mine] < results[1, whole] and results[64, mine] > results[64, whole], "its docstring is not true"
    assert all(results[load, ours] > 0.98 * results[load, other] for load in (1, 16, 64) for other in (mine, whole))


def test_every_example_is_run_by_a_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_examples.py"))
    for example in (ROOT / "examples").glob("*.py"):
        assert f"examples/{example.name}" in tests or f"from examples import {example.stem}" in tests, example.name
