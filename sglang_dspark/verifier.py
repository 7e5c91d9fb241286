"""Verification: one forward of the target over the anchors and the drafts inside their windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from dspark_kernels.ragged import RaggedBatch
from sglang_dspark.step import BlockVerifyInput, Step


@dataclass
class TargetRows:
    """What the target said of M ragged rows: `output` is the engine's own object, whose logits are [M, V]."""

    output: object
    features: torch.Tensor  # [M, m*d]
    used_graph: bool

    @property
    def logits(self) -> torch.Tensor:
        return self.output.next_token_logits


class Verifier:
    """Runs the target over ragged batches."""

    def __init__(self, target_worker: TpModelWorker, gamma: int) -> None:
        self.worker = target_worker
        self.runner = target_worker.model_runner
        self.width = gamma + 1

    def forward(self, batch, step: Step, ragged: RaggedBatch) -> TargetRows:
        """Run Σ(1+w) rows; the caller restores the batch's own fields (the engine isolates them)."""
        window_index = ragged.row_to_request * self.width + ragged.row_to_column
        verify = BlockVerifyInput(
            draft_token=ragged.input_ids, positions=ragged.positions, draft_token_num=self.width,
            capture_hidden_mode=CaptureHiddenMode.FULL, kv_loc_plan=step.plan, kv_loc_cols=window_index,
            rows_per_request=(ragged.windows + 1).tolist())
        batch.input_ids, batch.spec_info, batch.forward_mode = ragged.input_ids, verify, ForwardMode.TARGET_VERIFY
        batch.out_cache_loc = ragged.out_slots
        forward = ForwardBatch.init_new(
            batch, self.runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False,
            kv_loc_plan=step.plan, write_cols=window_index)
        result = self.worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
        output = result.logits_output
        features, output.hidden_states = output.hidden_states, None
        if features is None:
            raise RuntimeError("the target returned no features for the draft: its model class does not capture layers")
        return TargetRows(output, features, result.can_run_cuda_graph)
