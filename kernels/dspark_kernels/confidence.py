"""The confidence head: the log-odds that a drafted token is accepted, given that all before it were (DSpark, Eq. 7)."""

from __future__ import annotations

import torch
from torch import nn


class ConfidenceHead(nn.Module):
    """c_k = σ(wᵀ [h_k ; W1[x_{k-1}]] + b), or of h_k alone. Parameters `proj.weight` [1, d (+ r)] and `proj.bias`.

    Args:
        hidden_size: d. markov_rank: r if the head reads the previous token's Markov embedding, else 0 (then survival is
            known before any token of the block is sampled). bias: DeepSpec's code has one; V4 checkpoints do not.
    """

    def __init__(self, hidden_size: int, markov_rank: int = 0, bias: bool = True):
        super().__init__()
        self.hidden_size, self.markov_rank = hidden_size, markov_rank
        self.proj = nn.Linear(hidden_size + markov_rank, 1, bias=bias)

    @property
    def reads_tokens(self) -> bool:
        """True if the confidence at k depends on the token drafted at k-1."""
        return self.markov_rank > 0

    def forward(self, hidden: torch.Tensor, prev_embedding: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of acceptance.

        Args:
            hidden: [..., d], the draft's post-norm hidden states (what its lm_head reads).
            prev_embedding: [..., r], W1 of the token *before* each slot (the anchor first); None without Markov rank.
        Returns:
            float32 [...] logits, before calibration.
        Raises:
            ValueError: an embedding is missing or not wanted.
        """
        if (prev_embedding is not None) != self.reads_tokens:
            raise ValueError("prev_embedding must be given exactly when the head has a Markov rank")
        weight = self.proj.weight[0].to(hidden.dtype)
        logits = hidden @ weight[: self.hidden_size]
        if prev_embedding is not None:  # two dot products instead of a concatenation
            logits = logits + prev_embedding.to(weight.dtype) @ weight[self.hidden_size :]
        if self.proj.bias is not None:
            logits = logits + self.proj.bias
        return logits.float()


def block_confidence(draft, states: torch.Tensor, anchors: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits float32 [R, k] that draft k is accepted given that all before it were, for k drafted tokens.

    Args:
        draft: its `confidence_head` and `markov_head` are read. states: [R, gamma, d] of the block, gamma >= k.
        anchors: int64 [R]. tokens: int64 [R, k].
    """
    head, states = draft.confidence_head, states[:, : tokens.shape[1]]
    if not head.reads_tokens:
        return head(states)
    previous = torch.cat([anchors.unsqueeze(1), tokens[:, :-1]], dim=1)
    return head(states, draft.markov_head.markov_w1(previous))


def confidence_reference(hidden: torch.Tensor, prev_embedding: torch.Tensor, weight: torch.Tensor, bias: float):
    """Eq. 7 literally, for one request: [k, d], [k, r], [d + r] -> [k] logits."""
    return torch.stack([weight @ torch.cat((h, e)) + bias for h, e in zip(hidden, prev_embedding, strict=True)])
