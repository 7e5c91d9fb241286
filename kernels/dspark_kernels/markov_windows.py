"""Sampling only the slots that will be verified: for policies that know every window before the block is drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .markov import VanillaMarkov, draw_column
from .sampling import first_argmax, probabilities
from .types import BlockDraft, RequestRules, SamplingRows, StepNoise


def sample_windows(
    head: VanillaMarkov | None,
    base_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    rows: SamplingRows,
    noise: StepNoise,
    windows: np.ndarray,
    support: torch.Tensor | None = None,
) -> BlockDraft:
    """As `sample_block`, drawing draft k of request r only where k < windows[r].

    What is drawn is the same, token for token: a request's numbers depend on nothing but itself. A slot that is not
    drawn holds token 0 under a law of zeros, which no rule accepts.

    Args:
        base_logits: U of the draft, [n, d] -> float32 [n, C]; it is called on the drawn slots only.
        hidden: [R, k, d], k = windows.max() >= 1. windows: int [R], on the host.
        support: None, or int64 [C] target ids of the columns.
        Others as `sample_block`.
    """
    requests, block = hidden.shape[0], hidden.shape[1]
    inside = np.arange(block) < windows[:, None]
    slots = torch.from_numpy(np.flatnonzero(inside)).to(hidden.device)
    base = base_logits(hidden.reshape(requests * block, -1)[slots])
    where = torch.from_numpy(np.cumsum(inside.reshape(-1)).reshape(inside.shape) - 1)
    tokens = torch.zeros(requests, block, dtype=torch.int64, device=hidden.device)
    columns = torch.zeros_like(tokens)
    probs = None if rows.all_greedy else torch.zeros(requests, block, base.shape[1], device=hidden.device)
    state, previous = None, anchors.clone()
    for k in range(block):
        active = torch.from_numpy(np.flatnonzero(inside[:, k])).to(hidden.device)
        logits = base[where[:, k][active.cpu()].to(hidden.device)]
        if head is not None:
            bias, new_state = head.bias(previous[active], hidden[active, k], _rows_of(state, active))
            logits = logits + bias.float()
            if new_state is not None:
                state = new_state.new_zeros(requests, head.rank) if state is None else state
                state[active] = new_state
        if probs is None:
            column = first_argmax(logits)
        else:
            law = probabilities(logits, rows.expand(active))
            probs[active, k] = law
            column = draw_column(law, _noise_of(noise, active), k, support)
        columns[active, k] = column
        previous[active] = column if support is None else support[column]
        tokens[active, k] = previous[active]
    return BlockDraft(tokens, columns, probs, support)


def _rows_of(state: torch.Tensor | None, active: torch.Tensor) -> torch.Tensor | None:
    return None if state is None else state[active]


def _noise_of(noise: StepNoise, active: torch.Tensor) -> StepNoise:
    """The noise of some requests."""
    chosen = active.tolist()
    if len(chosen) == len(noise.rules.rules):
        return noise
    rules = RequestRules.of([noise.rules.rules[i] for i in chosen], device=active.device)
    coins = None if noise.coins is None else noise.coins.select(active)
    return StepNoise(noise.seeds[active], noise.positions[active], rules, coins)
