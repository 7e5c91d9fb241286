"""Random numbers leak from step to step if one is drawn twice: caught here, and by no test of a single block.

Bug class: noise keyed by the absolute position of a token. A position that was drafted but not committed is drafted
again in the next step, and then meets a number of which something is already known: that its coin did not pass (block
rule), or what the survival of two steps ago read off the token it made. Strength: exact enumeration over intervals of
uniform numbers; the same faults leave the law of the first block untouched (total variation 0), which is asserted.
`coupled` is keyed by position on purpose and is compared with plain seeded decoding, token for token.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest

from dspark_kernels.reference import accept_coupled, emit
from dspark_scheduler import SurvivalRelay

from .chance import outcomes
from .decoder import POLICIES, World, jagged_cost, target_law, total_variation


def decode(world: World, policy, cost, rule: str, count: int, reused: set[str]) -> dict[tuple, Fraction]:
    """The exact law of `count` tokens of one request; numbers of the purposes in `reused` are keyed by position.

    As under `lagged`, only what lies inside the window is judged; the row after it is drawn from the target.
    """
    done, states, step = defaultdict(Fraction), {((), (), ()): Fraction(1)}, 0
    mean = 0.6 ** np.arange(1, world.gamma + 1)
    while states:
        following = defaultdict(Fraction)
        for (text, history, memory), chance in states.items():
            relay = SurvivalRelay()
            for past, values in history:
                relay.publish(past, [0], np.array([values]))
            evidence = relay.read(step, [0], world.gamma)

            def run(source, text=text, evidence=evidence):
                drafts = []
                for i in range(world.gamma):
                    drafts.append(source.draw(world.draft(0, text, tuple(drafts)), ("draft", i)))
                survival = world.survival(0, text, tuple(drafts))
                window = int(policy(evidence, survival[None], cost, mean)[0])
                p = [world.target(0, (*text, *drafts[:i])) for i in range(window + 1)]
                q = [world.draft(0, text, tuple(drafts[:i])) for i in range(window)]
                return emit("compact", rule, p, q, drafts[:window], window, source).tokens, tuple(survival.tolist())

            start = len(text)
            law = outcomes(run, dict(memory), lambda key, s=start: (key[0], s + key[1]) if key[0] in reused else None)
            for ((tokens, survival), known), more in law.items():
                after = (*text, *tokens)
                if len(after) >= count:
                    done[(after[:count],)] += chance * more
                    continue
                unspent = tuple((name, interval) for name, interval in known if name[1] >= len(after))
                kept = tuple(entry for entry in history if entry[0] > step - 2)
                following[after, (*kept, (step, survival)), unspent] += chance * more
        states, step = following, step + 1
    return dict(done)


def all_of_it(old, now, cost, mean):
    return np.full(len(now), now.shape[1])


def worst(gamma: int, seeds: range, policy, rule: str, count: int, reused: set[str], steps=(1.0, 2.0, 2.05, 2.1, 2.15)):
    """Largest total variation over worlds."""
    cost = jagged_cost(gamma, 1, steps)
    return max(
        total_variation(decode(world, policy, cost, rule, count, reused), target_law(world, 1, count))
        for world in (World(seed, 2, gamma) for seed in seeds)
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_fresh_numbers_give_the_target_over_several_steps(rule):
    assert worst(2, range(4), all_of_it, rule, 4, set()) == 0
    assert worst(3, range(2), POLICIES["lagged"], rule, 4, set()) == 0


def test_coins_keyed_by_position_bias_the_block_rule_from_the_second_step_on():
    assert worst(2, range(8), all_of_it, "block", 1, {"accept"}) == 0
    found = worst(2, range(8), all_of_it, "block", 4, {"accept"})
    assert found > Fraction(1, 100), float(found)


def test_draft_noise_keyed_by_position_biases_through_the_survival_of_two_steps_ago():
    # Survival must have read the draft two places after the anchor, and that place must still be unspent: γ = 4, and
    # nothing shows before the third token. The block rule is hit a step earlier: acceptance reads later drafts as well.
    assert worst(4, range(1), POLICIES["lagged"], "token", 2, {"draft"}) == 0
    assert worst(4, range(1), POLICIES["lagged"], "token", 3, {"draft"}) > Fraction(4, 1000)
    assert worst(4, range(1), POLICIES["lagged"], "block", 1, {"draft"}) == 0
    assert worst(4, range(1), POLICIES["lagged"], "block", 2, {"draft"}) > Fraction(2, 100)


def gumbel(seed: int, position: int, vocabulary: int) -> list[float]:
    """Noise that is a function of (seed, position, token) alone."""
    digests = (hashlib.sha256(repr((seed, position, token)).encode()).digest() for token in range(vocabulary))
    return [-np.log(-np.log((int.from_bytes(d[:6], "big") + 0.5) / 2**48)) for d in digests]


def test_coupled_emits_what_plain_seeded_decoding_draws_whatever_the_draft_and_the_windows():
    rng = np.random.default_rng(0)
    accepted = drafted = 0
    for seed in range(40):
        world, count = World(seed % 8, 3, 3), 12

        def logs(row):
            return [np.log(float(x)) if x else -np.inf for x in row]

        def choose(row, position, seed=seed):
            return int(np.argmax([a + g for a, g in zip(logs(row), gumbel(seed, position, 3))]))

        plain: list[int] = []
        while len(plain) < count:
            plain.append(choose(world.target(0, tuple(plain)), len(plain)))
        text: list[int] = []
        while len(text) < count:
            drafts: list[int] = []
            for i in range(3):
                drafts.append(choose(world.draft(0, tuple(text), tuple(drafts)), len(text) + i))
            window = int(rng.integers(4))
            rows = [logs(world.target(0, (*text, *drafts[:i]))) for i in range(window + 1)]
            noise = [gumbel(seed, len(text) + i, 3) for i in range(window + 1)]
            result = accept_coupled(rows, drafts, window, noise)
            accepted, drafted = accepted + result.accepted, drafted + window
            text += result.tokens
        assert text[:count] == plain
    assert 0.2 < accepted / drafted < 1.0
