"""One token per row where rows follow different rules, without index groups: the same work whatever the batch holds.

Groups of indices are quicker on a CPU, but their sizes are host numbers; a captured graph and a GPU's step take these.
The torch path is the twin of the Triton path and can be captured on any device: no shape in it depends on a value.
"""

from __future__ import annotations

import torch

from .backend import use_triton
from .filters import keep
from .gumbel import exponential, noise_bits, noise_keys, race, token_hashes
from .requests import RequestTensors
from .sampling import careful_softmax, draw, filtered_weights, first_argmax, last_positive, one_hot, probabilities
from .types import TOP_K_ALL, AcceptRule, SamplingRows, StepNoise


def sample_rows(logits: torch.Tensor, rows: SamplingRows, noise: StepNoise) -> torch.Tensor:
    """One token per request as plain decoding samples it: argmax, the seeded race, or one uniform.

    Args:
        logits: [R, V], any float dtype, penalties and masks applied. rows: R parameters. noise: the step's.
    Returns:
        int64 [R] token ids, each at its request's position + 1.
    """
    rules = noise.rules
    if rules.only(AcceptRule.GREEDY):
        return first_argmax(logits)
    if use_triton(logits):
        law = mixed_law(logits, rows, rules.rule, coupled_raw=True)
        uniforms = (
            noise.seeds.new_zeros(len(logits), 1, dtype=torch.float64) if noise.coins is None else noise.coins.final
        )
        return mixed_draw(logits, law, rules.rule, uniforms, noise.seeds, noise.positions, 0)
    if noise.coins is None:
        tokens = first_argmax(logits)
    else:
        tokens = draw(probabilities(logits, rows), noise.coins.final[:, 0])
    seeded = rules.groups.get(AcceptRule.COUPLED)
    if seeded is not None:
        weights = filtered_weights(logits[seeded], rows.expand(seeded))
        tokens[seeded] = race(weights, noise.seeds[seeded], noise.positions[seeded] + 1)
    return tokens


def mixed_law(
    logits: torch.Tensor,
    rows: RequestTensors | SamplingRows,
    rule: torch.Tensor,
    coupled_raw: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The law of each row: float32 [N, C].

    Args:
        logits: [N, C], any float dtype. rows: N parameters. rule: int32 [N], an `AcceptRule` each.
        coupled_raw: coupled rows are not renormalised, which is how the seeded sampler has them.
        out: where to write; its rows may lie apart. Rows of the greedy rule may stay unwritten: nobody reads their law.
    """
    coupled, greedy = rule == AcceptRule.COUPLED, rule == AcceptRule.GREEDY
    if use_triton(logits):
        from .sampling_triton import NORMALISED, RAW, SKIP, law_triton

        mode = torch.where(coupled, RAW if coupled_raw else NORMALISED, NORMALISED)
        return law_triton(logits, rows, True, mode=torch.where(greedy, SKIP, mode).to(torch.int32), out=out)
    law = _law(logits, rows, coupled if coupled_raw else torch.zeros_like(coupled))
    return law if out is None else out.copy_(law)


def _law(logits: torch.Tensor, rows: RequestTensors | SamplingRows, raw: torch.Tensor) -> torch.Tensor:
    """`probabilities`, or `filtered_weights` where `raw`, with every row taking every path."""
    p = torch.softmax(logits.to(torch.float32) / rows.temperature[:, None], dim=-1)
    p = torch.where(p[:, :1].isnan(), careful_softmax(logits, rows.temperature), p)
    p = keep(p, rows.top_k, rows.top_p, rows.min_p)
    filtered = (rows.top_k < TOP_K_ALL) | (rows.top_p < 1) | (rows.min_p > 0)
    p = torch.where((filtered & ~raw)[:, None], p / p.sum(dim=-1, keepdim=True), p)
    return torch.where(rows.greedy[:, None], one_hot(_argmax(logits), p.shape[1]), p)


def mixed_draw(
    logits: torch.Tensor,
    law: torch.Tensor,
    rule: torch.Tensor,
    uniforms: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    k: int,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The column that each row draws by its own rule: int64 [N].

    Args:
        logits: [N, C], read for greedy rows. law: float32 [N, C], read for all others. rule: int32 [N].
        uniforms: float64 [N, n], of which column k is spent by token and block rows. seeds: int64 [N].
        positions: int64 [N], of the anchor: coupled rows draw the token at position + 1 + k.
        token_ids: None where column = token id, else int64 [C].
    """
    if use_triton(law):
        from .mixed_triton import mixed_draw_triton

        return mixed_draw_triton(logits, law, rule, uniforms, seeds, positions, k, token_ids)
    hashes = token_hashes(law.shape[1], token_ids, law.device)
    score = law / exponential(noise_bits(noise_keys(seeds, positions + 1 + k), hashes))
    cumulative = torch.cumsum(law, dim=-1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, uniforms[:, k : k + 1] * cumulative[:, -1:], right=True)
    drawn = torch.minimum(drawn, last_positive(law))[:, 0]
    drawn = torch.where(rule == AcceptRule.COUPLED, score.argmax(dim=-1), drawn)
    return torch.where(rule == AcceptRule.GREEDY, _argmax(logits), drawn)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """`first_argmax` without looking for a NaN first: int64 [N]."""
    return torch.nan_to_num(logits.to(torch.float32), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(
        dim=-1
    )
