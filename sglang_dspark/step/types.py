"""The core types of one decode step: what a request carries from step to step, and what a step works on."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from dspark_kernels.random import Coins, draw_coins_ahead
from dspark_kernels.sampling import SamplingRows
from dspark_kernels.types import AcceptRule, BlockDraft, RequestRules, StepNoise
from sglang_dspark.settings.request import request_bounds
from sglang_dspark.step.adjust import forbids_drafts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


UNBOUNDED = 1 << 30
STEPS_AHEAD = 8  # steps whose coins are drawn at once
_arrivals = itertools.count()  # requests in the order of their first step, which is the same on every rank


@dataclass(frozen=True)
class Bounds:
    """What the server allows a step now: window bounds, and the rule for requests that sample without a seed."""

    rule: str
    low: int = 0
    high: int = UNBOUNDED


@dataclass
class RequestState:
    """What speculation remembers of a request. It lives on the engine's own `Req`, so it dies with it.

    `seed` keys the request's random numbers and `steps` counts its verifications: together they make every
    number drawn for it unique, whatever batch it runs in and however often it is retracted.
    """

    rid: str
    seed: int
    seeded: bool  # the client gave the seed
    low: int = 0  # bounds of this request's windows, as its client asked
    high: int = UNBOUNDED
    steps: int = 0

    @classmethod
    def of(cls, req: Req, server_seed: int) -> RequestState:
        state = getattr(req, "dspark_state", None)
        if state is None:
            given = req.sampling_params.sampling_seed
            low, high = request_bounds(req.sampling_params.custom_params)
            state = cls(
                req.rid, _own_seed(req.rid, server_seed) if given is None else int(given), given is not None, low, high
            )
            req.dspark_state = state
        return state


def _own_seed(rid: str, server_seed: int) -> int:
    """A 63-bit seed for a request that gave none: the same on every rank, different for every request, also where a
    client uses one id again."""
    digest = hashlib.blake2b(f"{server_seed}/{next(_arrivals)}/{rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class BlockVerifyInput(DFlashVerifyInput):
    """A verification (or draft) forward over a different number of rows per request.

    `rows_per_request` are host integers; `causal` is False for the draft's block, whose rows see each other.
    Key lengths are prefix + rows, and the batch's `seq_lens` are the prefixes.
    """

    rows_per_request: list[int] = field(default_factory=list)
    causal: bool = True


@dataclass
class Roster:
    """What depends only on which requests run: made once per change of the batch, not once per step."""

    key: tuple
    states: list[RequestState]
    greedy: np.ndarray
    rows: SamplingRows
    rules: RequestRules
    seeds: torch.Tensor
    coins_ahead: list[Coins] = field(default_factory=list)  # of the next steps, as long as these requests stay together

    @classmethod
    def of(cls, reqs: list[Req], rule: str, device: torch.device, server_seed: int, last: Roster | None) -> Roster:
        """The roster of `reqs` under the server's `rule`; `last` itself if nothing has changed since."""
        states = [RequestState.of(req, server_seed) for req in reqs]
        key = (rule, *map(id, states))
        if last is not None and last.key == key:
            return last
        greedy = [req.sampling_params.top_k == 1 for req in reqs]
        seeds = torch.tensor([state.seed for state in states], dtype=torch.int64, device=device)
        return cls(
            key,
            states,
            np.array(greedy),
            sampling_rows(reqs, device),
            request_rules(states, greedy, rule, device),
            seeds,
        )

    def noise(self, positions: torch.Tensor, gamma: int) -> StepNoise:
        """The noise of one more verification of these requests, which counts it."""
        if self.rules.need_coins and not self.coins_ahead:
            steps = torch.tensor([state.steps for state in self.states], dtype=torch.int64, device=self.seeds.device)
            self.coins_ahead = draw_coins_ahead(self.seeds, steps, gamma, STEPS_AHEAD)
        for state in self.states:
            state.steps += 1
        coins = self.coins_ahead.pop(0) if self.rules.need_coins else None
        return StepNoise(self.seeds, positions, self.rules, coins)


@dataclass
class Step:
    """One decode step over R requests and blocks of gamma drafts.

    On the device: `anchors` int64 [R] are the last committed tokens, whose target KV is not stored yet; `prefix_lens`
    int64 [R] counts the tokens whose KV is, so it is also the anchor's position; `slots` int64 [R, gamma+1] are the
    KV slots of the anchor and the drafts. On the host: `low` and `high` int64 [R] bound each request's window (its
    token limit included), `greedy` bool [R], `context` is the sum of the prefixes. `prefix_lens_host` is None where the
    engine keeps no lengths on the host: with overlap, for backends that do not ask for them; `context` is then one
    step old.
    """

    number: int
    roster: Roster
    anchors: torch.Tensor
    prefix_lens: torch.Tensor
    prefix_lens_host: torch.Tensor | None
    context: int
    slots: torch.Tensor
    plan: KVLocPlan
    noise: StepNoise
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def begin(
        cls,
        number: int,
        batch: ScheduleBatch,
        translator: KVIndexTranslator,
        gamma: int,
        bounds: Bounds,
        roster: Roster,
    ) -> Step:
        """Read the engine's batch and count one more step for its requests."""
        device = batch.seq_lens.device
        prefix = batch.seq_lens.to(torch.int64)
        columns = prefix.unsqueeze(1) + torch.arange(gamma + 1, device=device)
        slots = translator.req_to_token[batch.req_pool_indices.unsqueeze(1), columns].to(torch.int64)
        plan = translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix,
            seq_lens_cpu=batch.seq_lens_cpu,
            write_virtual=slots.reshape(-1),
            read_extent=gamma + 1,
        )
        states, noise = roster.states, roster.noise(prefix, gamma)
        room = [0 if forbids_drafts(req) else _tokens_left(req) - 1 for req in batch.reqs]
        high = np.array([max(0, min(gamma, bounds.high, state.high, left)) for state, left in zip(states, room)])
        low = np.minimum(np.array([max(bounds.low, state.low) for state in states]), high)
        return cls(
            number,
            roster,
            batch.spec_info.bonus_tokens.view(-1),
            prefix,
            batch.seq_lens_cpu,
            _context(batch),
            slots,
            plan,
            noise,
            low,
            high,
        )

    @property
    def size(self) -> int:
        return len(self.roster.states)

    @property
    def rows(self) -> SamplingRows:
        return self.roster.rows

    @property
    def greedy(self) -> np.ndarray:
        return self.roster.greedy

    @property
    def ids(self) -> list[str]:
        return [state.rid for state in self.roster.states]


def empty_block(step: Step) -> BlockDraft:
    """A block of no drafts: the step verifies the anchors alone, which is plain decoding."""
    nothing = torch.empty(step.size, 0, dtype=torch.int64, device=step.anchors.device)
    return BlockDraft(nothing, nothing, None)


def sampling_rows(reqs: list[Req], device: torch.device) -> SamplingRows:
    """The requests' sampling parameters, one row each (the engine writes temperature 0 as top_k 1)."""
    params = [req.sampling_params for req in reqs]
    return SamplingRows.of(
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        device=device,
    )


def request_rules(states: list[RequestState], greedy: list[bool], rule: str, device: torch.device) -> RequestRules:
    """Greedy for temperature 0, coupled for a request that gave a seed, else the server's rule."""
    default = AcceptRule[rule.upper()]
    rules = [
        AcceptRule.GREEDY if g else AcceptRule.COUPLED if state.seeded else default for state, g in zip(states, greedy)
    ]
    return RequestRules.of(rules, device=device)


def _context(batch: ScheduleBatch) -> int:
    if batch.seq_lens_cpu is not None:
        return int(batch.seq_lens_cpu.sum())
    return sum(req.kv.kv_committed_len for req in batch.reqs)


def _tokens_left(req: Req) -> int:
    return req.sampling_params.max_new_tokens - len(req.output_ids)
