"""Triton path of `accept.py`: the four rules in one batch, without a host synchronisation.

Launches: over chunks of rows, the law of every row that needs one, then what acceptance must know of it (`rows_triton`);
one program per request that decides; and one that draws the token after the accepted drafts. The last turns its row of p
into the residual in place.

The law is the only large buffer. A batch whose rows fit one chunk keeps it until the final draw; a larger one recomputes
the R rows it stopped at. How many chunks there are follows from the batch's host number of rows.
"""

from __future__ import annotations

import torch

from .backend import jit, tl
from .memory import row_chunks
from .rows_triton import overlap_kernel, row_kernel
from .sampling_triton import NORMALISED, RAW, SKIP, block_for, dense_rows, law_triton, row_draw
from .stops_triton import block_stop, token_stop
from .types import AcceptResult, AcceptRule
from .verified import Verified


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
    px_ptr, q_ptr, token_ptr, column_ptr, rule_ptr, window_ptr, indptr_ptr, own_ptr, scaled_ptr, accept_ptr,
    length_ptr, out_ptr, acceptance_ptr, stop_row_ptr, stop_scale_ptr, K, C, coin_stride,
    HAS_Q: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """One request: how many drafts are accepted, what is committed, and the row and scale of the residual that the last
    token is drawn from (row -1: it is known already; scale 0: from the target's law itself)."""
    r = tl.program_id(0)
    rule = tl.load(rule_ptr + r)
    w = tl.load(window_ptr + r).to(tl.int32)
    first = tl.load(indptr_ptr + r)
    tokens = token_ptr + r * K
    slot = tl.arange(0, K2)
    accepted = 0
    last = tl.load(own_ptr) * 0
    stop_row = first * 0 - 1
    scale = 0.0
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
    if HAS_Q:
        q = q_ptr + (r * K).to(tl.int64) * C
        columns = column_ptr + r * K
        coins = accept_ptr + r * coin_stride
        px = px_ptr + first
        if (rule == 1) | (rule == 2):
            stop = 0
            scale = 1.0
            if rule == 1:
                stop = token_stop(px, q, columns, coins, w, K, C)
            else:
                stop, scale = block_stop(px, q, columns, coins, scaled_ptr + r * K, w, C)
            accepted = tl.minimum(stop, w)
            if stop > w:  # only the token rule: the draft at the bonus row passed
                last = tl.load(tokens + w)
            else:
                stop_row = first + stop
                from_target = ((rule == 2) & (stop == w)) | (stop == K)
                scale = tl.where(from_target, 0.0, scale)
    tl.store(length_ptr + r, (accepted + 1).to(tl.int64))
    tl.store(stop_row_ptr + r, stop_row.to(tl.int64))
    tl.store(stop_scale_ptr + r, scale)
    committed = tl.load(tokens + slot, mask=slot < accepted, other=0)
    committed = tl.where(slot == accepted, last, committed)
    tl.store(out_ptr + r * (K + 1) + slot, committed, mask=slot < K + 1)


@jit
def final_kernel(
    p_ptr, q_ptr, support_ptr, stop_row_ptr, stop_scale_ptr, final_ptr, length_ptr, out_ptr, first_request, K, V, C,
    coin_stride, BY_ROW: tl.constexpr, HAS_SUPPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token after the accepted drafts of one request. p holds every row of the batch (BY_ROW), or one per program."""
    local = tl.program_id(0)
    r = first_request + local
    stop_row = tl.load(stop_row_ptr + r)
    if stop_row >= 0:
        stop = tl.load(length_ptr + r) - 1
        q_row = q_ptr + (r.to(tl.int64) * K + tl.minimum(stop, K - 1)) * C
        p_row = p_ptr + local.to(tl.int64) * V
        if BY_ROW:
            p_row = p_ptr + stop_row * V
        uniform = tl.load(final_ptr + r * coin_stride + stop)
        scale = tl.load(stop_scale_ptr + r)
        drawn = residual_draw(p_row, q_row, support_ptr, scale, uniform, V, C, HAS_SUPPORT, BLOCK)
        tl.store(out_ptr + r * (K + 1) + stop, drawn.to(tl.int64))


class _Judging:
    """One batch on its way through the kernels; buffers that several launches share."""

    def __init__(self, verified: Verified):
        batch, draft, noise = verified.batch, verified.draft, verified.noise
        self.verified, self.logits, self.rules = verified, dense_rows(verified.logits), noise.rules
        self.batch, self.noise = batch, noise
        self.requests, self.block = draft.tokens.shape
        self.vocab, self.device = self.logits.shape[1], self.logits.device
        self.tokens, self.columns = draft.tokens.contiguous(), draft.columns.contiguous()
        self.q = draft.probs.contiguous() if self.rules.need_coins else None
        self.support = draft.support
        self.live = batch.qo_indptr[-1:]
        self.own = torch.empty(batch.rows, dtype=torch.int64, device=self.device)
        self.px = torch.empty(batch.rows, dtype=torch.float32, device=self.device)
        self.acceptance = torch.full((self.requests, self.block), torch.nan, device=self.device)
        self.scaled = torch.zeros(self.requests, self.block, device=self.device)

    def modes(self) -> torch.Tensor:
        """What the law kernel does with each row, int32 [M]: coupled rows stay as the seeded sampler has them."""
        batch = self.batch
        rule = self.rules.rule[batch.row_to_request]
        mode = torch.where(rule == AcceptRule.COUPLED, RAW, NORMALISED)
        return torch.where(batch.live & (rule != AcceptRule.GREEDY), mode, SKIP).to(torch.int32)

    def rows(self, start: int, end: int, p: torch.Tensor | None) -> None:
        """What a chunk of rows tells, given its laws."""
        batch, noise, count = self.batch, self.noise, end - start
        row_kernel[(count,)](
            self.logits, self.px if p is None else p, self.rules.rule, batch.row_to_request, batch.row_to_column,
            self.tokens, noise.seeds, noise.positions, self.live, self.own, self.px, start, self.block, self.vocab,
            self.logits.stride(0), HAS_P=p is not None, ARGMAX_BLOCK=block_for(self.vocab),
            RACE_BLOCK=min(1024, block_for(self.vocab)), num_warps=8,
        )  # fmt: skip
        if self.q is not None and self.block:
            columns = self.q.shape[2]
            overlap_kernel[(count,)](
                p, self.q, self.own if self.support is None else self.support, self.px, self.columns, self.rules.rule,
                batch.row_to_request, batch.row_to_column, batch.windows, batch.qo_indptr, self.live, self.acceptance,
                self.scaled, start, self.block, self.vocab, columns, HAS_SUPPORT=self.support is not None,
                BLOCK=min(1024, block_for(columns)), num_warps=4,
            )  # fmt: skip

    def decide(self) -> tuple[AcceptResult, torch.Tensor, torch.Tensor]:
        """Lengths and all tokens but those that are drawn; the rows these are drawn at [R], and their scales [R]."""
        batch, coins, own = self.batch, self.noise.coins, self.own
        lengths, stop_row = torch.empty(2, self.requests, dtype=torch.int64, device=self.device)
        scale = torch.empty(self.requests, dtype=torch.float32, device=self.device)
        tokens = torch.empty(self.requests, self.block + 1, dtype=torch.int64, device=self.device)
        has_q = self.q is not None
        judge_kernel[(self.requests,)](
            self.px, self.q if has_q else self.px, self.tokens if self.block else own, self.columns if self.block else own,
            self.rules.rule, batch.windows, batch.qo_indptr, own, self.scaled, coins.accept if has_q else self.px, lengths,
            tokens, self.acceptance, stop_row, scale, self.block, self.q.shape[2] if has_q else 1,
            coins.accept.shape[1] if has_q else 1, HAS_Q=has_q, K2=1 << self.block.bit_length(),
        )  # fmt: skip
        return AcceptResult(lengths, tokens, self.acceptance), stop_row, scale

    def draw(
        self, result: AcceptResult, stop_row: torch.Tensor, scale: torch.Tensor, p: torch.Tensor, start: int, end: int
    ) -> None:
        """The last tokens of requests start .. end, into the result. p [end - start, V] are the laws of their stop rows;
        of all requests at once it may be the whole batch's [M, V]."""
        coins, columns = self.noise.coins, self.q.shape[2]
        final_kernel[(end - start,)](
            p, self.q, self.own if self.support is None else self.support, stop_row, scale, coins.final, result.lengths,
            result.tokens, start, self.block, self.vocab, columns, coins.final.shape[1], BY_ROW=len(p) > end - start,
            HAS_SUPPORT=self.support is not None, BLOCK=min(1024, block_for(self.vocab)), num_warps=8,
        )  # fmt: skip


def accept_triton(verified: Verified) -> AcceptResult:
    """As `accept`, without a synchronisation. Padding rows are skipped by their number, never read."""
    j, rows, request = _Judging(verified), verified.rows, verified.batch.row_to_request
    chunks = row_chunks(len(request), j.vocab)
    laws = mode = None
    if not j.rules.only(AcceptRule.GREEDY):
        mode = j.modes()
        laws = torch.empty(chunks[0][1], j.vocab, dtype=torch.float32, device=j.device)
    for start, end in chunks:
        if mode is not None:
            law_triton(j.logits[start:end], rows, True, request[start:end], mode[start:end], out=laws[: end - start])
        j.rows(start, end, laws)
    result, stop_row, scale = j.decide()
    if j.q is None:
        return result
    if len(chunks) == 1:
        j.draw(result, stop_row, scale, laws, 0, j.requests)
        return result
    mode = torch.where(stop_row >= 0, NORMALISED, SKIP).to(torch.int32)
    everyone = torch.arange(j.requests, device=j.device)
    for start, end in row_chunks(j.requests, j.vocab):
        some, law = slice(start, end), laws[: end - start]
        law_triton(j.logits, rows, True, everyone[some], mode[some], source=stop_row[some], out=law)
        j.draw(result, stop_row, scale, law, start, end)
    return result
