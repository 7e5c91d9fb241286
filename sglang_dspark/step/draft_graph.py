"""The whole draft as one captured graph: the engine's captured forward of the block, and in its tail our head and confidence.

The engine runs `capture_tail_hooks` inside the forward that it captures. Ours draws the block there, from parameters in
static buffers, so that greedy, sampled, seeded and filtered requests share one graph, and leaves its results in static
buffers too. Before the server is ready a replay is compared with the eager draft; where they differ the draft runs eagerly.
"""

from __future__ import annotations

import torch

from dspark_kernels.draft import DrawnBlock, draft_block
from dspark_kernels.requests import RequestTensors
from dspark_kernels.types import AcceptRule
from sglang_dspark.step.forward import CONTEXT, block_input, probe_rows, run_rows
from sglang_dspark.step.head import BlockRun, states_confidence
from sglang_dspark.step.types import Step

LAW_BYTES = 1 << 30  # most memory for the laws of a captured block; larger batches draw eagerly from the graph's states
TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}  # of the largest state, graph against eager


class DraftGraph:
    """Static inputs and outputs of the captured head.

    Args:
        model: the draft. gamma: its block. most_requests: of a batch that is captured. device: of the draft.
    """

    def __init__(self, model, gamma: int, most_requests: int, device: torch.device) -> None:
        self.model, self.gamma = model, gamma
        support = model.draft.support_size
        self.most_requests = most = min(most_requests, max(1, LAW_BYTES // (4 * gamma * support)))
        self.requests = RequestTensors.buffers(most, device)
        confident = model.confidence_head is not None
        self.drawn = DrawnBlock.buffers(most, gamma, support, device, confidence=confident)
        self.hidden = torch.zeros(most, gamma, device=device) if model.draft.has_hidden_confidence else None

    def hook(self, runner, output, forward_batch, num_tokens: int) -> None:
        """Runs inside the captured forward, after the model (`capture_tail_hooks`)."""
        requests = num_tokens // self.gamma
        if requests > self.most_requests:
            return
        states = output.hidden_states.view(requests, self.gamma, -1)
        anchors = forward_batch.input_ids.view(requests, self.gamma)[:, 0]
        positions = forward_batch.positions.view(requests, self.gamma)[:, 0]
        given, out = self.requests.first(requests), self.drawn.first(requests)
        draft_block(self.model, states, anchors, given, positions, out=out)
        if self.hidden is not None:
            self.hidden[:requests].copy_(states_confidence(self.model, states))

    def load(self, step: Step) -> None:
        """Hand a step's parameters to the next replay; nothing is copied from the host."""
        if step.size <= self.most_requests:
            self.requests.copy_(step.requests)

    def read(self, step: Step, states: torch.Tensor) -> BlockRun:
        """What the replay of a step's block left, as views that hold until the next replay.

        Args: states [R, gamma, d] of the replayed forward.
        """
        size = step.size
        if size > self.most_requests:
            return BlockRun(states)
        drawn = self.drawn.first(size)
        block = drawn.block(self.model.draft_token_ids)
        return BlockRun(states, block, drawn.confidence, None if self.hidden is None else self.hidden[:size])

    def agrees(self, runner, requests: int) -> bool:
        """Whether replays are what the eager draft computes, for two inputs that differ: a stale buffer repeats itself.

        States must agree within the dtype's tolerance, and the replayed tokens be the eager head's on the replayed states.
        Every other request samples.
        """
        self.requests.rule[::2].fill_(int(AcceptRule.BLOCK))
        last = None
        for first in (1, 2):
            offsets = torch.arange(self.gamma, device=self.drawn.tokens.device)
            rows = probe_rows((CONTEXT + offsets).repeat(requests), requests, self.gamma)
            rows.ids.copy_(first + torch.arange(len(rows.ids), device=offsets.device) % 7)
            replayed = run_rows(runner, rows, block_input(rows, self.gamma), self.gamma)
            if not replayed.can_run_graph:
                return False
            states = replayed.logits_output.hidden_states.clone().view(requests, self.gamma, -1)
            if not self._close(states, self._eager_states(runner, rows)) or not self._redrawn(states, rows):
                return False
            if last is not None and torch.equal(last, states):
                return False
            last = states
        return True

    def _eager_states(self, runner, rows) -> torch.Tensor:
        graphs, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
        try:
            return run_rows(runner, rows, block_input(rows, self.gamma), self.gamma).logits_output.hidden_states
        finally:
            runner.decode_cuda_graph_runner = graphs

    def _redrawn(self, states: torch.Tensor, rows) -> bool:
        """Whether the head, run eagerly on the replayed states, draws what the replay drew."""
        requests = len(states)
        anchors, positions = (x.view(requests, self.gamma)[:, 0] for x in (rows.ids, rows.positions))
        again = draft_block(self.model, states, anchors, self.requests.first(requests), positions)
        return torch.equal(again.tokens, self.drawn.tokens[:requests])

    def _close(self, replayed: torch.Tensor, eager: torch.Tensor) -> bool:
        expected = eager.view_as(replayed)
        apart = (replayed - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        return bool(apart <= TOLERANCE[replayed.dtype])
