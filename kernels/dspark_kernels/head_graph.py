"""The sequential head and its confidence on CUDA: whole blocks as one captured graph per number of requests.

Left to right, a block is gamma times a dozen small kernels, which a host launches more slowly than a GPU runs them.
This has not run on CUDA yet: a CPU test runs the same callable eagerly over the same buffers, and what was captured is
compared with the eager head before it serves (`HeadGraphs.agrees`).
"""

from __future__ import annotations

import logging

import torch

from .confidence import block_confidence
from .graphs import RaggedGraph, RowBuffer
from .markov import sample_block
from .types import AcceptRule, BlockDraft, Coins, RequestRules, SamplingRows, StepNoise

logger = logging.getLogger(__name__)
TIERS = (1, 2, 4, 8, 16, 32)  # requests; each sampled tier keeps its laws [R, gamma, support] in float32
_PARAMETERS = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32,
               "greedy": torch.bool}  # fmt: skip
_PADDING = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "greedy": True}


class HeadGraphs:
    """Draws whole blocks and their confidence; `takes` says of which steps.

    Args:
        model: the draft: its `base_logits`, `markov_head`, `confidence_head` and `draft_token_ids` are read.
        gamma: its block. states: one block's states [gamma, d], for their width and dtype.
        most_requests: of a step; more than the last tier run eagerly elsewhere.
        capture: False runs the same callable eagerly over the same buffers.
    """

    def __init__(self, model, gamma: int, states: torch.Tensor, most_requests: int, capture: bool = True) -> None:
        self.model, self.gamma, self._like, device = model, gamma, states, states.device
        self.tiers = tuple(tier for tier in TIERS if tier < 2 * most_requests)
        self._noise = {tier: _noise(tier, gamma, device) for tier in self.tiers}
        rows = {"states": RowBuffer((gamma, states.shape[-1]), states.dtype), "anchors": RowBuffer()}
        coins = {"coins": RowBuffer((gamma,), torch.float64)}
        law = {name: RowBuffer((), dtype, _PADDING.get(name, 0)) for name, dtype in _PARAMETERS.items()}
        self.greedy = RaggedGraph(self._greedy, self.tiers, rows, device=device, capture=capture)
        self.sampled = RaggedGraph(self._sampled, self.tiers, rows | coins | law, device=device, capture=capture)

    def takes(self, anchors: torch.Tensor, noise: StepNoise, length: int) -> bool:
        """Whole blocks of requests without a seed of their own (theirs is another noise, drawn by groups)."""
        return length == self.gamma and len(anchors) <= self.tiers[-1] and AcceptRule.COUPLED not in noise.rules.groups

    def draw(
        self, states: torch.Tensor, anchors: torch.Tensor, rows: SamplingRows, noise: StepNoise
    ) -> tuple[BlockDraft, torch.Tensor | None]:
        """The block, and raw confidence float32 [R, gamma] (None without a head); both hold until the next call.

        Args: states [R, gamma, d]; anchors int64 [R]; R rows of parameters; the step's noise.
        """
        if rows.all_greedy:
            drawn = self.greedy(states=states, anchors=anchors)
        else:
            law = {name: getattr(rows, name) for name in _PARAMETERS}
            drawn = self.sampled(states=states, anchors=anchors, coins=noise.coins.draft[:, : self.gamma], **law)
        block = BlockDraft(drawn["tokens"], drawn["columns"], drawn.get("probs"), self.model.draft_token_ids)
        return block, drawn.get("confidence")

    def capture_all(self) -> None:
        self.greedy.capture_all()
        self.sampled.capture_all()

    def agrees(self) -> bool:
        """Whether replayed blocks are those of the eager head, on random states of every tier."""
        made = torch.Generator().manual_seed(0)
        for tier in self.tiers:
            states = torch.randn(tier, *self._like.shape, generator=made).to(self._like)
            law = SamplingRows.of([1.0] * tier, device=states.device)
            coins = torch.rand(tier, self.gamma, generator=made, dtype=torch.float64).to(states.device)
            inputs = {"states": states, "anchors": torch.arange(tier, device=states.device)}
            more = {"coins": coins} | {name: getattr(law, name) for name in _PARAMETERS}
            for graph, given in ((self.greedy, inputs), (self.sampled, inputs | more)):
                if not torch.equal(graph(**given)["tokens"], graph.function(**given)["tokens"]):
                    return False
        return True

    def _greedy(self, states: torch.Tensor, anchors: torch.Tensor) -> dict[str, torch.Tensor]:
        requests = len(anchors)
        everyone = torch.ones(requests, device=anchors.device)
        rows = SamplingRows(everyone, anchors, everyone, everyone, everyone.bool(), True, True, False, False)
        return self._block(states, anchors, rows)

    def _sampled(
        self, states: torch.Tensor, anchors: torch.Tensor, coins: torch.Tensor, **law
    ) -> dict[str, torch.Tensor]:
        rows = SamplingRows(**law, all_greedy=False, any_greedy=True, any_temperature=True, any_filter=True)
        return self._block(states, anchors, rows, coins)

    def _block(self, states, anchors, rows: SamplingRows, coins: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        model, requests = self.model, len(anchors)
        noise = self._noise[requests]
        if coins is not None:
            noise = StepNoise(noise.seeds, noise.positions, noise.rules, Coins(coins, coins, coins))
        base = model.base_logits(states.flatten(0, 1)).view(requests, self.gamma, -1)
        block = sample_block(model.markov_head, base, states, anchors, rows, noise, model.draft_token_ids)
        drawn = {"tokens": block.tokens, "columns": block.columns}
        if block.probs is not None:
            drawn["probs"] = block.probs
        if model.confidence_head is not None:
            drawn["confidence"] = block_confidence(model, states, anchors, block.tokens)
        return drawn


def _noise(requests: int, gamma: int, device: torch.device) -> StepNoise:
    """What `sample_block` reads of noise besides the coins, made before a capture, which allows no copies from the host."""
    nothing = torch.zeros(requests, dtype=torch.int64, device=device)
    coins = torch.zeros(requests, gamma, dtype=torch.float64, device=device)
    return StepNoise(
        nothing, nothing, RequestRules.of([AcceptRule.BLOCK] * requests, device), Coins(coins, coins, coins)
    )


def captured_head(model, gamma: int, states: torch.Tensor, most_requests: int) -> HeadGraphs | None:
    """Graphs of the head that were compared with the eager head; None, and a line in the log, where that failed."""
    try:
        graphs = HeadGraphs(model, gamma, states, most_requests)
        graphs.capture_all()
        if graphs.agrees():
            return graphs
        reason = "replayed blocks differ from eager ones"
    except (RuntimeError, ValueError) as error:
        reason = str(error)
    logger.warning("the draft's head runs without CUDA graphs: %s", reason)
    return None
