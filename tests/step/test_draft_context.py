"""When the draft's keys and values are written: plain steps may put it off, and nobody may ever see that they did.

Bug class: a block that is drafted before the last plain steps' tokens have keys, or postponed keys that land in a slot
which a new request has filled meanwhile. Text stays right (drafts are verified), acceptance silently falls.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.step.context import POSTPONED_STEPS, DraftContext
from sglang_dspark.step.drafter import Drafter

SLOTS = 12
SOME = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=4, unique=True)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["plain", "plain", "plain", "written", "draft"]), SOME), min_size=1, max_size=60
)


class Stored:
    """A draft model that remembers which feature each slot holds."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.slots = torch.zeros(slots)

    def write_context(self, features, positions, slots, pool) -> None:
        assert len(set(slots.tolist())) == len(slots), "one write may hold a slot once: their order is not defined"
        self.slots[slots] = features[:, 0]


def context(model: Stored) -> DraftContext:
    translator = SimpleNamespace()
    return DraftContext(model, SimpleNamespace(device="cpu", token_to_kv_pool=None, kv_index_translator=translator))


def plain_step(draft: DraftContext, rows: torch.Tensor, value: float) -> None:
    """A step that verified the anchors alone, at these slots, with this feature."""
    plan = SimpleNamespace(write_ids=lambda translator: rows)
    step = SimpleNamespace(plan=plan, slots=rows[:, None], size=len(rows), prefix_lens=rows)
    verified = SimpleNamespace(block_size=0)
    target = SimpleNamespace(used_graph=False, features=torch.full((len(rows), 1), value))
    draft.absorb(step, verified, target, torch.ones_like(rows))


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_whoever_reads_or_writes_the_slots_finds_what_was_postponed(events):
    model, held, waiting = Stored(), torch.zeros(SLOTS), set()
    draft = context(model)
    for count, (event, slots) in enumerate(events, 1):
        if event == "draft":
            with pytest.raises(AttributeError):  # a drafter of which nothing else is here: it stops behind the writes
                Drafter.run(SimpleNamespace(context=draft), None, None, 1)
            waiting = set()
            assert torch.equal(model.slots, held)
            continue
        rows = torch.tensor(slots)
        if event == "plain":
            if waiting & set(slots):
                draft.catch_up()  # as the worker does where slots may have changed hands
                waiting = set()
            plain_step(draft, rows, float(count))
            waiting |= set(slots)
        else:
            draft.write(torch.full((len(rows), 1), float(count)), rows, rows)
            waiting = set()
        held[rows] = float(count)
    draft.catch_up()
    assert torch.equal(model.slots, held)


def test_what_waits_is_bounded():
    draft = context(Stored(3 * POSTPONED_STEPS))
    for step in range(3 * POSTPONED_STEPS):
        plain_step(draft, torch.tensor([step]), 1.0)
        assert len(draft._postponed) < POSTPONED_STEPS
