"""Verification: one forward of the target over the anchors and the drafts inside their windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from dspark_kernels.ragged import RaggedBatch
from sglang_dspark.config import ConfigError
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
    """Runs the target over ragged batches.

    A plain CPU reads the rows of each request from our own verify input. On an accelerator the engine's layout object
    carries them to its attention backends; that path has not run on CUDA yet, and runs eagerly: whole blocks of one
    width keep the engine's captured graphs, ragged rows do not use its token tiers yet.
    """

    def __init__(self, target_worker: TpModelWorker, gamma: int) -> None:
        self.worker = target_worker
        self.runner = target_worker.model_runner
        self.width = gamma + 1
        self.on_cpu = torch.device(self.runner.device).type == "cpu"

    def check_backend(self, mode: str) -> None:
        """Refuse windows on an attention backend that would read every request as a whole block.

        Raises:
            ConfigError: naming the backend and the fix.
        """
        backend = self.runner.attn_backend
        if self.on_cpu or mode not in ("compact", "cap-accept") or backend.supports_ragged_verify_graph:
            return
        raise ConfigError(
            f"--verify-mode {mode}: the attention backend {type(backend).__name__} does not read windows of different "
            "lengths; use --attention-backend fa3, fa4 or trtllm_mha, or --verify-mode static")

    def forward(self, batch, step: Step, ragged: RaggedBatch) -> TargetRows:
        """Run Σ(1+w) rows; the caller restores the batch's own fields (the engine isolates them)."""
        window_index = ragged.row_to_request * self.width + ragged.row_to_column
        rows = (ragged.windows + 1).tolist()
        verify = BlockVerifyInput(
            draft_token=ragged.input_ids, positions=ragged.positions, draft_token_num=self.width,
            capture_hidden_mode=CaptureHiddenMode.FULL, kv_loc_plan=step.plan, kv_loc_cols=window_index,
            rows_per_request=rows, ragged_verify_layout=self._layout(rows))
        batch.input_ids, batch.spec_info, batch.forward_mode = ragged.input_ids, verify, ForwardMode.TARGET_VERIFY
        batch.out_cache_loc = ragged.out_slots
        if not self.on_cpu:  # the engine's backends count the rows into the host's lengths
            batch.seq_lens_cpu = step.prefix_lens_host + torch.tensor(rows)
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward = ForwardBatch.init_new(
            batch, self.runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False,
            kv_loc_plan=step.plan, write_cols=window_index)
        result = self.worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
        output = result.logits_output
        features, output.hidden_states = output.hidden_states, None
        if features is None:
            raise RuntimeError("the target returned no features for the draft: its model class does not capture layers")
        return TargetRows(output, features, result.can_run_cuda_graph)

    def _layout(self, rows: list[int]) -> RaggedVerifyLayout | None:
        """The engine's layout of ragged rows; None where it is not read, or where every request has the full width."""
        if self.on_cpu or all(n == self.width for n in rows):
            return None
        return RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=rows, device=self.runner.device, grid=[sum(rows)])
