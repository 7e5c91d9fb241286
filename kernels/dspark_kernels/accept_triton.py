"""Triton path of `accept.py`: the four rules in one batch, without a host synchronisation.

Launches: the law of every row that needs one (the one [M, V] float32 buffer), the target's own token of greedy and
coupled rows, the overlap sums of every verified slot, and one program per request that judges and commits. The last
turns its stop row of p into the residual in place, so no second buffer exists.
"""

from __future__ import annotations

import torch

from .backend import jit, tl
from .gumbel_triton import row_race
from .ragged import RaggedBatch
from .sampling_triton import NORMALISED, RAW, SKIP, block_for, dense_rows, law_triton, row_argmax, row_draw
from .stops_triton import block_stop, joint_ratio, token_stop
from .types import AcceptResult, AcceptRule, BlockDraft, RequestRules, StepNoise
from .verified import Verified


@jit
def own_token_kernel(
    logits_ptr, p_ptr, rule_ptr, request_ptr, column_ptr, seed_ptr, position_ptr, own_ptr, live_ptr,
    V, logits_stride, HAS_P: tl.constexpr, ARGMAX_BLOCK: tl.constexpr, RACE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The token that the target emits by itself: argmax on greedy rows, argmax(log p + g) on coupled ones."""
    row = tl.program_id(0)
    if row < tl.load(live_ptr):
        request = tl.load(request_ptr + row)
        rule = tl.load(rule_ptr + request)
        if rule == 0:
            _, first = row_argmax(logits_ptr + row.to(tl.int64) * logits_stride, V, ARGMAX_BLOCK)
            tl.store(own_ptr + row, first.to(tl.int64))
        if HAS_P:  # noqa: SIM102 - the first is decided at compile time
            if rule == 3:
                position = tl.load(position_ptr + request) + 1 + tl.load(column_ptr + row)
                p_row = p_ptr + row.to(tl.int64) * V
                won = row_race(p_row, p_row, V, tl.load(seed_ptr + request), position, False, RACE_BLOCK)
                tl.store(own_ptr + row, won.to(tl.int64))


@jit
def overlap_kernel(
    p_ptr, q_ptr, support_ptr, token_ptr, column_ptr, rule_ptr, window_ptr, indptr_ptr, plain_ptr, scaled_ptr,
    K, V, C, HAS_SUPPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ min(p, q) and Σ min(s p, q) of one slot (request, k): NaN and 0 where it is not verified."""
    r = tl.program_id(0)
    k = tl.program_id(1)
    rule = tl.load(rule_ptr + r)
    first = tl.load(indptr_ptr + r)
    plain = tl.full([1], float("nan"), tl.float32)
    scaled = tl.zeros([1], tl.float32)
    if ((rule == 1) | (rule == 2)) & (k < tl.load(window_ptr + r)):
        q_row = q_ptr + (r * K).to(tl.int64) * C
        scale = joint_ratio(p_ptr, token_ptr + r * K, column_ptr + r * K, q_row, first, k, V, C)
        p_row = p_ptr + (first + k).to(tl.int64) * V
        lanes = tl.arange(0, BLOCK)
        sum_plain = tl.zeros([BLOCK], tl.float32)
        sum_scaled = tl.zeros([BLOCK], tl.float32)
        for start in range(0, C, BLOCK):
            c = start + lanes
            q = tl.load(q_row + k * C + c, mask=c < C, other=0.0)
            token = c.to(tl.int64)
            if HAS_SUPPORT:
                token = tl.load(support_ptr + c, mask=c < C, other=0)
            p = tl.load(p_row + token, mask=c < C, other=0.0)
            sum_plain += tl.minimum(p, q)
            sum_scaled += tl.minimum(p * scale, q)
        plain = tl.zeros([1], tl.float32) + tl.sum(sum_plain, axis=0)
        scaled = tl.zeros([1], tl.float32) + tl.sum(sum_scaled, axis=0)
    one = tl.arange(0, 1)
    tl.store(plain_ptr + r * K + k + one, plain)
    tl.store(scaled_ptr + r * K + k + one, scaled)


@jit
def residual_draw(
    p_row, q_row, ids_ptr, scale, uniform, V, C, HAS_SUPPORT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A token from (scale p - q)+; from p where scale is 0 or the residual has no mass. Overwrites p_row."""
    lanes = tl.arange(0, BLOCK)
    drawn = 0
    if scale > 0.0:
        # Mass first, so that an empty residual leaves p as it was.
        inside = tl.zeros([BLOCK], tl.float32)
        covered = tl.zeros([BLOCK], tl.float32)
        whole = tl.zeros([BLOCK], tl.float32)
        for start in range(0, C, BLOCK):
            c = start + lanes
            token = c.to(tl.int64)
            if HAS_SUPPORT:
                token = tl.load(ids_ptr + c, mask=c < C, other=0)
            p = tl.load(p_row + token, mask=c < C, other=0.0)
            q = tl.load(q_row + c, mask=c < C, other=0.0)
            inside += tl.maximum(p * scale - q, 0.0)
            covered += p
        if HAS_SUPPORT:
            for start in range(0, V, BLOCK):
                offsets = start + lanes
                whole += tl.load(p_row + offsets, mask=offsets < V, other=0.0)
        # Outside the support the residual is scale p: some token there counts only if it has a positive p.
        outside = tl.sum(whole, axis=0) - tl.sum(covered, axis=0)
        if (tl.sum(inside, axis=0) > 0.0) | (outside > 1e-6):
            for start in range(0, V, BLOCK):
                offsets = start + lanes
                p = tl.load(p_row + offsets, mask=offsets < V, other=0.0)
                tl.store(p_row + offsets, p * scale, mask=offsets < V)
            tl.debug_barrier()
            for start in range(0, C, BLOCK):
                c = start + lanes
                token = c.to(tl.int64)
                if HAS_SUPPORT:
                    token = tl.load(ids_ptr + c, mask=c < C, other=0)
                p = tl.load(p_row + token, mask=c < C, other=0.0)
                q = tl.load(q_row + c, mask=c < C, other=0.0)
                tl.store(p_row + token, tl.maximum(p - q, 0.0), mask=c < C)
            tl.debug_barrier()
    drawn = row_draw(p_row, V, uniform, BLOCK)
    return drawn


@jit
def judge_kernel(
    p_ptr, q_ptr, support_ptr, token_ptr, column_ptr, rule_ptr, window_ptr, indptr_ptr, own_ptr, scaled_ptr,
    accept_ptr, final_ptr, length_ptr, out_ptr, acceptance_ptr,
    K, V, C, coin_stride,
    HAS_P: tl.constexpr, HAS_SUPPORT: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One request: how many drafts are accepted, the token after them, and what is committed."""
    r = tl.program_id(0)
    rule = tl.load(rule_ptr + r)
    w = tl.load(window_ptr + r).to(tl.int32)
    first = tl.load(indptr_ptr + r)
    tokens = token_ptr + r * K
    slot = tl.arange(0, K2)
    accepted = 0
    last = tl.load(tokens) * 0
    if (rule == 0) | (rule == 3):  # emit the target's own tokens up to the first that the draft missed
        running = 1
        for k in range(w):
            running = tl.where(tl.load(own_ptr + first + k) == tl.load(tokens + k), running, 0)
            accepted += running
        last = tl.load(own_ptr + first + accepted)
        if rule == 0:
            own = tl.load(own_ptr + first + slot, mask=slot < w, other=0)
            hit = (own == tl.load(tokens + slot, mask=slot < w, other=0)).to(tl.float32)
            tl.store(acceptance_ptr + r * K + slot, hit, mask=slot < w)
    if HAS_P:
        q = q_ptr + (r * K).to(tl.int64) * C
        columns = column_ptr + r * K
        coins = accept_ptr + r * coin_stride
        stop = 0
        stop_scale = 1.0
        if rule == 1:
            stop = token_stop(p_ptr, q, tokens, columns, coins, first, w, K, V, C)
        if rule == 2:
            stop, stop_scale = block_stop(p_ptr, q, tokens, columns, coins, scaled_ptr + r * K, first, w, V, C)
        if (rule == 1) | (rule == 2):
            accepted = tl.minimum(stop, w)
            if stop > w:  # only the token rule: the draft at the bonus row passed
                last = tl.load(tokens + w)
            else:
                from_target = ((rule == 2) & (stop == w)) | (stop == K)
                s = tl.where(from_target, 0.0, stop_scale)
                at = tl.minimum(stop, K - 1)
                uniform = tl.load(final_ptr + r * coin_stride + stop)
                p_row = p_ptr + (first + stop).to(tl.int64) * V
                last = residual_draw(p_row, q + at * C, support_ptr, s, uniform, V, C, HAS_SUPPORT, BLOCK).to(tl.int64)
    tl.store(length_ptr + r, (accepted + 1).to(tl.int64))
    committed = tl.load(tokens + slot, mask=slot < accepted, other=0)
    committed = tl.where(slot == accepted, last, committed)
    tl.store(out_ptr + r * (K + 1) + slot, committed, mask=slot < K + 1)


def accept_triton(verified: Verified) -> AcceptResult:
    """As `accept`, without a synchronisation. Padding rows are skipped by their number, never read."""
    batch, noise = verified.batch, verified.noise
    logits, rules = dense_rows(verified.logits), noise.rules
    live = batch.qo_indptr[-1:]
    p = None
    if not rules.only(AcceptRule.GREEDY):
        mode = _modes(batch, rules.rule, live, len(logits))
        p = law_triton(logits, verified.rows, True, batch.row_to_request, mode)
    own = _own_tokens(logits, p, batch, rules.rule, rules, noise, live)
    return judge_triton(p, own, batch, verified.draft, rules.rule, noise)


def _modes(batch: RaggedBatch, rule: torch.Tensor, live: torch.Tensor, rows: int) -> torch.Tensor:
    """What the law kernel does with each row: int32 [M]. Coupled rows stay as the seeded sampler has them."""
    of_rule = torch.full((4,), NORMALISED, dtype=torch.int32, device=rule.device)
    of_rule[AcceptRule.GREEDY] = SKIP
    of_rule[AcceptRule.COUPLED] = RAW
    mode = of_rule[rule[batch.row_to_request].to(torch.int64)]
    return torch.where(torch.arange(rows, device=rule.device) < live, mode, SKIP)


def _own_tokens(
    logits: torch.Tensor,
    p: torch.Tensor | None,
    batch: RaggedBatch,
    rule: torch.Tensor,
    rules: RequestRules,
    noise: StepNoise,
    live: torch.Tensor,
) -> torch.Tensor:
    """int64 [M], set on greedy and coupled rows."""
    own = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if AcceptRule.GREEDY in rules.groups or AcceptRule.COUPLED in rules.groups:
        vocab = logits.shape[1]
        own_token_kernel[(len(logits),)](
            logits, logits if p is None else p, rule, batch.row_to_request, batch.row_to_column, noise.seeds,
            noise.positions, own, live, vocab, logits.stride(0), HAS_P=p is not None,
            ARGMAX_BLOCK=block_for(vocab), RACE_BLOCK=min(1024, block_for(vocab)), num_warps=8,
        )  # fmt: skip
    return own


def judge_triton(
    p: torch.Tensor | None,
    own: torch.Tensor,
    batch: RaggedBatch,
    draft: BlockDraft,
    rule: torch.Tensor,
    noise: StepNoise,
) -> AcceptResult:
    """The decisions, given the target's law p [M, V] (overwritten) and own tokens [M]."""
    device = own.device
    requests, block = draft.tokens.shape
    lengths = torch.empty(requests, dtype=torch.int64, device=device)
    tokens = torch.empty(requests, block + 1, dtype=torch.int64, device=device)
    acceptance = torch.full((requests, block), torch.nan, device=device)
    scaled = torch.empty(requests, block, device=device)
    drafted, columns, support = draft.tokens.contiguous(), draft.columns.contiguous(), draft.support
    has_p = p is not None and draft.probs is not None and noise.coins is not None
    q = draft.probs.contiguous() if has_p else own
    ids = own if support is None else support
    C, V = (q.shape[2], p.shape[1]) if has_p else (1, 1)
    if has_p:
        overlap_kernel[(requests, block)](
            p, q, ids, drafted, columns, rule, batch.windows, batch.qo_indptr, acceptance, scaled,
            block, V, C, HAS_SUPPORT=support is not None, BLOCK=min(1024, block_for(C)), num_warps=4,
        )  # fmt: skip
    judge_kernel[(requests,)](
        p if has_p else own, q, ids, drafted, columns, rule, batch.windows, batch.qo_indptr, own, scaled,
        noise.coins.accept if has_p else own, noise.coins.final if has_p else own, lengths, tokens, acceptance,
        block, V, C, block + 1 if not has_p else noise.coins.accept.shape[1],
        HAS_P=has_p, HAS_SUPPORT=support is not None, K2=1 << block.bit_length(),
        BLOCK=min(1024, block_for(V)), num_warps=8,
    )  # fmt: skip
    return AcceptResult(lengths, tokens, acceptance)
