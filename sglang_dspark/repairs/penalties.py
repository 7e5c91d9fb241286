"""Repairs of the engine's sampling parameters of a batch, so that no answer depends on neighbours, process or retraction.

* Penalties have one order. The engine keeps them in a set, so whether the multiplicative repetition penalty comes before
  or after the additive ones differs from process to process; with overlap scheduling, and here always, additive ones
  come first.
* A retracted request's output still counts. The engine builds penalties anew for a prefill and forgets what had been
  emitted, so one token (under plain decoding, all that follow) would be drawn without frequency, presence and repetition
  penalties, and `min_new_tokens` would count from zero again.
* Log-probabilities of a request with top_k 1 are those it has alone. The engine divides its logits by its temperature
  only where some other request of the batch samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_dspark.contract.hooks import AFTER, Hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator


def _after_build(info, cls, batch, vocab_size) -> None:
    orchestrator = info.penalizer_orchestrator
    greedy = [row for row, req in enumerate(batch.reqs) if req.sampling_params.top_k == 1]
    if greedy and any(batch.reqs[row].sampling_params.temperature != 1 for row in greedy):
        info.temperatures[greedy] = 1.0  # of no effect on an argmax, also where the batch is merged with another later
    orchestrator.penalizers = dict(sorted(orchestrator.penalizers.items(), key=lambda item: item[0].is_multiplicative))
    if not orchestrator.is_required:
        return
    for row, req in enumerate(batch.reqs):
        if len(req.output_ids):
            recall(orchestrator, row, req)


def recall(orchestrator: BatchedPenalizerOrchestrator, row: int, req: Req) -> None:
    """Put a request's whole output into its row of fresh penalties."""
    from sglang.srt.sampling import penaltylib

    output = torch.tensor(list(req.output_ids), dtype=torch.int64, device=orchestrator.device)
    params = req.sampling_params
    for kind, penalizer in orchestrator.penalizers.items():
        if not penalizer.is_prepared():
            continue
        if kind is penaltylib.BatchedFrequencyPenalizer:
            amounts = torch.full(output.shape, params.frequency_penalty, device=output.device)
            penalizer.cumulated_frequency_penalties[row].scatter_add_(0, output, amounts)
        elif kind is penaltylib.BatchedPresencePenalizer:
            penalizer.cumulated_presence_penalties[row, output] = params.presence_penalty
        elif kind is penaltylib.BatchedRepetitionPenalizer:
            penalizer.cumulated_repetition_penalties[row, output] = params.repetition_penalty
        elif kind is penaltylib.BatchedMinNewTokensPenalizer:
            penalizer.len_output_tokens[row] = len(output)


HOOKS = (
    Hook(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch",
        AFTER,
        _after_build,
        ("batch", "vocab_size"),
    ),
)
