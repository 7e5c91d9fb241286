"""Drafting: one forward of the draft over a block of masks, then its sequential head, left to right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker

from dspark_kernels.confidence import block_confidence
from dspark_kernels.head_graph import HeadGraphs, captured_head
from dspark_kernels.markov import sample_block
from dspark_kernels.markov_windows import sample_windows
from dspark_kernels.types import BlockDraft
from sglang_dspark.models.checkpoint import local_folder
from sglang_dspark.models.families import refuse_recurrent_target
from sglang_dspark.settings.flags import ALGORITHM
from sglang_dspark.step.ranks import Ranks
from sglang_dspark.step.types import BlockVerifyInput, Step, empty_block

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

POSTPONED_STEPS = 16  # plain steps whose features may wait: 16 x 32 requests x 3 layers of 576 are 1.8 MB


class Drafter:
    """Owns the draft model, run by an engine worker of its own over the target's KV slots."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        # The engine has a Qwen3DSparkModel of its own for its built-in DSPARK; this process runs ours.
        ModelRegistry.register("sglang_dspark.models", overwrite=True)
        target = target_worker.model_runner
        refuse_recurrent_target(target.model_config)
        bundle = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_model_config=target.model_config,
            algo_label=ALGORITHM,
            random_seed=target_worker.random_seed,
        )
        self.worker, self.runner, self.model = bundle.draft_worker, bundle.draft_model_runner, bundle.draft_model
        self.config = self.model.draft
        self.folder = Path(local_folder(server_args.speculative_draft_model_path))
        hf_config = target.model_config.hf_text_config
        self.config.check_target(
            hidden_size=hf_config.hidden_size,
            vocab_size=target.model_config.vocab_size,
            num_hidden_layers=hf_config.num_hidden_layers,
        )
        self.model.share_with_target(target.model.get_input_embeddings(), target.model.lm_head)
        self.gamma = self.config.block_size
        self.ranks = Ranks()
        self.head_graphs: HeadGraphs | None = None
        self.last_position = target.model_config.context_len - 1
        self.on_cpu = torch.device(self.runner.device).type == "cpu"
        # A slot's state hardly depends on the masks behind it (docs/scheduling.md), so a CPU leaves out those that nobody
        # may verify. On an accelerator a few rows more cost nothing, and published drafts were measured with whole blocks.
        self.short_blocks = self.on_cpu
        self._offsets = torch.arange(self.gamma, device=self.runner.device)
        self._postponed: list[tuple[torch.Tensor, ...]] = []  # arguments of `absorb`, oldest first

    def sample(self, states: torch.Tensor, step: Step, length: int, windows: np.ndarray | None = None) -> BlockDraft:
        """Draw `length` <= gamma tokens per request from the block's states [R, n >= length, d], left to right.

        With `windows` [R] only the slots inside them are drawn; the others hold token 0 and are never verified.
        """
        if length == 0:
            return empty_block(step)
        hidden = states[:, :length]
        head, support = self.model.markov_head, self.model.draft_token_ids
        if windows is None or (windows == length).all():
            base = self.model.base_logits(hidden.reshape(-1, hidden.shape[-1])).view(step.size, length, -1)
            block = sample_block(head, base, hidden, step.anchors, step.rows, step.noise, support)
        else:
            block = sample_windows(
                head, self.model.base_logits, hidden, step.anchors, step.rows, step.noise, windows, support
            )
        return self._agreed(block)

    def propose(self, states: torch.Tensor, step: Step, length: int) -> tuple[BlockDraft, np.ndarray | None]:
        """`sample` of `length` tokens, and the raw confidence float32 [R, length] in each, on the host (None: no head)."""
        graphs = self.head_graphs
        if graphs is not None and graphs.takes(step.anchors, step.noise, length):
            block, logits = graphs.draw(states, step.anchors, step.rows, step.noise)
            block = self._agreed(block)
        else:
            block, logits = self.sample(states, step, length), None
            if self.model.confidence_head is not None:
                logits = block_confidence(self.model, states, step.anchors, block.tokens)
        return block, None if logits is None else logits.cpu().numpy()

    def capture_head(self, most_requests: int) -> None:
        """Capture the head where graphs are used at all; a plain CPU has none."""
        states = torch.empty(
            self.gamma, self.config.hidden_size, dtype=self.model.fc.weight.dtype, device=self.runner.device
        )
        self.head_graphs = captured_head(self.model, self.gamma, states, most_requests)

    def _agreed(self, block: BlockDraft) -> BlockDraft:
        """The first rank's block on every rank."""
        if self.ranks.alone:
            return block
        return replace(block, tokens=self.ranks.tensor(block.tokens), columns=self.ranks.tensor(block.columns))

    def hidden_confidence(self, states: torch.Tensor) -> torch.Tensor:
        """Logits float32 [R, n] from the block's states [R, n, d] alone: known before any token is drawn."""
        head = self.model.hidden_confidence_head or self.model.confidence_head
        return head(states)

    def run_block(self, batch, step: Step, length: int) -> torch.Tensor:
        """Block states [R, n, d] of [anchor, mask x (n-1)] at the anchor's position and after, of which `length` are
        wanted: n is `length` where blocks may be short, else gamma."""
        self.catch_up()
        length = length if self.short_blocks else self.gamma
        ids = torch.full((step.size, length), self.config.mask_token_id, dtype=torch.int64, device=step.anchors.device)
        ids[:, 0] = step.anchors
        # Past the context's end positions only repeat: what is drafted there can never be committed.
        positions = (step.prefix_lens.unsqueeze(1) + self._offsets[:length]).clamp_(max=self.last_position)
        host_lens = step.prefix_lens_host
        if not self.on_cpu:  # the engine's backends count the rows into the host's lengths
            host_lens = host_lens + length
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=step.size,
            input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=step.prefix_lens,
            out_cache_loc=None,
            seq_lens_sum=int(host_lens.sum()),
            seq_lens_cpu=host_lens,
            positions=positions.flatten(),
            spec_algorithm=batch.spec_algorithm,
            spec_info=BlockVerifyInput(
                draft_token=ids.flatten(),
                positions=positions.flatten(),
                draft_token_num=length,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                rows_per_request=[length] * step.size,
                causal=False,
            ),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=ids.numel(),
        )
        step.plan.bind(forward, self.runner.kv_index_translator, cols=slice(0, length))
        hidden = self.runner.forward(forward).logits_output.hidden_states
        return hidden.view(step.size, length, -1)

    def absorb(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the draft's KV of committed tokens from the target's features of them.

        Args: features [N, m*d]; positions int64 [N]; slots int64 [N] in the draft pool's own ids.
        """
        self.catch_up()
        self._write(features, positions, slots)

    def absorb_later(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """`absorb`, but only before the draft runs or any slot may change hands: plain steps then pay once for several.

        The caller says when slots may change hands (`catch_up`). The features must not be a graph's own output.
        """
        self._postponed.append((features, positions, slots))
        if len(self._postponed) >= POSTPONED_STEPS:
            self.catch_up()

    def catch_up(self) -> None:
        """Write what was postponed."""
        if self._postponed:
            parts, self._postponed = self._postponed, []
            self._write(*map(torch.cat, zip(*parts)))

    def _write(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        if features.shape[0]:
            self.model.write_context(features, positions, slots, self.runner.token_to_kv_pool)
