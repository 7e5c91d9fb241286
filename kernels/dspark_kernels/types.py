"""What travels through one decode step: rules, noise, the drafted block, and what acceptance returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from .random import Coins, draw_coins


class AcceptRule(IntEnum):
    """How a drafted token is judged (docs/design.md section 2)."""

    GREEDY = 0
    TOKEN = 1
    BLOCK = 2
    COUPLED = 3


@dataclass(frozen=True)
class RequestRules:
    """The acceptance rule of each request, grouped once per change of the batch, so that a step needs no sync.

    Fields:
        rules: host tuple of R rules. groups: for each rule present, int64 [n] request indices on the device.
        rule: int32 [R] on the device, for kernels.
    """

    rules: tuple[AcceptRule, ...]
    groups: dict[AcceptRule, torch.Tensor]
    rule: torch.Tensor

    def __post_init__(self):
        if sum(len(group) for group in self.groups.values()) != len(self.rules):
            raise ValueError("every request must be in exactly one group")

    @classmethod
    def of(cls, rules: Sequence[int], device: torch.device | str = "cpu") -> RequestRules:
        """From host values, one per request. Raises ValueError for a value that is no AcceptRule."""
        rules = tuple(AcceptRule(rule) for rule in rules)
        groups = {
            rule: torch.tensor([i for i, other in enumerate(rules) if other is rule], device=device)
            for rule in sorted(set(rules))
        }
        return cls(rules, groups, torch.tensor(rules, dtype=torch.int32, device=device))

    def only(self, rule: AcceptRule) -> bool:
        """True if every request follows this rule."""
        return set(self.groups) <= {rule}

    @property
    def need_coins(self) -> bool:
        """True if some request spends acceptance coins or draws by inverse CDF."""
        return AcceptRule.TOKEN in self.groups or AcceptRule.BLOCK in self.groups


@dataclass(frozen=True)
class StepNoise:
    """All randomness of one step. Build it with `draw` once per step, before drafting.

    Fields:
        seeds: int64 [R] request seeds; positions: int64 [R] absolute position of each anchor (for `coupled`).
        rules: the requests' rules. coins: None if no request needs them.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    rules: RequestRules
    coins: Coins | None

    def __post_init__(self):
        requests = len(self.rules.rules)
        if self.seeds.shape != (requests,) or self.positions.shape != (requests,):
            raise ValueError(f"seeds and positions must be [{requests}], one per rule")
        if self.rules.need_coins and self.coins is None:
            raise ValueError("the token and block rules need coins")

    @classmethod
    def draw(
        cls, seeds: torch.Tensor, steps: torch.Tensor, positions: torch.Tensor, block_size: int, rules: RequestRules
    ) -> StepNoise:
        """The noise of one verify step.

        Args:
            seeds, steps, positions: int64 [R]. `steps` counts the request's own verify steps and must never repeat
                for a request (retraction included): noise is spent once.
            block_size: γ, at least the number of tokens that will be drafted.
        """
        coins = draw_coins(seeds, steps, block_size) if rules.need_coins else None
        return cls(seeds, positions, rules, coins)


@dataclass(frozen=True)
class BlockDraft:
    """k drafted tokens per request, and the law each was drawn from.

    Fields:
        tokens: int64 [R, k] target token ids. columns: int64 [R, k], their columns in `probs`.
        probs: float32 [R, k, C], q on its support, zero elsewhere; None if every row is greedy.
        support: target ids of the columns: None (column = id), int64 [C], or int64 [R, k, C]. No id occurs twice.
    """

    tokens: torch.Tensor
    columns: torch.Tensor
    probs: torch.Tensor | None
    support: torch.Tensor | None = None

    def __post_init__(self):
        if self.tokens.dim() != 2 or self.tokens.shape != self.columns.shape:
            raise ValueError("tokens and columns must both be [R, k]")
        if self.probs is not None and self.probs.shape[:2] != self.tokens.shape:
            raise ValueError(f"probs {tuple(self.probs.shape)} do not match tokens {tuple(self.tokens.shape)}")

    @property
    def block_size(self) -> int:
        return self.tokens.shape[1]

    def select(self, requests: torch.Tensor) -> BlockDraft:
        """The blocks of some requests (int64 [n])."""
        support = self.support
        return BlockDraft(
            self.tokens[requests],
            self.columns[requests],
            None if self.probs is None else self.probs[requests],
            support[requests] if support is not None and support.dim() == 3 else support,
        )


@dataclass(frozen=True)
class AcceptResult:
    """What one verify step commits.

    Fields:
        lengths: int64 [R], committed tokens including the bonus, 1 .. w+1.
        tokens: int64 [R, k+1], committed tokens first, zeros after.
        acceptance: float32 [R, k], for each verified slot the probability Σ min(p, q) that its draft is accepted given
            the drafted prefix (the confidence head's target); NaN where it was not computed (`coupled`, unverified).
    """

    lengths: torch.Tensor
    tokens: torch.Tensor
    acceptance: torch.Tensor
