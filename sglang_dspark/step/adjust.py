"""What a request asks of its logits, applied at every row of a block with the state plain decoding would have there.

Order as in plain decoding: penalties (additive, then the multiplicative one), grammar, logit bias, custom processors. A
row j of a request sees its output so far and the j drafts before that row. Custom logit processors keep state that we
cannot see, so their requests get no drafts at all (`forbids_drafts`) and run through the engine's own function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor

from dspark_kernels.ragged import RaggedBatch
from sglang_dspark.contract.hooks import AFTER, Hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def _waits_for_output(disabled: bool, scheduler, batch, last_batch) -> bool:
    """With overlap scheduling a step starts before the last one's tokens are in `output_ids`. Where a request's logits
    depend on them, the step waits for that result, as the engine lets grammars wait."""
    if disabled or not batch or batch.spec_algorithm.is_none() or not batch.forward_mode.is_decode():
        return disabled
    return len(scheduler.result_queue) > 0 and any(_is_penalised(r) or forbids_drafts(r) for r in batch.reqs)


def forbids_drafts(req: Req) -> bool:
    """Whether a request's next law may depend on its output in a way that only one token at a time gets right."""
    return bool(req.custom_logit_processor)


def adjust_logits(logits: torch.Tensor, batch: ScheduleBatch, ragged: RaggedBatch) -> None:
    """Adjust [M, V] ragged rows in place. Requests that ask for nothing cost nothing; penalties, grammars and custom
    processors need the step's rows and drafts on the host, so they wait for the device, once."""
    asking = [(r, req) for r, req in enumerate(batch.reqs) if _is_penalised(req) or req.grammar is not None]
    if asking:
        starts, tokens = ragged.qo_indptr.tolist(), ragged.input_ids.tolist()
    for r, req in asking:
        block, drafts = logits[starts[r] : starts[r + 1]], tokens[starts[r] + 1 : starts[r + 1]]
        if _is_penalised(req):
            _penalise(block, req, drafts)
        if req.grammar is not None:
            _constrain(block, req.grammar, drafts)
    bias = batch.sampling_info.logit_bias
    if bias is not None:
        logits += bias[ragged.row_to_request[: logits.shape[0]]].to(logits.dtype)
    if batch.sampling_info.has_custom_logit_processor:
        _custom_processors(logits, batch, ragged.qo_indptr[:-1].long())


def _custom_processors(logits: torch.Tensor, batch: ScheduleBatch, rows: torch.Tensor) -> None:
    """Run the engine's processors on the anchors' rows, int64 [R], the only ones their requests have."""
    anchors = logits.index_select(0, rows)
    apply_custom_logit_processor(anchors, batch.sampling_info)
    logits.index_copy_(0, rows, anchors)


def _is_penalised(req: Req) -> bool:
    p = req.sampling_params
    return (
        p.frequency_penalty != 0
        or p.presence_penalty != 0
        or p.repetition_penalty != 1
        or p.min_new_tokens > len(req.output_ids)
    )


def _penalise(block: torch.Tensor, req: Req, drafts: list[int]) -> None:
    """Penalties of rows 0..w of one request; row j has seen the output so far and `drafts[:j]`."""
    p = req.sampling_params
    output = torch.tensor(list(req.output_ids), dtype=torch.int64, device=block.device)
    counts = torch.bincount(output, minlength=block.shape[1]).to(torch.float32)
    stops = _stop_tokens(req)
    for j, row in enumerate(block):
        if j:
            counts[drafts[j - 1]] += 1
        seen = counts > 0
        row -= p.frequency_penalty * counts + p.presence_penalty * seen
        if len(req.output_ids) + j < p.min_new_tokens:
            row[stops] = -torch.inf
        if p.repetition_penalty != 1:
            scaled = torch.where(row < 0, row * p.repetition_penalty, row / p.repetition_penalty)
            row.copy_(torch.where(seen, scaled, row))


def _stop_tokens(req: Req) -> list[int]:
    """Tokens that would end the request, which `min_new_tokens` forbids until it is reached."""
    tokens = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        tokens |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return [t for t in tokens if t is not None]


def _constrain(block: torch.Tensor, grammar, drafts: list[int]) -> None:
    """Mask rows 0..w of one request by its grammar, walked along the drafts and then set back to where it was.

    Rows behind a draft that the grammar forbids stay unmasked: that draft has probability zero under the row before
    it, so no rule gets past it. Rows behind the grammar's end likewise: the engine drops what follows an end.
    """
    mask = grammar.allocate_vocab_mask(vocab_size=block.shape[1], batch_size=block.shape[0], device="cpu")
    walked = rows = 0
    for j in range(block.shape[0]):
        if grammar.finished or grammar.is_terminated():
            break
        grammar.fill_vocab_mask(mask, j)
        rows = j + 1
        if j == len(drafts) or not _allows(mask, j, drafts[j], grammar):
            break
        grammar.accept_token(drafts[j])
        walked += 1
    if walked:
        grammar.rollback(walked)
    if rows:
        device_mask = grammar.move_vocab_mask(mask[:rows], block.device)
        grammar.apply_vocab_mask(block[:rows], device_mask)


def _allows(mask: torch.Tensor, row: int, token: int, grammar) -> bool:
    if mask.dtype == torch.bool:
        return not bool(mask[row, token])  # True means forbidden
    return bool((int(mask[row, token // 32]) >> (token % 32)) & 1)


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler:Scheduler.is_disable_overlap_for_batch",
        AFTER,
        _waits_for_output,
        ("batch", "last_batch"),
    ),
)
