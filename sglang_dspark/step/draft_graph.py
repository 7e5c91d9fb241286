"""The whole draft as one captured graph: the engine's captured forward of the block, and in its tail our head and confidence.

The engine runs `capture_tail_hooks` inside the forward that it captures. Ours draws the block there, from parameters in
static buffers, so that greedy, sampled, seeded and filtered requests share one graph, and leaves its results in static
buffers too. Before the server is ready a replay is compared with the eager draft; where they differ the draft runs eagerly.
"""

from __future__ import annotations

import torch

from dspark_kernels.draft_block import draft_block
from dspark_kernels.types import AcceptRule, BlockDraft, SamplingRows
from sglang_dspark.step.forward import CONTEXT, block_input, probe_rows, run_rows
from sglang_dspark.step.head import BlockRun
from sglang_dspark.step.types import Roster, Step

LAW_BYTES = 1 << 30  # most memory for the laws of a captured block; larger batches draw eagerly from the graph's states
_INPUTS = {
    "temperature": (torch.float32, 1.0),
    "top_k": (torch.int64, 1),
    "top_p": (torch.float32, 1.0),
    "min_p": (torch.float32, 0.0),
    "greedy": (torch.bool, True),
    "rule": (torch.int32, int(AcceptRule.GREEDY)),
    "seeds": (torch.int64, 0),
    "steps": (torch.int64, 0),
}
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
        self.most_requests = min(most_requests, max(1, LAW_BYTES // (4 * gamma * support)))
        shape = (self.most_requests, gamma)
        self.inputs = {
            name: torch.full(shape[:1], fill, dtype=dtype, device=device) for name, (dtype, fill) in _INPUTS.items()
        }
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.columns = torch.zeros_like(self.tokens)
        self.probs = torch.zeros(*shape, support, device=device)
        self.confidence = torch.zeros(shape, device=device) if model.confidence_head is not None else None
        self.hidden = torch.zeros(shape, device=device) if model.draft.has_hidden_confidence else None
        self._loaded: Roster | None = None

    def hook(self, runner, output, forward_batch, num_tokens: int) -> None:
        """Runs inside the captured forward, after the model (`capture_tail_hooks`)."""
        requests = num_tokens // self.gamma
        states = output.hidden_states.view(requests, self.gamma, -1)
        if requests > self.most_requests:
            return
        anchors = forward_batch.input_ids.view(requests, self.gamma)[:, 0]
        positions = forward_batch.positions.view(requests, self.gamma)[:, 0]
        drawn = self._draw(states, anchors, positions, requests)
        self.tokens[:requests].copy_(drawn.tokens)
        self.columns[:requests].copy_(drawn.columns)
        self.probs[:requests].copy_(drawn.probs)
        if self.confidence is not None:
            self.confidence[:requests].copy_(drawn.confidence)
        if self.hidden is not None:
            head = self.model.hidden_confidence_head or self.model.confidence_head
            self.hidden[:requests].copy_(head(states))

    def load(self, step: Step) -> None:
        """Hand a step's parameters to the next replay; nothing is copied from the host."""
        if step.size > self.most_requests:
            return
        size, roster = step.size, step.roster
        if roster is not self._loaded:
            law = {name: getattr(roster.rows, name) for name in ("temperature", "top_k", "top_p", "min_p", "greedy")}
            for name, values in (law | {"rule": roster.rules.rule, "seeds": roster.seeds}).items():
                self.inputs[name][:size].copy_(values)
            self._loaded = roster
        self.inputs["steps"][:size].copy_(roster.steps - 1)  # the step's own count: beginning it has counted it

    def read(self, step: Step, states: torch.Tensor) -> BlockRun:
        """What the replay of a step's block left, as views that hold until the next replay.

        Args: states [R, gamma, d] of the replayed forward.
        """
        size = step.size
        if size > self.most_requests:
            return BlockRun(states)
        probs = None if step.rows.all_greedy else self.probs[:size]
        block = BlockDraft(self.tokens[:size], self.columns[:size], probs, self.model.draft_token_ids)
        confidence = None if self.confidence is None else self.confidence[:size]
        return BlockRun(states, block, confidence, None if self.hidden is None else self.hidden[:size])

    def agrees(self, runner, requests: int) -> bool:
        """Whether replays are what the eager draft computes, for two inputs that differ: a stale buffer repeats itself.

        States must agree within the dtype's tolerance, and the replayed tokens be the eager head's on the replayed states.
        """
        kept, last = runner.decode_cuda_graph_runner, None
        self._loaded = None  # the parameters are the check's own
        for name, values in (("temperature", 1.0), ("greedy", False), ("rule", int(AcceptRule.BLOCK))):
            self.inputs[name][::2].fill_(values)  # every other request samples
        for first in (1, 2):
            length = torch.arange(self.gamma, device=self.tokens.device)
            rows = probe_rows((CONTEXT + length).repeat(requests), requests, self.gamma)
            rows.ids.copy_(first + torch.arange(len(rows.ids), device=rows.ids.device) % 7)
            replayed = run_rows(runner, rows, block_input(rows, self.gamma), self.gamma)
            if not replayed.can_run_graph:
                return False
            states = replayed.logits_output.hidden_states.clone().view(requests, self.gamma, -1)
            anchors, positions = (x.view(requests, self.gamma)[:, 0] for x in (rows.ids, rows.positions))
            again = self._draw(states, anchors, positions, requests)
            runner.decode_cuda_graph_runner = None
            try:
                eager = run_rows(runner, rows, block_input(rows, self.gamma), self.gamma)
            finally:
                runner.decode_cuda_graph_runner = kept
            expected = eager.logits_output.hidden_states.view_as(states)
            apart = (states - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
            if apart > TOLERANCE[states.dtype] or not torch.equal(again.tokens, self.tokens[:requests]):
                return False
            if last is not None and torch.equal(last, states):
                return False
            last = states
        return True

    def _draw(self, states: torch.Tensor, anchors: torch.Tensor, positions: torch.Tensor, requests: int):
        given = {name: values[:requests] for name, values in self.inputs.items()}
        rule, seeds, steps = (given.pop(name) for name in ("rule", "seeds", "steps"))
        rows = SamplingRows(**given, all_greedy=False, any_greedy=True, any_temperature=True, any_filter=True)
        return draft_block(self.model, states, anchors, rows, seeds, steps, positions, rule)
