"""A source of chance for the reference rules that yields every outcome with its exact probability.

A rule asks `flip(probability, key)` for a coin and `draw(weights, key)` for a token. `key` says which number is
meant, for example ("accept", 2): the source decides whether two askings get the same number. Spending one twice is a
bug that only such a source can show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction


class ScriptedChance:
    """One path through all outcomes: follows a script of choices, then always takes the first possible one.

    Every number asked for is a uniform variable on [0, 1), of which only an interval is known: asking splits it. With
    `key_of` None all numbers are fresh. Otherwise `key_of(key)` names the number, and what was learned about it by an
    earlier asking, in this step or one before (`memory`), stays true: that is how reused noise is enumerated exactly.
    """

    def __init__(self, script: Sequence[int], memory: Mapping[Hashable, tuple] | None, key_of: Callable | None) -> None:
        self.script, self.key_of = script, key_of
        self.memory = dict(memory or {})
        self.probability = Fraction(1)
        self.taken: list[int] = []
        self.options: list[list[int]] = []

    def flip(self, probability, key: Hashable) -> bool:
        probability = min(max(Fraction(probability), Fraction(0)), Fraction(1))
        return self._choose([probability, 1 - probability], key) == 0

    def draw(self, weights: Sequence, key: Hashable) -> int:
        total = sum(weights)
        return self._choose([Fraction(weight) / total for weight in weights], key)

    def _choose(self, chances: Sequence[Fraction], key: Hashable) -> int:
        name = None if self.key_of is None else self.key_of(key)
        low, high = self.memory.get(name, (Fraction(0), Fraction(1)))
        pieces, edge = [], Fraction(0)
        for chance in chances:
            pieces.append((max(edge, low), min(edge + chance, high)))
            edge += chance
        possible = [i for i, (a, b) in enumerate(pieces) if b > a]
        depth = len(self.taken)
        choice = self.script[depth] if depth < len(self.script) else possible[0]
        a, b = pieces[choice]
        self.probability *= (b - a) / (high - low)
        if name is not None:
            self.memory[name] = (a, b)
        self.taken.append(choice)
        self.options.append(possible)
        return choice


def outcomes(
    function: Callable, memory: Mapping[Hashable, tuple] | None = None, key_of: Callable | None = None
) -> dict[tuple, Fraction]:
    """The exact law of `function(chance)`: {(result, what is known of named numbers): probability}, summing to 1.

    Args:
        function: called once per path with a source of chance; its result must be hashable.
        memory: what earlier steps left known, {name: (low, high)}.
        key_of: names the number behind a key; None makes every number fresh, and the second entry of keys empty.
    """
    law: dict[tuple, Fraction] = defaultdict(Fraction)
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        chance = ScriptedChance(script, memory, key_of)
        result = function(chance)
        law[result, tuple(sorted(chance.memory.items())) if key_of else ()] += chance.probability
        for depth in range(len(script), len(chance.taken)):
            scripts += [[*chance.taken[:depth], other] for other in chance.options[depth][1:]]
    return dict(law)
