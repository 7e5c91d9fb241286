"""Verification: one forward of the target over the anchors and the drafts inside their windows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from dspark_kernels.ragged import RaggedBatch, next_tier
from sglang_dspark.accelerator.backends import check_backend
from sglang_dspark.accelerator.defaults import capability
from sglang_dspark.step.types import BlockVerifyInput, Step

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


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
    carries them to its attention backends, and rows are padded to the tiers at which the engine captured its graphs
    (docs/accelerators.md says what of it was proved where).
    """

    def __init__(self, target_worker: TpModelWorker, gamma: int) -> None:
        self.worker = target_worker
        self.runner = target_worker.model_runner
        self.width = gamma + 1
        self.on_cpu = torch.device(self.runner.device).type == "cpu"

    def capture_by_rows(self, server_args: ServerArgs) -> None:
        """Have the engine capture the target's graphs by rows instead of by requests, where its attention reads windows.

        The engine has no flag for it: it reads this switch of its own once, when it captures. Where it cannot (a backend
        that plans on the host, graphs that may not be padded) it keeps the graphs of whole blocks, and ragged rows run
        eagerly.
        """
        if self.on_cpu:
            return
        if not self.runner.attn_backend.supports_ragged_verify_graph:
            envs.SGLANG_RAGGED_VERIFY_MODE.set("static")
            logger.warning(
                "--attention-backend flashinfer verifies windows of different lengths without graphs, and waits for the "
                "device three times per step; --attention-backend fa3 (sm80, 86, 89, 90) or dspark_triton do neither"
            )
        elif not server_args.disable_cuda_graph_padding:
            envs.SGLANG_RAGGED_VERIFY_MODE.set("compact")

    @property
    def tiers(self) -> tuple[int, ...]:
        """Rows at which the target's graphs were captured, ascending; empty where there are none of ragged rows."""
        graphs = getattr(self.runner, "decode_cuda_graph_runner", None)
        return tuple(getattr(graphs, "capture_num_tokens", None) or ())

    def check_backend(self) -> None:
        """Raises:
        ConfigError: an attention backend that would read every request as a whole block.
        """
        if not self.on_cpu:
            check_backend(self.runner.attn_backend, capability())

    def forward(self, batch, step: Step, ragged: RaggedBatch) -> TargetRows:
        """Run Σ(1+w) rows; the caller restores the batch's own fields (the engine isolates them)."""
        rows = (ragged.windows + 1).tolist()
        layout = self.layout(rows)
        padding = 0 if layout is None else layout.graph_num_tokens - ragged.rows
        window_index = _padded(ragged.row_to_request * self.width + ragged.row_to_column, padding, -1)
        ids, positions = _padded(ragged.input_ids, padding), _padded(ragged.positions, padding)
        verify = BlockVerifyInput(
            draft_token=ids,
            positions=positions,
            draft_token_num=self.width,
            num_tokens_per_req=self._width_of(rows),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=step.plan,
            kv_loc_cols=window_index,
            rows_per_request=rows,
            ragged_verify_layout=layout,
        )
        batch.input_ids, batch.spec_info, batch.forward_mode = ids, verify, ForwardMode.TARGET_VERIFY
        batch.out_cache_loc = _padded(ragged.out_slots, padding)  # slot 0 is nobody's
        if not self.on_cpu:  # the engine's backends count the rows into the host's lengths, where they have any
            batch.seq_lens_cpu = batch.seq_lens_sum = None
            if step.prefix_lens_host is not None:
                batch.seq_lens_cpu = step.prefix_lens_host + torch.tensor(rows)
                batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward = ForwardBatch.init_new(
            batch,
            self.runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
            kv_loc_plan=step.plan,
            write_cols=window_index,
        )
        result = self.worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
        output = result.logits_output
        features, output.hidden_states = output.hidden_states, None
        if features is None:
            raise RuntimeError("the target returned no features for the draft: its model class does not capture layers")
        output.next_token_logits = output.next_token_logits[: ragged.rows]
        return TargetRows(output, features[: ragged.rows], result.can_run_cuda_graph)

    def _whole(self, rows: Sequence[int]) -> bool:
        return all(n == self.width for n in rows)

    def _width_of(self, rows: Sequence[int]) -> int:
        """Rows per request, as the engine compares them with its graphs of whole blocks: ragged rows must not meet one,
        so they name a longer width, which is an upper bound for whoever reads it."""
        return self.width if self.on_cpu or self.tiers or self._whole(rows) else self.width + 1

    def layout(self, rows: Sequence[int]) -> RaggedVerifyLayout | None:
        """The engine's layout of `rows` per request, padded to the graph's tier that holds them.

        None where nobody reads it: on a plain CPU, and for whole blocks while graphs are captured by requests.
        """
        if self.on_cpu or (not self.tiers and self._whole(rows)):
            return None
        most_requests = max(self.tiers, default=0) // self.width
        tiers = self.tiers if len(rows) <= most_requests else ()
        return RaggedVerifyLayout.from_verify_lens(
            verify_lens_cpu=rows, device=self.runner.device, grid=[next_tier(sum(rows), tiers)]
        )


def _padded(rows: torch.Tensor, padding: int, value: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, padding), value=value) if padding else rows
