"""The emitted law is the target's, exactly: every mode, rule and policy, over several steps, one and two requests.

Bug classes caught: a window that reads what it decides about, a wrong residual, a cap that is not a truncation, state
that leaks from step to step. Strength: the laws are enumerated with rational numbers, so the total variation is 0 or it
is not; the planted faults show how far from 0 each class lands (figures in the assertions). Windows are shown to vary,
or the test would prove nothing. Noise that is spent twice needs `test_noise_is_spent_once`; floating point is not
covered.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from dspark_kernels.reference import RULES, Emitted, GivenCoins, accept_block, accept_token, emit, residual
from dspark_scheduler import AdditiveCostModel, DraftShape, SurvivalRelay, Terms, allocate_windows, best_budget

from .decoder import POLICIES, Decoder, World, jagged_cost, served, target_law, total_variation

MODES = ("static", "compact", "cap-accept")
# Seconds of a step with 1, 2, ... rows per request.
CLIFF = (1.0, 2.0, 2.2, 2.3)  # the first draft costs a step, those after it little
FLAT = (1.0, 1.02, 1.04, 1.5)  # two drafts are nearly free
# vocabulary, block size, requests, tokens per request
SHAPES = [(2, 3, 1, 6), (3, 2, 1, 4), (3, 3, 1, 3), (2, 2, 2, 3), (2, 3, 2, 2)]


def worlds(rule: str, policy: str, seeds: int):
    for vocabulary, gamma, requests, count in SHAPES:
        for seed in range(seeds):
            world = World(seed, vocabulary, gamma, greedy=rule == "greedy", reads_tokens=policy != "ahead")
            yield world, requests, count


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_emitted_follows_the_target_exactly(mode, rule, policy):
    used = set()
    for world, requests, count in worlds(rule, policy, seeds=2):
        for draft_all in (True, False) if mode == "compact" else (True,):
            decoder = Decoder(world, POLICIES[policy], jagged_cost(world.gamma, requests), rule, mode, draft_all)
            law = decoder.decode(requests, count)
            assert sum(law.values()) == 1
            assert total_variation(law, target_law(world, requests, count)) == 0, world
            used |= set(decoder.windows)
    assert len(used) >= 3, f"windows did not vary: {used}"


OPTIONS = {
    "bounds": {"low": 1, "high": 2},
    "bounds per request": {"low": np.array([0, 1]), "high": np.array([1, 2])},
    "a ceiling": {"max_step_seconds": 1.5},
    "a draft that can be shortened": {"drafting": "depth"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_bounds_ceilings_and_shorter_drafts_keep_the_law(option):
    def policy(old, now, cost, mean):
        running = {name: value[: len(now)] if np.ndim(value) else value for name, value in OPTIONS[option].items()}
        return served("causal", **running)(old, now, cost, mean)

    target = jagged_cost(2, 2, (1.0, 1.3, 1.7))
    cost, used = AdditiveCostModel(0.0, target.alpha, target.theta, head=([2, 4], [0.02, 0.04])), set()
    for seed in range(3):
        world = World(seed, 2, 2)
        for rule in ("token", "block"):
            decoder = Decoder(world, policy, cost, rule)
            assert total_variation(decoder.decode(2, 3), target_law(world, 2, 3)) == 0
            used |= set(decoder.windows)
    assert len(used) >= 2, used


@pytest.mark.parametrize("rule", RULES)
def test_compact_and_cap_accept_emit_the_same_tokens_with_the_same_coins(rule):
    """Stronger than equal laws: path by path. And under greedy and token both are a prefix of what static emits."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        gamma, vocabulary = 3, 3
        p = rng.dirichlet(np.ones(vocabulary), gamma + 1).tolist()
        q = rng.dirichlet(np.ones(vocabulary), gamma).tolist()
        drafts = [int(rng.integers(vocabulary)) for _ in range(gamma)]
        chance = GivenCoins(rng.random(gamma + 1).tolist(), rng.random(gamma + 1).tolist())
        static = emit("static", rule, p, q, drafts, gamma, chance)
        for window in range(gamma + 1):
            compact = emit("compact", rule, p, q, drafts, window, chance)
            assert compact == emit("cap-accept", rule, p, q, drafts, window, chance)
            assert len(compact.tokens) == compact.accepted + 1
            if rule != "block":
                assert compact.tokens == static.tokens[: window + 1]


def test_block_verification_accepts_at_least_as_many_tokens_as_the_token_rule():
    gains = []
    for world, _, _ in worlds("block", "causal", seeds=4):
        lengths = {}
        for rule in ("token", "block"):
            decoder = Decoder(world, lambda old, now, cost, mean: np.full(len(now), now.shape[1]), None, rule)
            lengths[rule] = sum(
                weight * chance * (len(tokens) - 1)
                for block, weight in world.drafts(0, ())
                for tokens, chance in decoder._emitted(0, (), block, world.gamma)
            )
        assert lengths["block"] >= lengths["token"]
        gains.append(lengths["block"] - lengths["token"])
    assert max(gains) > 0


def retrospective(old, now, cost, mean):
    """The planted scheduler: a search over this step's survival, tokens included."""
    plan = best_budget(now[None], Terms.of(cost, DraftShape("block", now.shape[1]), len(now)))
    return allocate_windows(now, plan.tokens)


def appendix_a(case_c2: dict[int, float], policy, reads_tokens: bool = True) -> dict[tuple, Fraction]:
    """The law of the first token in DSpark's counterexample (appendix A): R = 1, γ = 2, a_1 = 0.8."""
    cost = AdditiveCostModel(0.0, ([1], [0.0]), ([1, 2, 3], [1.0, 1 / 0.5, 1 / 0.45]))
    world = World(0)
    object.__setattr__(world, "target", lambda request, context: (Fraction(7, 10), Fraction(3, 10)))
    object.__setattr__(world, "draft", lambda request, context, prefix: (Fraction(1, 2), Fraction(1, 2)))
    object.__setattr__(world, "survival", lambda request, context, drafts: np.array([0.8, 0.8 * case_c2[drafts[0]]]))
    # DSpark draws a fresh token after a window of 0; judged on the draft, the first token is right even so.
    law = Decoder(world, policy, cost, draft_all=False).decode(1, 1)
    return {texts[0]: chance for texts, chance in law.items()}


def early_stop(old, now, cost, mean):
    from dspark_scheduler.baselines import early_stop_windows

    return early_stop_windows(now, cost)


@pytest.mark.parametrize(
    "policy", [early_stop, POLICIES["causal"], POLICIES["lagged"]], ids=["early", "causal", "lagged"]
)
def test_appendix_a_causal_schedulers_keep_seventy_to_thirty(policy):
    assert appendix_a({0: 0.9, 1: 0.0}, policy) == {(0,): Fraction(7, 10), (1,): Fraction(3, 10)}


def test_appendix_a_ahead_keeps_seventy_to_thirty_and_refuses_the_confidence_that_would_not():
    assert appendix_a({0: 0.9, 1: 0.9}, POLICIES["ahead"]) == {(0,): Fraction(7, 10), (1,): Fraction(3, 10)}
    from dspark_scheduler import ContextSurvival

    with pytest.raises(ValueError, match="reads drafted tokens"):
        ContextSurvival(np.array([[0.8, 0.72]]), reads_drafted_tokens=True)


def test_appendix_a_a_retrospective_scheduler_gives_eighty_five_to_fifteen():
    law = appendix_a({0: 0.9, 1: 0.0}, retrospective)
    assert law == {(0,): Fraction(85, 100), (1,): Fraction(15, 100)}


def test_a_retrospective_scheduler_is_seen_in_random_worlds():
    """Judged on the draft, the bonus row hides a look one token ahead; a look two ahead still shows (γ = 3)."""
    seen = {draft_all: 0 for draft_all in (True, False)}
    for seed in range(8):
        world = World(seed, 2, 3)
        for draft_all in seen:
            decoder = Decoder(world, retrospective, jagged_cost(3, 1, CLIFF), draft_all=draft_all)
            seen[draft_all] += total_variation(decoder.decode(1, 3), target_law(world, 1, 3)) > Fraction(1, 100)
    assert seen[False] >= 3 and seen[True] >= 1, seen


def token_residual_in_block(mode, rule, p, q, drafts, window, chance):
    """The planted rule: block verification that draws from (p - q)+ where (ratio·p - q)+ is due."""
    asked = {}

    class Spy:
        def flip(self, probability, key):
            return chance.flip(probability, key)

        def draw(self, weights, key):
            asked[key] = weights
            row = key[1]
            return chance.draw(residual(p[row], q[row]) if row < window else weights, key)

    return accept_block(p, q, drafts, window, Spy())


def fresh_bonus_only_if_accepted(mode, rule, p, q, drafts, window, chance):
    """The planted cap: where the draft after the window would be accepted, a fresh draw from the target instead."""
    result = accept_token(p, q, drafts, window, chance)
    if result.accepted == window < len(drafts) and result.tokens[-1] == drafts[window]:
        return Emitted((*result.tokens[:-1], chance.draw(p[window], ("token", window, "fresh"))), window)
    return result


@pytest.mark.parametrize("fault", [token_residual_in_block, fresh_bonus_only_if_accepted])
def test_a_planted_acceptance_fault_is_seen(fault):
    """Three tokens at least: with two, what is left of ratio·p - q and of p - q is the same single token."""
    worst = max(
        total_variation(
            Decoder(world, POLICIES["causal"], jagged_cost(3, 1, FLAT), judge=fault).decode(1, 3),
            target_law(world, 1, 3),
        )
        for world in (World(seed, 3, 3) for seed in range(4))
    )
    assert worst > Fraction(1, 100), float(worst)


def test_a_relay_that_is_read_a_step_early_refuses():
    """The two-step lag is a property of the type, so a decoder that shortens it cannot be written by accident."""
    relay = SurvivalRelay()
    relay.publish(0, [0], np.array([[0.5, 0.4]]))
    assert np.isnan(relay.read(1, [0]).values).all()
    with pytest.raises(ValueError, match="anticipate"):
        SurvivalRelay(lag=1)
