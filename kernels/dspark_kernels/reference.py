"""The rules in plain Python: what `accept.py` and `windows.py` are tested against, and what the exact laws enumerate.

Each acceptance rule is one function with one signature, works on Fractions and on floats alike, and asks a source of
chance for its coins and tokens, which is either given numbers (`GivenCoins`) or an enumeration of every outcome.

    p       at least window + 1 rows: the target's law after the anchor and the first i drafts
    q       one row per drafted token: the law that draft i was sampled from
    drafts  the drafted tokens, at least `window` of them
    window  how many of them are verified
    chance  `flip(probability, key)` and `draw(weights, key)`; keys are ("accept", i), the coin at draft i, and
            ("token", i), the token drawn at row i

What is emitted is `accepted` drafts and one more token, always. A cap is a truncation of the emitted sequence: if a
window ends inside an accepted run and a further draft exists, greedy and token judge the row after the window on that
draft, with its own coins, so what a smaller window emits is a prefix of what a larger one emits. If no further draft
exists the row is drawn from the target. The block rule judges the window as a whole; the row after it is always drawn
from the target. Both follow the same law, p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Row = Sequence  # of V probabilities


class Emitted(NamedTuple):
    """tokens: what the step commits, the bonus token last; accepted: how many of them are verified drafts."""

    tokens: tuple[int, ...]
    accepted: int


class GivenCoins:
    """A source of chance from uniform numbers in [0, 1): `accept[i]` for the coin at draft i, `final[i]` for row i."""

    def __init__(self, accept: Sequence[float], final: Sequence[float]) -> None:
        self.uniforms = {"accept": accept, "token": final}

    def flip(self, probability, key: tuple[str, int]) -> bool:
        purpose, index = key
        return self.uniforms[purpose][index] < probability

    def draw(self, weights: Row, key: tuple[str, int]) -> int:
        """The first token whose cumulative weight exceeds u times the total: never one of weight zero."""
        purpose, index = key
        target, seen = self.uniforms[purpose][index] * sum(weights), 0
        for token, weight in enumerate(weights):
            seen += weight
            if seen > target:
                return token
        return max(token for token, weight in enumerate(weights) if weight > 0)


def accept_greedy(p: Sequence[Row], q: Sequence[Row], drafts: Sequence[int], window: int, chance) -> Emitted:
    """Temperature 0: the target's first most likely token is its own at every row. q and chance are not read."""
    return accept_own([_argmax(row) for row in p[: window + 1]], drafts, window)


def accept_coupled(
    log_p: Sequence[Sequence[float]], drafts: Sequence[int], window: int, noise: Sequence[Sequence[float]]
) -> Emitted:
    """The target's own token at every row is argmax(log p + g) (docs/design.md, rules).

    Args:
        log_p: at least window + 1 rows of filtered log-probabilities (-inf allowed).
        noise: as many rows of Gumbel noise, a function of (seed, absolute position, token).
    """
    rows = list(zip(log_p, noise, strict=True))[: window + 1]
    return accept_own([_argmax([a + g for a, g in zip(*row, strict=True)]) for row in rows], drafts, window)


def accept_own(own: Sequence[int], drafts: Sequence[int], window: int) -> Emitted:
    """Emit the target's own token at every row, and go on while it is what was drafted."""
    accepted = 0
    while accepted < window and drafts[accepted] == own[accepted]:
        accepted += 1
    return Emitted(tuple(own[: accepted + 1]), accepted)


def accept_token(p: Sequence[Row], q: Sequence[Row], drafts: Sequence[int], window: int, chance) -> Emitted:
    """Accept draft x with probability min(1, p(x)/q(x)); at the first rejection draw from (p - q)+ (Leviathan et al.
    2023, Algorithm 1)."""
    for i in range(window):
        if not _token_accepted(p[i], q[i], drafts[i], i, chance):
            return Emitted((*drafts[:i], chance.draw(residual(p[i], q[i]), ("token", i))), i)
    if len(drafts) > window:  # a draft stands at the bonus row: judge the row on it, as a larger window would
        if _token_accepted(p[window], q[window], drafts[window], window, chance):
            bonus = drafts[window]
        else:
            bonus = chance.draw(residual(p[window], q[window]), ("token", window))
    else:
        bonus = chance.draw(p[window], ("token", window))
    return Emitted((*drafts[:window], bonus), window)


def accept_block(p: Sequence[Row], q: Sequence[Row], drafts: Sequence[int], window: int, chance) -> Emitted:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, Algorithm 2): the longest accepted sub-block wins.

    With the running joint ratio ρ_0 = 1, ρ_i = min(1, ρ_{i-1} p(x_i)/q(x_i)), the sub-block of the first i drafts is
    accepted with probability h_i = S_i / (S_i + 1 - ρ_i), S_i = Σ (ρ_i p - q)+ at the row after it; the whole window
    with h_w = ρ_w. Every i has its own coin; the largest i that passes is the accepted length, 0 needing none.
    """
    ratio = [1]
    for i in range(window):
        ratio.append(min(1, ratio[i] * p[i][drafts[i]] / q[i][drafts[i]]))
    accepted = 0
    for i in range(window, 0, -1):
        if chance.flip(block_threshold(ratio[i], p[i], q[i] if i < window else None), ("accept", i - 1)):
            accepted = i
            break
    if accepted == window:
        return Emitted((*drafts[:window], chance.draw(p[window], ("token", window))), window)
    weights = residual(p[accepted], q[accepted], ratio[accepted])
    return Emitted((*drafts[:accepted], chance.draw(weights, ("token", accepted))), accepted)


def block_threshold(ratio, p: Row, q: Row | None):
    """h of a sub-block with joint ratio `ratio`; p, q are the rows after it, q None at the end of the window.

    0/0 means that p equals q there and nothing was lost so far: 1, since a longer sub-block is then certain to pass.
    """
    if q is None:
        return ratio
    mass = sum(max(ratio * a - b, 0) for a, b in zip(p, q, strict=True))
    return mass / (mass + 1 - ratio) if mass + 1 - ratio > 0 else 1


def residual(p: Row, q: Row, ratio=1) -> list:
    """(ratio·p - q)+, not normalised; p itself where nothing is left (reached by rounding alone)."""
    left = [max(ratio * a - b, 0) for a, b in zip(p, q, strict=True)]
    return left if any(left) else list(p)


def _token_accepted(p: Row, q: Row, token: int, index: int, chance) -> bool:
    return chance.flip(min(1, p[token] / q[token]), ("accept", index))


def _argmax(row: Row) -> int:
    return max(range(len(row)), key=lambda token: (row[token], -token))


Rule = Callable[..., Emitted]
RULES: dict[str, Rule] = {"greedy": accept_greedy, "token": accept_token, "block": accept_block}


def emit(mode: str, rule: str, p, q, drafts, window: int, chance) -> Emitted:
    """What a verify mode emits (docs/design.md, step). `window` is what `compact` verifies.

    static verifies every draft. cap-accept has the target rows of every draft and emits what compact would have: under
    greedy and token it judges all and cuts; under block the judged block is the window.
    """
    judge = RULES[rule]
    if mode == "compact" or (mode == "cap-accept" and rule == "block"):
        return judge(p, q, drafts, window, chance)
    full = judge(p, q, drafts, len(drafts), chance)
    if mode == "static":
        return full
    if mode == "cap-accept":
        return Emitted(full.tokens[: window + 1], min(full.accepted, window))
    raise ValueError(f"unknown mode {mode!r}")


def allocate(survival: Sequence[Sequence[float]], budget: int, low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Windows by the definition: rank every candidate by (-survival, position, request), admit the first ones."""
    low = [min(a, b) for a, b in zip(low, high, strict=True)]
    candidates = sorted(
        (-value, k, r) for r, row in enumerate(survival) for k, value in enumerate(row) if low[r] <= k < high[r]
    )
    windows = list(low)
    for _, _, r in candidates[: max(0, budget - sum(low))]:
        windows[r] += 1
    return windows
