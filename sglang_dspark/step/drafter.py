"""Drafting: the draft model in an engine worker of its own, and one forward of it over a block of masks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker

from sglang_dspark.models.checkpoint import local_folder
from sglang_dspark.models.families import refuse_recurrent_target
from sglang_dspark.settings.flags import ALGORITHM
from sglang_dspark.step.context import DraftContext
from sglang_dspark.step.draft_graph import DraftGraph
from sglang_dspark.step.forward import block_input, block_rows
from sglang_dspark.step.head import BlockRun, Head
from sglang_dspark.step.ranks import Ranks
from sglang_dspark.step.types import Step

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class Drafter:
    """Owns the draft model: `run` is its forward, `head` draws from it, `context` keeps its KV at the target's slots."""

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
        self.last_position = target.model_config.context_len - 1
        self.device = torch.device(self.runner.device)
        self.on_cpu = self.device.type == "cpu"
        # A slot's state hardly depends on the masks behind it (docs/scheduling.md), so a CPU leaves out those that nobody
        # may verify. On an accelerator a few rows more cost nothing, and published drafts were measured with whole blocks.
        self.short_blocks = self.on_cpu
        self.head = Head(self.model, self.ranks)
        self.context = DraftContext(self.model, self.runner)
        self.graph: DraftGraph | None = None  # the head inside the engine's captured forward
        self.eager_because: str | None = None  # why the draft runs without its graph where there are graphs

    def run(self, batch, step: Step, length: int) -> BlockRun:
        """One forward over the blocks of a step, of which `length` drafts are wanted: n is `length` where blocks may be
        short, else gamma."""
        self.context.catch_up()
        length = length if self.short_blocks else self.gamma
        rows = block_rows(
            step, batch.req_pool_indices, length, self.config.mask_token_id, self.last_position, self.on_cpu
        )
        forward = rows.forward_batch(self.runner, block_input(rows, length))
        step.plan.bind(forward, self.runner.kv_index_translator, cols=slice(0, length))
        if self.graph is not None:
            self.graph.load(step)
        result = self.runner.forward(forward)
        states = result.logits_output.hidden_states.view(step.size, length, -1)
        if self.graph is not None and result.can_run_graph:
            return self.graph.read(step, states)
        return BlockRun(states)

    def join_capture(self, most_requests: int) -> None:
        """Have the engine capture the head in the tail of the block's forward; call it before graphs are captured."""
        if not self.on_cpu:
            self.graph = DraftGraph(self.model, self.gamma, most_requests, self.device)
            self.runner.capture_tail_hooks.append(self.graph.hook)

    def check_graph(self) -> None:
        """After the capture: keep the graph only if a replay is what the eager draft computes. Drafting wrongly in silence
        is the one thing that must not happen."""
        graph, self.graph = self.graph, None
        if graph is None or self.runner.decode_cuda_graph_runner is None:
            return
        if graph.agrees(self.runner, min(2, graph.most_requests)):
            self.graph = graph
            return
        self.runner.decode_cuda_graph_runner = None
        self.eager_because = "replays of its captured graph differ from the eager draft"
        logger.warning("the draft runs without a graph: %s", self.eager_because)
