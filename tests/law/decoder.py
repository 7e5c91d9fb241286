"""An exact decoder: every path of a toy speculative decoder over several steps, with rational probabilities.

A world is a random target, draft and confidence head over a tiny vocabulary. `decode` runs whole steps as the worker
does - plan, draft, windows, verify, accept, publish - on the real relay, budget and allocation, for one or two requests
until each has emitted enough tokens, and returns the exact law of what they emitted. The batch shrinks when a request
is done, so the relay meets changing batches.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np

from dspark_kernels.reference import emit
from dspark_scheduler import POLICIES as CLASSES
from dspark_scheduler import (
    AdditiveCostModel,
    ContextSurvival,
    DraftShape,
    LaggedSurvival,
    SurvivalRelay,
    Terms,
)

from .chance import outcomes

CONFIDENCES = (0.2, 0.5, 0.8, 0.8, 1.0)  # few values, so that ties happen
Law = dict[tuple, Fraction]


@dataclass(frozen=True)
class World:
    """Random laws as functions of (request, context, drafted prefix), the same for the same seed.

    Attributes:
        seed, vocabulary, gamma: what they are.
        greedy: the target is one-hot (temperature 0).
        reads_tokens: the confidence head reads the drafted prefix (False: the context alone, for policy `ahead`).
    """

    seed: int
    vocabulary: int = 2
    gamma: int = 2
    greedy: bool = False
    reads_tokens: bool = True

    def target(self, request: int, context: tuple) -> tuple[Fraction, ...]:
        row = self._row("target", request, context, 0)
        if not self.greedy:
            return row
        best = max(range(len(row)), key=lambda token: (row[token], -token))
        return tuple(Fraction(token == best) for token in range(len(row)))

    def draft(self, request: int, context: tuple, prefix: tuple) -> tuple[Fraction, ...]:
        return self._row("draft", request, (context, prefix), 0)

    def survival(self, request: int, context: tuple, drafts: tuple) -> np.ndarray:
        """[γ] survival; entry k reads the drafts before k at most."""
        seen = [drafts[:k] if self.reads_tokens else k for k in range(self.gamma)]
        values = [self._random("confidence", request, context, s).choice(CONFIDENCES) for s in seen]
        return np.cumprod(values)

    def drafts(self, request: int, context: tuple) -> list[tuple[tuple, Fraction]]:
        """Every block the draft can propose, with its probability."""
        blocks = [((), Fraction(1))]
        for _ in range(self.gamma):
            blocks = [
                ((*block, token), chance * q)
                for block, chance in blocks
                for token, q in enumerate(self.draft(request, context, block))
                if q
            ]
        return blocks

    def law(self, request: int, count: int) -> Law:
        """The target's own law of the first `count` tokens."""
        law: Law = {(): Fraction(1)}
        for _ in range(count):
            law = {
                (*text, token): chance * p
                for text, chance in law.items()
                for token, p in enumerate(self.target(request, text))
                if p
            }
        return law

    def _row(self, *key) -> tuple[Fraction, ...]:
        source = self._random(*key)
        weights = [source.choice((0, 1, 2, 3, 5, 5)) for _ in range(self.vocabulary)]
        weights[source.randrange(self.vocabulary)] += 1
        return tuple(Fraction(weight, sum(weights)) for weight in weights)

    def _random(self, *key) -> random.Random:
        return random.Random(repr((self.seed, *key)))


# A policy here: (evidence of two steps ago, this step's survival, cost, running mean) -> windows.
Policy = Callable[[LaggedSurvival, np.ndarray, AdditiveCostModel, np.ndarray], np.ndarray]


def served(name: str, drafting: str = "block", **limits) -> Policy:
    """A policy as a server runs it: its plan, then its windows, on what it may read of this step."""
    policy = CLASSES[name]

    def decide(old, now, cost, mean):
        terms = Terms.of(cost, DraftShape(drafting, now.shape[1]), len(now), **limits)
        plan = policy.plan(old, terms, mean)
        if plan.skip_draft or policy.reads == "nothing":
            return policy.windows(plan)
        return policy.windows(plan, ContextSurvival(now, False) if policy.reads == "context" else now)

    return decide


POLICIES = {name: served(name) for name in CLASSES}


@dataclass
class Decoder:
    """Exact decoding of `requests` requests until each has `count` tokens.

    Attributes:
        world, policy, cost: what is decoded, how windows are found, and what they weigh.
        rule, mode: acceptance rule and verify mode.
        draft_all: draft the whole block; else only the windows, so that the bonus row is drawn from the target.
        judge: `emit`, or a planted fault with its signature.
        windows: how often each window was used, to show that a test did something.
    """

    world: World
    policy: Policy
    cost: AdditiveCostModel
    rule: str = "token"
    mode: str = "compact"
    draft_all: bool = True
    judge: Callable = emit
    windows: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self._accepted: dict[tuple, list] = {}
        self._planned: dict[tuple, tuple[int, ...]] = {}

    @cached_property
    def mean(self) -> np.ndarray:
        return 0.6 ** np.arange(1, self.world.gamma + 1)

    def decode(self, requests: int, count: int) -> Law:
        """{(text of request 0, text of request 1, ...): probability}, each cut at `count` tokens."""
        done: Law = defaultdict(Fraction)
        states = {(((),) * requests, ()): Fraction(1)}
        step = 0
        while states:
            following = defaultdict(Fraction)
            for (texts, history), chance in states.items():
                for after, published, more in self._step(step, texts, history, count):
                    if all(len(text) >= count for text in after):
                        done[tuple(text[:count] for text in after)] += chance * more
                    else:
                        kept = tuple(entry for entry in history if entry[0] > step - 2)
                        following[after, (*kept, published)] += chance * more
            states, step = following, step + 1
        return dict(done)

    def _step(self, step: int, texts: tuple, history: tuple, count: int):
        running = tuple(r for r, text in enumerate(texts) if len(text) < count)
        blocks = [self.world.drafts(r, texts[r]) for r in running]
        for combination in itertools.product(*blocks):
            drafts = [block for block, _ in combination]
            survival = np.array([self.world.survival(r, texts[r], block) for r, block in zip(running, drafts)])
            published = (step, running, tuple(map(tuple, survival.tolist())))
            windows = self._plan(step, running, history, survival)
            chance = Fraction(1)
            for _, weight in combination:
                chance *= weight
            laws = [self._emitted(r, texts[r], block, w) for r, block, w in zip(running, drafts, windows)]
            for emitted in itertools.product(*laws):
                after, more = list(texts), chance
                for r, (tokens, weight) in zip(running, emitted):
                    after[r] = (*after[r], *tokens)
                    more *= weight
                yield tuple(after), published, more

    def _plan(self, step: int, running: tuple, history: tuple, survival: np.ndarray) -> tuple[int, ...]:
        key = (step, running, history, survival.tobytes())
        if key not in self._planned:
            relay = SurvivalRelay()
            for past, ids, values in history:
                relay.publish(past, ids, np.array(values))
            evidence = relay.read(step, running, self.world.gamma)
            self._planned[key] = tuple(self.policy(evidence, survival, self.cost, self.mean).tolist())
        for window in self._planned[key]:
            self.windows[window] += 1
        return self._planned[key]

    def _emitted(self, request: int, text: tuple, block: tuple, window: int) -> list[tuple[tuple, Fraction]]:
        key = (request, text, block, window)
        if key not in self._accepted:
            drafts = block if self.draft_all else block[:window]
            p = [self.world.target(request, (*text, *block[:i])) for i in range(len(drafts) + 1)]
            q = [self.world.draft(request, text, block[:i]) for i in range(len(drafts))]
            law = outcomes(lambda chance: self.judge(self.mode, self.rule, p, q, drafts, window, chance).tokens)
            self._accepted[key] = [(tokens, chance) for (tokens, _), chance in law.items()]
        return self._accepted[key]


def target_law(world: World, requests: int, count: int) -> Law:
    """What plain decoding emits: the product of the requests' own laws."""
    law: Law = {(): Fraction(1)}
    for request in range(requests):
        own = world.law(request, count)
        law = {(*texts, text): a * b for texts, a in law.items() for text, b in own.items()}
    return law


def total_variation(a: Law, b: Law) -> Fraction:
    """½ Σ |a - b|, exact."""
    return sum((abs(a.get(key, 0) - b.get(key, 0)) for key in a.keys() | b.keys()), Fraction(0)) / 2


def jagged_cost(
    gamma: int, requests: int, steps: Sequence[float] = (1.0, 1.25, 1.9, 1.95, 2.6, 2.7, 3.5)
) -> AdditiveCostModel:
    """A cost curve with jumps, so that the best budget moves with the survival."""
    tokens = np.arange(1, requests * (gamma + 1) + 1)
    seconds = np.interp(tokens / requests, np.arange(1, len(steps) + 1), steps)
    return AdditiveCostModel(0.0, ([1], [0.0]), (tokens, seconds))
