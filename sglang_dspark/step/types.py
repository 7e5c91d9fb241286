"""The core types of one decode step: what a request carries from step to step, and what a step works on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dspark_kernels.ragged import RaggedBatch
from dspark_kernels.random import draw_noise
from dspark_kernels.requests import RequestTensors
from dspark_kernels.types import AcceptRule, BlockDraft, RequestRules, SamplingRows, StepNoise, upload
from dspark_scheduler import Plan
from sglang_dspark.learning.clock import StepTimes
from sglang_dspark.settings.request import request_bounds
from sglang_dspark.step.adjust import forbids_drafts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


UNBOUNDED = 1 << 30
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
        """The state of `req`, made and kept on it at the first call; a request without a seed gets one from `server_seed`."""
        state = getattr(req, "dspark_state", None)
        if state is None:
            given = req.sampling_params.sampling_seed
            low, high = request_bounds(req.sampling_params.custom_params)
            seed = _own_seed(req.rid, server_seed) if given is None else int(given)
            state = cls(req.rid, seed, given is not None, low, high)
            req.dspark_state = state
        return state


def _own_seed(rid: str, server_seed: int) -> int:
    """A 63-bit seed for a request that gave none: the same on every rank, different for every request, also where a
    client uses one id again."""
    digest = hashlib.blake2b(f"{server_seed}/{next(_arrivals)}/{rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class Roster:
    """What depends only on which requests run: made once per change of the batch, not once per step.

    Args:
        ends: int64 [R] on the device: the positions behind each request's last possible token.
        steps: int64 [R] on the device: the requests' own counts of verifications.
    """

    key: tuple
    states: list[RequestState]
    greedy: np.ndarray
    rows: SamplingRows
    rules: RequestRules
    seeds: torch.Tensor
    ends: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def of(cls, reqs: list[Req], rule: str, device: torch.device, server_seed: int, last: Roster | None) -> Roster:
        """The roster of `reqs` under the server's `rule`; `last` itself if nothing has changed since."""
        states = [RequestState.of(req, server_seed) for req in reqs]
        key = (rule, *map(id, states))
        if last is not None and last.key == key:
            return last
        greedy = [req.sampling_params.top_k == 1 for req in reqs]
        ends = [len(req.origin_input_ids) + req.sampling_params.max_new_tokens for req in reqs]
        numbers = torch.tensor([[s.seed for s in states], ends, [s.steps for s in states]], dtype=torch.int64)
        seeds, ends, steps = upload(numbers, device)
        rules = request_rules(states, greedy, rule, device)
        return cls(key, states, np.array(greedy), sampling_rows(reqs, device), rules, seeds, ends, steps)

    def noise(self, positions: torch.Tensor, gamma: int) -> StepNoise:
        """The noise of one more verification of these requests, which counts it."""
        noise = draw_noise(self.seeds, self.steps, positions, gamma, self.rules)
        self.steps = self.steps + 1
        for state in self.states:
            state.steps += 1
        return noise


@dataclass
class Step:
    """One decode step over R requests and blocks of gamma drafts.

    On the device: `anchors` int64 [R] are the last committed tokens, whose target KV is not stored yet; `prefix_lens`
    int64 [R] counts the tokens whose KV is, so it is also the anchor's position; `slots` int64 [R, gamma+1] are the
    KV slots of the anchor and the drafts; `room` int64 [R] is how many drafts each request may still take. On the host:
    `low` and `high` int64 [R] bound each request's window, `context` is the sum of the prefixes, and `prefix_lens_host`
    are the prefixes where the engine hands them out (None where steps are launched ahead of the device; `high` and
    `context` are then as they were one step ago, and `room` alone is exact).
    """

    number: int
    roster: Roster
    anchors: torch.Tensor
    prefix_lens: torch.Tensor
    prefix_lens_host: torch.Tensor | None
    slots: torch.Tensor
    room: torch.Tensor
    plan: KVLocPlan
    noise: StepNoise
    low: np.ndarray
    high: np.ndarray
    context: int
    times: StepTimes

    @classmethod
    def begin(
        cls,
        number: int,
        batch: ScheduleBatch,
        translator: KVIndexTranslator,
        gamma: int,
        bounds: Bounds,
        roster: Roster,
        times: StepTimes,
    ) -> Step:
        """Read the engine's batch and count one more step for its requests."""
        prefix = batch.seq_lens.to(torch.int64)
        columns = prefix.unsqueeze(1) + torch.arange(gamma + 1, device=prefix.device)
        table = translator.req_to_token  # a request at the context's end has no columns for a whole block
        columns = columns.clamp_(max=table.shape[1] - 1)
        slots = table[batch.req_pool_indices.unsqueeze(1), columns].to(torch.int64)
        plan = translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix,
            seq_lens_cpu=batch.seq_lens_cpu,
            write_virtual=slots.reshape(-1),
            read_extent=gamma + 1,
        )
        low, high = window_bounds(batch.reqs, roster.states, gamma, bounds)
        on_host = batch.seq_lens_cpu
        context = sum(req.kv.kv_committed_len for req in batch.reqs) if on_host is None else int(on_host.sum())
        room = roster.ends - prefix - 2  # the anchor and the bonus token count too
        return cls(
            number, roster, batch.spec_info.bonus_tokens.view(-1), prefix, on_host, slots, room, plan,
            roster.noise(prefix, gamma), low, high, context, times,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """R, the number of requests."""
        return len(self.roster.states)

    @property
    def rows(self) -> SamplingRows:
        return self.roster.rows

    @property
    def requests(self) -> RequestTensors:
        """What a captured draft reads of the requests; the count of verifications is this step's own."""
        roster = self.roster
        return RequestTensors.of(roster.rows, roster.rules, roster.seeds, roster.steps - 1)

    @property
    def greedy(self) -> np.ndarray:
        """bool [R], on the host: requests at temperature 0."""
        return self.roster.greedy

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(state.rid for state in self.roster.states)

    def pack(self, block: BlockDraft, windows: torch.Tensor, tier: int | None) -> RaggedBatch:
        """The anchors and the first `windows` [R] drafts of each request as flat rows, `tier` of them (None: no padding)."""
        slots = self.slots[:, : block.block_size + 1]
        return RaggedBatch.pack(self.anchors, block.tokens, windows, self.prefix_lens, slots, tier=tier)


@dataclass
class Limits:
    """A plan on the device: `budget` int64 [1], and for each request int64 [R] the bounds of its window and, where the
    plan knows them already, the windows; none of them beyond what the request may still take."""

    budget: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    windows: torch.Tensor

    @classmethod
    def of(cls, plan: Plan, step: Step) -> Limits:
        """One copy to the device, which waits for nothing."""
        numbers, size = upload(torch.from_numpy(plan.numbers), step.anchors.device), step.size
        low, high, windows = numbers[2:].view(3, size)
        high = torch.minimum(high, step.room).clamp_(min=0)
        return cls(numbers[:1], torch.minimum(low, high), high, torch.minimum(windows, high))


@dataclass
class Drafted:
    """A step's block: tokens and laws, windows int64 [R], and the raw confidence float32 [R, k] behind them (None: none)."""

    block: BlockDraft
    windows: torch.Tensor
    confidence: torch.Tensor | None = None

    @classmethod
    def nothing(cls, step: Step) -> Drafted:
        """No draft: the step verifies the anchors alone, which is plain decoding."""
        return cls(empty_block(step.anchors), torch.zeros_like(step.anchors))


def empty_block(anchors: torch.Tensor) -> BlockDraft:
    """A block of no drafts for the requests of `anchors` [R]."""
    nothing = torch.empty(len(anchors), 0, dtype=torch.int64, device=anchors.device)
    return BlockDraft(nothing, nothing, None)


def window_bounds(
    reqs: list[Req], states: Sequence[RequestState], gamma: int, bounds: Bounds
) -> tuple[np.ndarray, np.ndarray]:
    """Least and most drafts of each request as far as the host knows, int64 [R] each: the server's bounds, the request's,
    and the tokens that it may still get."""
    room = [0 if forbids_drafts(req) else _tokens_left(req) - 1 for req in reqs]
    high = np.array([max(0, min(gamma, bounds.high, state.high, left)) for state, left in zip(states, room)])
    return np.minimum(np.array([max(bounds.low, state.low) for state in states]), high), high


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


def _tokens_left(req: Req) -> int:
    return req.sampling_params.max_new_tokens - len(req.output_ids)
