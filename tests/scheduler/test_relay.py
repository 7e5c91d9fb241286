"""The relay: nobody gets survival younger than the lag, nor somebody else's.

Bug classes: a reused slot that shows its previous request's confidence, a batch that changes between t-2 and t, a late
or aborted request, a lag that is one step short. Strength: a random schedule of joins, departures and silent steps is
compared with a dictionary that remembers everything.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_scheduler import LaggedSurvival, SurvivalRelay


def row(step: int, request) -> list[float]:
    """A survival row that says where it comes from."""
    return [(hash((step, request)) % 997) / 1000, 0.0]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 4)), st.booleans()), min_size=3, max_size=25), st.integers(2, 4))
def test_every_row_is_the_requests_own_last_one_that_is_old_enough(schedule, lag):
    relay, remembered = SurvivalRelay(lag, max_age=6), {}
    published: list[int] = []
    for step, (slots, silent) in enumerate(schedule):
        ids = [(slot, step // 7) for slot in sorted(slots)]  # every seventh step the slots change hands
        evidence = relay.read(step, ids, gamma=2)
        assert evidence.now - evidence.step >= lag and evidence.now == step
        for got, request in zip(evidence.values[0], ids):
            old = [s for s in published if step - 6 <= s <= step - lag and (s, request) in remembered]
            assert got.tolist() == remembered[old[-1], request] if old else np.isnan(got).all()
        if ids and not silent:
            values = np.array([row(step, request) for request in ids])
            relay.publish(step, ids, values)
            published.append(step)
            remembered.update({(step, request): value for request, value in zip(ids, values.tolist())})
            values[:] = 0.5  # the relay has its own copy


def test_a_reused_slot_has_no_history():
    relay = SurvivalRelay()
    relay.publish(0, [(7, 1)], np.array([[0.9, 0.8]]))
    assert relay.read(2, [(7, 2)]).missing.tolist() == [[True]]
    assert relay.read(2, [(7, 1)]).values[0].tolist() == [[0.9, 0.8]]


def test_what_is_read_follows_the_order_of_the_present_batch():
    relay = SurvivalRelay()
    relay.publish(0, ["a", "b"], np.array([[0.9], [0.8]]))
    assert relay.read(2, ["b", "c", "a"]).values[0, [0, 2]].tolist() == [[0.8], [0.9]]
    assert relay.read(2, ["a", "b"]).values[0].tolist() == [[0.9], [0.8]]


def test_younger_than_two_steps_is_impossible():
    with pytest.raises(ValueError, match="at least 2"):
        SurvivalRelay(lag=1)
    with pytest.raises(ValueError, match="too young"):
        LaggedSurvival(np.array([[[0.5]]]), step=3, now=4)
    relay = SurvivalRelay()
    relay.publish(5, [0], np.array([[0.5]]))
    assert relay.read(6, [0]).missing.all()
    # A clock that is set forward to read step 5 at step 5 or 6 is found out when that step publishes.
    relay.read(8, [0])
    with pytest.raises(ValueError, match="set forward"):
        relay.publish(6, [0], np.array([[0.5]]))


def test_steps_and_shapes_are_checked():
    relay = SurvivalRelay()
    with pytest.raises(ValueError, match="block size"):
        relay.read(0, [0])
    relay.publish(3, [0], np.array([[0.5, 0.2]]))
    with pytest.raises(ValueError, match="after step 3"):
        relay.publish(3, [0], np.array([[0.5, 0.2]]))
    with pytest.raises(ValueError, match="block size 2"):
        relay.publish(4, [0], np.array([[0.5]]))
    with pytest.raises(ValueError, match="twice"):
        relay.publish(4, [0, 0], np.array([[0.5, 0.2], [0.5, 0.2]]))
    with pytest.raises(ValueError, match="not a probability"):
        relay.publish(4, [0], np.array([[np.nan, 0.2]]))
    relay.read(6, [0])
    with pytest.raises(ValueError, match="planned after"):
        relay.read(5, [0])
