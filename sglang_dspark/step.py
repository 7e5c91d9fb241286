"""The core types of one decode step: what a request carries from step to step, and what a step works on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from dspark_kernels.sampling import SamplingRows
from dspark_kernels.types import AcceptRule, RequestRules, StepNoise

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


@dataclass
class RequestState:
    """What speculation remembers of a request. It lives on the engine's own `Req`, so it dies with it.

    `seed` keys the request's random numbers and `steps` counts its verifications: together they make every
    number drawn for it unique, whatever batch it runs in and however often it is retracted.
    """

    rid: str
    seed: int
    seeded: bool  # the client gave the seed
    steps: int = 0

    @classmethod
    def of(cls, req: Req, server_seed: int) -> RequestState:
        state = getattr(req, "dspark_state", None)
        if state is None:
            given = req.sampling_params.sampling_seed
            state = cls(req.rid, _own_seed(req.rid, server_seed) if given is None else int(given), given is not None)
            req.dspark_state = state
        return state


def _own_seed(rid: str, server_seed: int) -> int:
    """A 63-bit seed for a request that gave none: the same on every rank, different for every request."""
    digest = hashlib.blake2b(f"{server_seed}/{rid}".encode(), digest_size=8).digest()
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
class Step:
    """One decode step over R requests and blocks of gamma drafts, as tensors on the device.

    `anchors` int64 [R] are the last committed tokens, whose target KV is not stored yet; `prefix_lens` int64 [R]
    counts the tokens whose KV is, so it is also the anchor's position; `slots` int64 [R, gamma+1] are the KV slots of
    the anchor and the drafts; `room` [R] is how many drafts a request may still use (its token limit, less one).
    """

    states: list[RequestState]
    anchors: torch.Tensor
    prefix_lens: torch.Tensor
    prefix_lens_host: torch.Tensor
    slots: torch.Tensor
    plan: KVLocPlan
    rows: SamplingRows
    noise: StepNoise
    room: list[int]

    @classmethod
    def begin(cls, batch: ScheduleBatch, translator: KVIndexTranslator, gamma: int, rule: str, server_seed: int) -> Step:
        """Read the engine's batch and count one more step for its requests.

        Args: `rule` judges requests that sample and gave no seed ("token", "block" or "coupled").
        """
        device = batch.seq_lens.device
        prefix = batch.seq_lens.to(torch.int64)
        columns = prefix.unsqueeze(1) + torch.arange(gamma + 1, device=device)
        slots = translator.req_to_token[batch.req_pool_indices.unsqueeze(1), columns].to(torch.int64)
        plan = translator.plan(req_pool_indices=batch.req_pool_indices, seq_lens=prefix,
                               seq_lens_cpu=batch.seq_lens_cpu, write_virtual=slots.reshape(-1), read_extent=gamma + 1)
        states = [RequestState.of(req, server_seed) for req in batch.reqs]
        noise = StepNoise.draw(
            seeds=torch.tensor([s.seed for s in states], dtype=torch.int64, device=device),
            steps=torch.tensor([s.steps for s in states], dtype=torch.int64, device=device),
            positions=prefix, block_size=gamma, rules=request_rules(batch.reqs, states, rule, device))
        step = cls(
            states=states,
            anchors=batch.spec_info.bonus_tokens.view(-1),
            prefix_lens=prefix,
            prefix_lens_host=batch.seq_lens_cpu,
            slots=slots,
            plan=plan,
            rows=sampling_rows(batch.reqs, device),
            noise=noise,
            room=[max(0, _tokens_left(req) - 1) for req in batch.reqs],
        )
        for state in states:
            state.steps += 1
        return step

    @property
    def size(self) -> int:
        return len(self.states)


def sampling_rows(reqs: list[Req], device: torch.device) -> SamplingRows:
    """The requests' sampling parameters, one row each (the engine writes temperature 0 as top_k 1)."""
    params = [req.sampling_params for req in reqs]
    return SamplingRows.of([p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params],
                           [p.min_p for p in params], device=device)


def request_rules(reqs: list[Req], states: list[RequestState], rule: str, device: torch.device) -> RequestRules:
    """Greedy for temperature 0, coupled for a request that gave a seed, else the server's rule."""
    default = AcceptRule[rule.upper()]

    def of(req: Req, state: RequestState) -> AcceptRule:
        if req.sampling_params.top_k == 1:
            return AcceptRule.GREEDY
        return AcceptRule.COUPLED if state.seeded else default

    return RequestRules.of([of(req, state) for req, state in zip(reqs, states)], device=device)


def _tokens_left(req: Req) -> int:
    return req.sampling_params.max_new_tokens - len(req.output_ids)
