"""The sequential heads (paper Eq. 4-6; gated from DeepSpec's code) and the confidence head (Eq. 7), in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dspark.models.draft_config import DraftConfig


class VanillaMarkov(nn.Module):
    """B_k = W2 · W1[x_{k-1}]: ``markov_w1.weight`` [V, r] over target ids, ``markov_w2.weight`` [Vd, r] over
    proposable ones.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.support_size, bias=False)

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """W1 of target token ids [...] -> [..., r]."""
        return self.markov_w1(previous)

    def latent(self, previous, hidden, state=None):
        """What W2 multiplies, and the next state: previous [...] target ids, hidden [..., d] -> [..., r], state or
        None.
        """
        return self.embed(previous), None

    def bias(self, previous, hidden, state=None):
        """B_k [..., Vd] and the next state."""
        latent, state = self.latent(previous, hidden, state)
        return self.markov_w2(latent), state

    def block_latents(self, previous: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``latent`` of whole blocks under teacher forcing: previous [..., γ], hidden [..., γ, d] -> [..., γ, r]."""
        return self.latent(previous, hidden)[0]


class GatedMarkov(VanillaMarkov):
    """B_k = W2 (σ(G [h_k; W1[x_{k-1}]] + b) ⊙ W1[x_{k-1}])."""

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, previous, hidden, state=None):
        embedded = self.embed(previous)
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded.to(hidden.dtype)], -1)))
        return gate * embedded, None


class RnnMarkov(VanillaMarkov):
    """z = [s_{k-1}; W1[x_{k-1}]; h_k]; (g, c, o) = J z + b; s_k = σ(g) s_{k-1} + (1-σ(g)) tanh(c); B_k = W2 tanh(o)."""

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def latent(self, previous, hidden, state=None):
        embedded = self.embed(previous)
        state = torch.zeros_like(embedded) if state is None else state
        z = torch.cat([state.to(hidden.dtype), embedded.to(hidden.dtype), hidden], -1)
        gate, candidate, output = self.joint_proj(z).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def block_latents(self, previous, hidden):
        state, latents = None, []
        for k in range(previous.shape[-1]):
            latent, state = self.latent(previous[..., k], hidden[..., k, :], state)
            latents.append(latent)
        return torch.stack(latents, -2)


HEADS = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RnnMarkov}


def make_markov_head(config: DraftConfig) -> VanillaMarkov | None:
    """The head of the config, or None at rank 0 (a DFlash draft)."""
    return HEADS[config.markov_head_type](config) if config.markov_rank else None


class ConfidenceHead(nn.Module):
    """A linear map with bias to one logit: ``proj.weight`` [1, size], ``proj.bias`` [1]."""

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.proj.weight.to(x.dtype), self.proj.bias.to(x.dtype))[..., 0]
