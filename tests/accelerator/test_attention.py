"""`dspark_triton` is attention: SGLang's Triton kernel under its interpreter, over windows of different lengths.

Bug class: row offsets of whole blocks, for which every request but the first reads its neighbour's rows; and a padding
request of a token tier that takes rows of a live one, or pushes them out of the kernel's grid.
"""

from __future__ import annotations

import pytest

from tests.accelerator import forwards

WINDOWS = [[3, 1, 5], [1], [5, 5, 5], [1, 1, 1, 1], [2, 5, 1, 4]]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole block"])
@pytest.mark.parametrize("counts", WINDOWS, ids=str)
def test_windows_over_prefixes_eagerly(child, counts, causal):
    assert child(forwards.attention_error, counts, causal, None) < 1e-5


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole block"])
@pytest.mark.parametrize(
    ("counts", "tier"), [([3, 1, 5], 10), ([1], 5), ([1, 1], 20), ([5, 5, 5], 20), ([2, 5, 1, 2], 10)], ids=str
)
def test_windows_padded_to_a_token_tier(child, counts, tier, causal):
    assert child(forwards.attention_error, counts, causal, tier) < 1e-5


def test_one_key_less_is_told_apart(child):
    assert child(forwards.attention_error, [3, 1, 5], True, 10, True) > 1e-2
