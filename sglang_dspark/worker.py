"""The speculative worker: prefill, and one decode step from budget to commit (docs/structure.md)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

from dspark_kernels.accept import accept
from dspark_kernels.ragged import RaggedBatch
from dspark_kernels.types import AcceptResult
from sglang_dspark.adjust import adjust_logits
from sglang_dspark.drafter import Drafter
from sglang_dspark.flags import config_of
from sglang_dspark.step import Step
from sglang_dspark.verifier import TargetRows, Verifier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class DSparkWorker(BaseSpecWorker):
    """Runs a target and its draft for the engine's scheduler, one batch at a time."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self.config = config_of(server_args)
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.drafter = Drafter(server_args, gpu_id, nccl_port, target_worker)
        self._draft_worker = self.drafter.worker
        self.gamma = self.drafter.gamma
        self.verifier = Verifier(target_worker, self.gamma)

    def __getattr__(self, name: str):
        # The scheduler asks its model worker for much that only the target knows.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return self.model_runner.attn_backend, self.drafter.runner.attn_backend

    def weight_update_runners(self) -> list:
        return [("draft", self.drafter.runner)]

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish=None, grammar_barrier=None, *, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """The engine's entry: a prefill where the batch extends, else one decode step."""
        with torch.inference_mode():
            if batch.forward_mode.is_extend():
                result = self.prefill(batch)
            else:
                result = self.step(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Target prefill; the draft's KV of the same tokens is written before the radix cache may see them."""
        plan = self.model_runner.kv_index_translator.own_plan(batch)
        slots = plan.write_ids(self.drafter.runner.kv_index_translator)
        positions = torch.cat([
            torch.arange(start, start + count, device=slots.device)
            for start, count in zip(batch.prefix_lens, batch.extend_lens)])
        result = self._target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        output = result.logits_output
        self.drafter.absorb(output.hidden_states, positions, slots)
        output.hidden_states = None
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = make_draft_input_v2(bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens)
        return result

    def step(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """One decode step: draft, size the windows, verify, accept, commit."""
        step = Step.begin(batch, self.model_runner.kv_index_translator, self.gamma, self.config.accept_rule,
                          self._target_worker.random_seed)
        draft, hidden = self.drafter.propose(batch, step, self.gamma)
        windows = torch.tensor([min(self.gamma, room) for room in step.room], device=step.anchors.device)
        ragged = RaggedBatch.pack(step.anchors, draft.tokens, windows, step.prefix_lens, step.slots)
        target = self.verifier.forward(batch, step, ragged)
        adjust_logits(target.logits, batch, ragged)
        accepted = accept(target.logits, ragged, draft, step.rows, step.noise.rules, step.noise)
        self._commit(step, ragged, target, accepted)
        return self._result(step, target, accepted, windows)

    def _commit(self, step: Step, ragged: RaggedBatch, target: TargetRows, accepted: AcceptResult) -> None:
        """Write the draft's KV of what was committed and has target KV: the anchor and the accepted drafts."""
        kept = ragged.row_to_column < accepted.lengths[ragged.row_to_request]
        slots = step.plan.write_ids(self.drafter.runner.kv_index_translator).view(step.slots.shape)
        self.drafter.absorb(target.features[kept], ragged.positions[kept],
                            slots[ragged.row_to_request[kept], ragged.row_to_column[kept]])

    def _result(self, step, target: TargetRows, accepted: AcceptResult, windows: torch.Tensor) -> GenerationBatchResult:
        new_lens = step.prefix_lens + accepted.lengths
        bonus = accepted.tokens.gather(1, (accepted.lengths - 1).unsqueeze(1)).squeeze(1)
        return GenerationBatchResult(
            logits_output=target.output,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=accepted.lengths.to(torch.int32),
            cap_lens=(windows + 1).to(torch.int32),
            can_run_cuda_graph=target.used_graph,
            next_draft_input=make_draft_input_v2(bonus_tokens=bonus, new_seq_lens=new_lens),
            speculative_num_draft_tokens=self.gamma + 1,
            new_seq_lens=new_lens,
        )
