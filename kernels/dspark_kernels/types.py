"""What travels through one decode step: rules, noise, the drafted block, and what acceptance returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

TOP_K_ALL = 1 << 30  # SGLang's "no top-k"


def upload(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Host values on the device, without waiting for what is queued there: a pageable copy would."""
    if torch.device(device).type == "cpu":
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    return pinned.to(device, non_blocking=True)


class AcceptRule(IntEnum):
    """How a drafted token is judged (docs/design.md, rules)."""

    GREEDY = 0
    TOKEN = 1
    BLOCK = 2
    COUPLED = 3


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of R rows, on the device, with what the host must know to choose a path without a sync.

    Build it with `of` (from host lists) once per change of the batch; `expand` maps requests to ragged rows.

    Fields:
        temperature, top_p, min_p: float32 [R]; top_k: int64 [R]; greedy: bool [R] (temperature 0 or top_k 1).
        all_greedy, any_greedy, any_temperature, any_filter: host booleans. They may be true without need, never
        false against the tensors. any_filter speaks of rows that are not greedy.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    greedy: torch.Tensor
    all_greedy: bool
    any_greedy: bool
    any_temperature: bool
    any_filter: bool

    def __post_init__(self):
        shape = self.temperature.shape
        if len(shape) != 1 or any(t.shape != shape for t in (self.top_k, self.top_p, self.min_p, self.greedy)):
            raise ValueError("sampling parameters must be 1-D tensors of one length")
        if self.all_greedy and self.any_filter:
            raise ValueError("a batch of greedy rows has nothing to filter")

    def __len__(self) -> int:
        return self.temperature.shape[0]

    @classmethod
    def of(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """From host numbers, one per request. None, top_k <= 0 and top_p >= 1 mean "no such filter".

        Raises:
            ValueError: lists of different lengths, a temperature that is negative or not finite, top_p <= 0, or min_p
                outside [0, 1].
        """
        n = len(temperature)
        if any(column is not None and len(column) != n for column in (top_k, top_p, min_p)):
            raise ValueError(f"every parameter needs one value for each of the {n} requests")
        t = torch.tensor(temperature, dtype=torch.float32)
        k = torch.tensor([TOP_K_ALL] * n if top_k is None else top_k, dtype=torch.int64)
        p = torch.tensor([1.0] * n if top_p is None else top_p, dtype=torch.float32)
        m = torch.tensor([0.0] * n if min_p is None else min_p, dtype=torch.float32)
        if not (torch.isfinite(t).all() and (t >= 0).all()):
            raise ValueError(f"temperature must be finite and not negative: {list(temperature)}")
        if not ((p > 0).all() and (m >= 0).all() and (m <= 1).all()):
            raise ValueError("top_p must be above 0 and min_p within [0, 1]")
        k = torch.where(k <= 0, TOP_K_ALL, k)
        greedy = (t < 1e-6) | (k == 1)
        t = torch.where(greedy, 1.0, t)
        filtered = ~greedy & ((k < TOP_K_ALL) | (p < 1) | (m > 0))
        return cls(
            *(upload(x, device) for x in (t, k, p, m, greedy)),
            all_greedy=bool(greedy.all()),
            any_greedy=bool(greedy.any()),
            any_temperature=bool((t != 1).any()),
            any_filter=bool(filtered.any()),
        )

    def expand(self, rows: torch.Tensor) -> SamplingRows:
        """The parameters of `rows` (int64 [M], request of each row). Host booleans stay those of the batch."""
        names = ("temperature", "top_k", "top_p", "min_p", "greedy")
        picked = {name: getattr(self, name).index_select(0, rows) for name in names}
        return SamplingRows(
            **picked,
            all_greedy=self.all_greedy,
            any_greedy=self.any_greedy,
            any_temperature=self.any_temperature,
            any_filter=self.any_filter,
        )


@dataclass(frozen=True)
class Coins:
    """The uniforms of one verify step, all float64 in [0, 1).

    Fields:
        draft:  [R, n] for the draft's token at each index (spent before verification).
        accept: [R, n] acceptance coins, one per index.
        final:  [R, n] for the residual or bonus draw at the index where the block stops; one per request is spent.
                n is one more than the block size, since a block may stop after its last token.
    """

    draft: torch.Tensor
    accept: torch.Tensor
    final: torch.Tensor

    def __post_init__(self):
        if not self.draft.shape == self.accept.shape == self.final.shape or self.draft.dim() != 2:
            raise ValueError("Coins hold three [R, n] tensors of one shape")

    def select(self, requests: torch.Tensor) -> Coins:
        """The coins of some requests (int64 [n])."""
        return Coins(self.draft[requests], self.accept[requests], self.final[requests])


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
            rule: upload(torch.tensor([i for i, other in enumerate(rules) if other is rule]), device)
            for rule in sorted(set(rules))
        }
        return cls(rules, groups, upload(torch.tensor(rules, dtype=torch.int32), device))

    def only(self, rule: AcceptRule) -> bool:
        """True if every request follows this rule."""
        return set(self.groups) <= {rule}

    @property
    def need_coins(self) -> bool:
        """True if some request spends acceptance coins or draws by inverse CDF."""
        return AcceptRule.TOKEN in self.groups or AcceptRule.BLOCK in self.groups


@dataclass(frozen=True)
class StepNoise:
    """All randomness of one step. `random.draw_noise` makes it, once per step, before drafting.

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


@dataclass(frozen=True)
class BlockDraft:
    """k drafted tokens per request, and the law each was drawn from.

    Fields:
        tokens: int64 [R, k] target token ids. columns: int64 [R, k], their columns in `probs`.
        probs: float32 [R, k, C], q on its support, zero elsewhere; None if every row is greedy.
        support: target ids of the columns: None (column = id) or int64 [C], in which no id occurs twice.
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
        probs = None if self.probs is None else self.probs[requests]
        return BlockDraft(self.tokens[requests], self.columns[requests], probs, self.support)


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
