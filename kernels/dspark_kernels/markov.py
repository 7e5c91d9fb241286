"""Markov heads and left-to-right sampling of a block: p_k = softmax(U_k + B_k(x_0, x_<k)) (DSpark, Eq. 4-6).

U_k are the draft backbone's logits for the whole block, made in parallel; the head adds a bias that knows the token
just drawn. Parameter names are DeepSpec's, so its checkpoints load as they are. The draft may propose from a support
smaller than the target's vocabulary: q is exact on it and zero elsewhere.
"""

from __future__ import annotations

import torch
from torch import nn

from .gumbel import race
from .sampling import draw, first_argmax, probabilities
from .types import AcceptRule, BlockDraft, SamplingRows, StepNoise

State = torch.Tensor | None


class VanillaMarkov(nn.Module):
    """B_k = W2 · W1[x_{k-1}] (Eq. 5).

    Args:
        vocab_size: V, rows of W1 (any target token may be the previous one). rank: r. hidden_size: d (unused here).
        draft_vocab_size: Vd, rows of W2; None is V.
    """

    kind = "vanilla"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int = 0, draft_vocab_size: int | None = None):
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)

    def latent(self, embedding: torch.Tensor, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """What W2 multiplies, [..., r], and the state after this position (None: the head has none).

        Args:
            embedding: [..., r], W1[x_{k-1}]. hidden: [..., d], h_k. state: what the last position returned, None first.
        """
        return embedding, state

    def bias(self, prev_tokens: torch.Tensor, hidden: torch.Tensor, state: State = None) -> tuple[torch.Tensor, State]:
        """B_k for one position.

        Args:
            prev_tokens: int64 [...] target ids of x_{k-1}; hidden: [..., d] h_k; state: what the last call returned.
        Returns:
            ([..., Vd] bias in the parameters' dtype, next state).
        """
        latent, state = self.latent(self.markov_w1(prev_tokens), hidden, state)
        return self.markov_w2(latent), state

    def block_latents(self, prev_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`latent` of whole blocks under teacher forcing: int64 [..., γ] and [..., γ, d] -> [..., γ, r]."""
        return self.latent(self.markov_w1(prev_tokens), hidden, None)[0]


class GatedMarkov(VanillaMarkov):
    """B_k = W2 (σ(G [h_k ; W1[x_{k-1}]] + b) ⊙ W1[x_{k-1}]) (DeepSpec's code; no equation of DSpark)."""

    kind = "gated"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None = None):
        super().__init__(vocab_size, rank, hidden_size, draft_vocab_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def latent(self, embedding: torch.Tensor, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The gated embedding [..., rank] of one slot; the state passes through unread."""
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden.to(embedding.dtype), embedding), dim=-1)))
        return gate * embedding, state


class RnnMarkov(VanillaMarkov):
    """z = [s ; W1[x_{k-1}] ; h_k]; (g, c, o) = J z + b; s' = σ(g) s + (1 - σ(g)) tanh(c); B_k = W2 tanh(o) (Eq. 6)."""

    kind = "rnn"

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None = None):
        super().__init__(vocab_size, rank, hidden_size, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def latent(self, embedding: torch.Tensor, hidden: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The latent [..., rank] of one slot and the next state; a state of None is zeros."""
        state = torch.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(torch.cat((state, embedding, hidden.to(embedding.dtype)), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def block_latents(self, prev_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Latents [..., k, rank] of a block of k slots, one after the other, from a state of zeros."""
        state, latents = None, []
        for embedding, h in zip(self.markov_w1(prev_tokens).unbind(-2), hidden.unbind(-2), strict=True):
            latent, state = self.latent(embedding, h, state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


HEADS = {head.kind: head for head in (VanillaMarkov, GatedMarkov, RnnMarkov)}


def sample_block(
    head: VanillaMarkov | None,
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    rows: SamplingRows,
    noise: StepNoise,
    support: torch.Tensor | None = None,
) -> BlockDraft:
    """Draw a block of k tokens per request, left to right, and record the law of each.

    Args:
        head: the Markov head; None for a draft without one (DFlash): then q_k = softmax(U_k).
        base_logits: [R, k, C] U_k on the support; k <= γ is the number of tokens to draw.
        hidden: [R, k, d] post-norm hidden states. anchors: int64 [R], target ids of x_0.
        rows: R sampling parameters. noise: this step's.
        support: target ids of the C columns: None (C = V) or int64 [C].
    Returns:
        The block; greedy requests have one-hot laws, and a batch of greedy requests records none.
    Source: DSpark, Eq. 4; support restriction: none (q stays an exact law, so nothing else changes).
    """
    requests, block, _ = base_logits.shape
    tokens = torch.empty(requests, block, dtype=torch.int64, device=base_logits.device)
    columns = torch.empty_like(tokens)
    probs = None
    if not rows.all_greedy:
        probs = torch.empty(base_logits.shape, dtype=torch.float32, device=base_logits.device)
    state, previous = None, anchors
    for k in range(block):
        logits = base_logits[:, k].float()
        if head is not None:
            bias, state = head.bias(previous, hidden[:, k], state)
            logits = logits + bias.float()
        if probs is None:
            column = first_argmax(logits)
        else:
            probs[:, k] = probabilities(logits, rows)
            column = draw_column(probs[:, k], noise, k, support)
        columns[:, k] = column
        previous = column if support is None else support[column]
        tokens[:, k] = previous
    return BlockDraft(tokens, columns, probs, support)


def draw_column(q: torch.Tensor, noise: StepNoise, k: int, support: torch.Tensor | None) -> torch.Tensor:
    """One column per request: by inverse CDF on the recorded q, or by the target's own noise where `coupled`."""
    column = draw(q, noise.coins.draft[:, k]) if noise.coins is not None else q.argmax(dim=-1)
    coupled = noise.rules.groups.get(AcceptRule.COUPLED)
    if coupled is not None:
        column[coupled] = race(q[coupled], noise.seeds[coupled], noise.positions[coupled] + 1 + k, support)
    return column
