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


@pytest.mark.parametrize(("counts", "rows"), [([3, 1, 5], None), ([3, 1, 5], 12), ([1], 5)], ids=str)
def test_flashinfers_plan_is_given_the_real_windows(child, counts, rows):
    """Eagerly, for a target: the kernel itself needs a GPU, but which rows and slots it is told can be read here.

    Catches whole blocks for everybody, and a list of slots that is too short where only an upper bound of the live rows
    is on the host.
    """
    qo, kv, read, right = child(forwards.flashinfer_plan, counts, rows)
    assert qo == [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert kv == [sum(map(len, right[:i])) for i in range(len(right) + 1)] and read == right
