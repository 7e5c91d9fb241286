"""Verification: one forward of the target over the anchors and the drafts inside their windows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from dspark_kernels.ragged import RaggedBatch, next_tier
from dspark_scheduler import Plan
from sglang_dspark.accelerator.backends import check_backend
from sglang_dspark.accelerator.defaults import capability
from sglang_dspark.accelerator.layout import device_layout
from sglang_dspark.step.forward import BlockVerifyInput
from sglang_dspark.step.types import Step

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


@dataclass
class TargetRows:
    """What the target said of M ragged rows: `output` is the engine's own object, whose logits are [M, V]."""

    output: LogitsProcessorOutput
    features: torch.Tensor  # [M, m*d]
    used_graph: bool

    @property
    def logits(self) -> torch.Tensor:
        """[M, V], the target's logits of every row, padding included."""
        return self.output.next_token_logits


class Verifier:
    """Runs the target over ragged batches.

    A plain CPU reads the rows of each request from our own verify input, and runs exactly as many as there are. On an
    accelerator nobody waits to know how many there are: a step takes as many rows as its plan allows at most, padded to
    the tiers at which the engine captured its graphs, and the engine's layout object tells its attention which of them
    are whose.
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
        """Raises ConfigError for an attention backend that would read every request as a whole block: every mode meets
        shorter ones, at a token limit, under a request's own bounds, while drafting rests."""
        if not self.on_cpu:
            check_backend(self.runner.attn_backend, capability())

    def tier(self, plan: Plan) -> int | None:
        """Rows of the step's verification: an upper bound, padded to a captured tier; None on a plain CPU, which runs
        exactly the rows that there are."""
        return None if self.on_cpu else self.padded(len(plan.low), len(plan.low) + plan.tokens)

    def padded(self, requests: int, rows: int) -> int:
        """`rows` of `requests` requests padded to the graph's tier that holds them; no graph holds more requests than the
        largest tier has whole blocks."""
        most_requests = max(self.tiers, default=0) // self.width
        return next_tier(rows, self.tiers if requests <= most_requests else ())

    def forward(self, batch, step: Step, ragged: RaggedBatch, *, whole: bool) -> TargetRows:
        """Run the rows; the caller restores the batch's own fields (the engine isolates them).

        Args: whole: every request has the rows of a whole block.
        """
        in_block = ragged.window_index(self.width)
        # A plain CPU's attention, and one that plans on the host (flashinfer), need the numbers of rows here; the latter
        # waits for them.
        on_host = self.on_cpu or step.prefix_lens_host is not None
        rows = (ragged.windows + 1).tolist() if on_host else []
        verify = BlockVerifyInput(
            draft_token=ragged.input_ids,
            positions=ragged.positions,
            draft_token_num=self.width,
            num_tokens_per_req=self.width_for_graphs(whole=whole),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=step.plan,
            kv_loc_cols=in_block,
            rows_per_request=rows,
            ragged_verify_layout=self.layout(ragged, rows, whole=whole),
        )
        batch.input_ids, batch.spec_info, batch.forward_mode = ragged.input_ids, verify, ForwardMode.TARGET_VERIFY
        batch.out_cache_loc = ragged.out_slots
        if rows and not self.on_cpu:  # the engine's backends count the rows into the host's lengths
            batch.seq_lens_cpu = step.prefix_lens_host + torch.tensor(rows)
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward = ForwardBatch.init_new(
            batch,
            self.runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
            kv_loc_plan=step.plan,
            write_cols=in_block,
        )
        result = self.worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
        output = result.logits_output
        features, output.hidden_states = output.hidden_states, None
        if features is None:
            raise RuntimeError("the target returned no features for the draft: its model class does not capture layers")
        output.next_token_logits = output.next_token_logits[: ragged.rows]
        return TargetRows(output, features[: ragged.rows], result.can_run_cuda_graph)

    def width_for_graphs(self, *, whole: bool) -> int:
        """Rows per request, as the engine compares them with its graphs of whole blocks: ragged rows must not meet one, so
        they name a longer width, which is an upper bound for whoever else reads it."""
        return self.width if whole or self.tiers or self.on_cpu else self.width + 1

    def layout(self, ragged: RaggedBatch, rows: list[int], *, whole: bool) -> RaggedVerifyLayout | None:
        """The engine's layout of ragged rows, from the host's numbers where there are any. None where nobody reads it: on a
        plain CPU, and for whole blocks while graphs are captured by requests."""
        if self.on_cpu or (whole and not self.tiers):
            return None
        if rows:
            return RaggedVerifyLayout.from_verify_lens(
                verify_lens_cpu=rows, device=ragged.windows.device, grid=[ragged.rows]
            )
        return device_layout(ragged.windows, ragged.rows)
