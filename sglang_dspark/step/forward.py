"""What the engine is told of a verification or of a draft's block: its own verify input and forward batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dspark.step.types import Step

CONTEXT = 128  # tokens before the rows of a probe: a short chat


@dataclass
class BlockVerifyInput(DFlashVerifyInput):
    """A verification (or draft) forward over a different number of rows per request.

    `rows_per_request` are host integers, which a plain CPU's attention reads (empty where nobody does); `causal` is False
    for the draft's block, whose rows see each other. Key lengths are prefix + rows, and the batch's `seq_lens` are the
    prefixes.
    """

    rows_per_request: list[int] = field(default_factory=list)
    causal: bool = True


@dataclass(frozen=True)
class Rows:
    """Flat rows of R requests for a forward: ids and positions int64 [M], prefixes int64 [R] on the device and, where the
    engine's backends need them, key lengths on the host."""

    ids: torch.Tensor
    positions: torch.Tensor
    pool_rows: torch.Tensor
    prefix_lens: torch.Tensor
    key_lens_host: torch.Tensor | None

    def forward_batch(self, runner, spec_info: BlockVerifyInput) -> ForwardBatch:
        """The engine's batch of these rows, before its KV locations are bound."""
        host = self.key_lens_host
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(self.prefix_lens),
            input_ids=self.ids,
            req_pool_indices=self.pool_rows,
            seq_lens=self.prefix_lens,
            out_cache_loc=None,
            seq_lens_sum=None if host is None else int(host.sum()),
            seq_lens_cpu=host,
            positions=self.positions,
            spec_algorithm=runner.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=spec_info.capture_hidden_mode,
            global_num_token_non_padded_cpu=len(self.ids),
        )


def block_rows(step: Step, pool_rows: torch.Tensor, length: int, mask: int, last_position: int, on_cpu: bool) -> Rows:
    """[anchor, mask x (length - 1)] of every request, at the anchor's position and after."""
    ids = torch.full((step.size, length), mask, dtype=torch.int64, device=step.anchors.device)
    ids[:, 0] = step.anchors
    offsets = torch.arange(length, device=step.anchors.device)
    # Past the context's end positions only repeat: what is drafted there can never be committed.
    positions = (step.prefix_lens.unsqueeze(1) + offsets).clamp_(max=last_position)
    host = step.prefix_lens_host
    if host is not None and not on_cpu:  # the engine's backends count the rows into the host's lengths
        host = host + length
    return Rows(ids.flatten(), positions.flatten(), pool_rows, step.prefix_lens, host)


def block_input(rows: Rows, length: int, *, causal: bool = False) -> BlockVerifyInput:
    """The verify input of whole blocks of `length` rows, whose hidden states nobody captures."""
    return BlockVerifyInput(
        draft_token=rows.ids,
        positions=rows.positions,
        draft_token_num=length,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        rows_per_request=[length] * len(rows.prefix_lens),
        causal=causal,
    )


def probe_rows(positions: torch.Tensor, requests: int, extra: torch.Tensor | int | None) -> Rows:
    """Rows of a probe at start-up, behind a short context.

    Args: positions int64 [M]; extra: rows that the lengths on the host count in (None: prefixes alone).
    """
    device = positions.device
    lens = torch.full((requests,), CONTEXT, dtype=torch.int64)
    host = lens if extra is None else lens + extra
    return Rows(torch.ones_like(positions), positions, torch.arange(requests, device=device), lens.to(device), host)


@torch.inference_mode()
def run_rows(runner, rows: Rows, spec_info: BlockVerifyInput, width: int):
    """A probe's forward; everything it writes goes to the padding slot. Returns the runner's own output."""
    forward = rows.forward_batch(runner, spec_info)
    plan = runner.kv_index_translator.plan(
        req_pool_indices=rows.pool_rows,
        seq_lens=rows.prefix_lens,
        seq_lens_cpu=rows.prefix_lens.cpu(),
        write_virtual=torch.zeros_like(rows.positions),
        read_extent=width,
    )
    plan.bind(forward, runner.kv_index_translator)
    return runner.forward(forward)
