"""One law for the target's p and the draft's q: temperature, then top-k, top-p and min-p, jointly, as SGLang does.

In SGLang's torch sampler the filters all look at the softmax of logits / temperature, sorted in descending order:
a token survives if its rank is below top_k, if the mass *before* it is at most top_p, and if its probability is at
least min_p times the largest. What survives is renormalised. SGLang leaves the order of equal probabilities to the
sort; here the smaller token id comes first, so the law is a function of the logits alone.

Stated behaviour at the edges:
* a NaN logit is a masked token (-inf); +inf is the largest finite float32, so several +inf share the row;
* a row without any unmasked token is one-hot at token 0 (what argmax gives; SGLang would draw from a uniform row);
* temperature 0 (SGLang writes it as top_k == 1) is one-hot at the first argmax.
"""

from __future__ import annotations

import torch

from .backend import use_triton
from .filters import BLOCK, filter_rows
from .types import TOP_K_ALL, SamplingRows


def probabilities_reference(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list:
    """The law of one row on Python floats, in the order of the module's docstring."""
    import math

    logits = [-math.inf if math.isnan(x) else min(x, torch.finfo(torch.float32).max) for x in logits]
    best = max(range(len(logits)), key=lambda i: (logits[i], -i))
    if temperature < 1e-6 or top_k == 1 or logits[best] == -math.inf:
        return [float(i == best) for i in range(len(logits))]
    weights = [math.exp((x - logits[best]) / temperature) for x in logits]
    softmax = [w / sum(weights) for w in weights]
    kept, mass, law = 0, 0.0, [0.0] * len(logits)
    for token in sorted(range(len(logits)), key=lambda i: (-softmax[i], i)):
        top_k_keeps = top_k <= 0 or kept < top_k
        if top_k_keeps and (top_p >= 1 or mass <= top_p) and softmax[token] >= min_p * softmax[best]:
            law[token] = softmax[token]
        kept, mass = kept + 1, mass + softmax[token]
    return [x / sum(law) for x in law]


def probabilities(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The law each row is sampled from.

    Args:
        logits: [N, V], any float dtype; penalties and grammar masks (-inf) already applied. Not modified.
        rows: N rows of parameters.
    Returns:
        float32 [N, V], each row summing to 1 within rounding; greedy rows are one-hot.
    """
    return _law(logits, rows, normalise=True)


def filtered_weights(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """As `probabilities`, without renormalising what the filters kept: float32 [N, V].

    Bit for bit a function of the row alone (a masked sum may round differently in another batch), which is what the
    seeded sampler needs; its argmax does not care for a common factor.
    """
    return _law(logits, rows, normalise=False)


def _law(logits: torch.Tensor, rows: SamplingRows, normalise: bool) -> torch.Tensor:
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits {tuple(logits.shape)} do not match {len(rows)} rows of sampling parameters")
    if rows.all_greedy:
        return one_hot(first_argmax(logits), logits.shape[1])
    if use_triton(logits):
        from .sampling_triton import law_triton

        return law_triton(logits, rows, normalise)
    return _law_torch(logits, rows, normalise)


def _law_torch(logits: torch.Tensor, rows: SamplingRows, normalise: bool) -> torch.Tensor:
    scaled = logits.to(torch.float32) / rows.temperature[:, None] if rows.any_temperature else logits
    p = torch.softmax(scaled, dim=-1, dtype=torch.float32)
    # A NaN or +inf logit, or a row of -inf, makes the whole row of its softmax NaN: one column tells.
    broken = torch.nonzero(p[:, 0].isnan()).flatten()
    if broken.numel():
        p[broken] = careful_softmax(logits[broken], rows.temperature[broken])
    if rows.any_filter:
        filtered = ~rows.greedy & ((rows.top_k < TOP_K_ALL) | (rows.top_p < 1) | (rows.min_p > 0))
        index = torch.nonzero(filtered).flatten()
        everything = index.numel() == p.shape[0]
        if index.numel():
            kept = filter_rows(p if everything else p[index], rows.top_k[index], rows.top_p[index], rows.min_p[index])
            if normalise:
                kept /= kept.sum(dim=-1, keepdim=True)
            p = kept if everything else p.index_copy_(0, index, kept)
    if rows.any_greedy:
        index = torch.nonzero(rows.greedy).flatten()
        p[index] = one_hot(first_argmax(logits[index]), p.shape[1])
    return p


def careful_softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Softmax of rows with NaN (masked), +inf (largest float) or no finite logit (one-hot at token 0)."""
    largest = torch.finfo(torch.float32).max
    x = torch.nan_to_num(logits.to(torch.float32), nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    top = x.amax(dim=-1, keepdim=True)
    x = torch.where((top == -torch.inf) & (torch.arange(x.shape[1], device=x.device) == 0), 0.0, x)
    # Subtract before dividing: the largest float divided by a temperature below 1 would be inf again.
    return torch.softmax((x - x.amax(dim=-1, keepdim=True)) / temperature[:, None], dim=-1)


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the first maximum of each row of [N, V], a NaN being the smallest: int64 [N]."""
    if use_triton(logits):
        from .sampling_triton import argmax_triton

        return argmax_triton(logits)
    x = logits.to(torch.float32)
    best = _argmax_by_blocks(x) if x.shape[1] % BLOCK == 0 and x.is_contiguous() else torch.argmax(x, dim=-1)
    broken = x.gather(-1, best[:, None])[:, 0].isnan()  # torch takes a NaN for the maximum
    if bool(broken.any()):
        best[broken] = torch.argmax(torch.nan_to_num(x[broken], nan=-torch.inf, posinf=torch.inf), dim=-1)
    return best


def _argmax_by_blocks(x: torch.Tensor) -> torch.Tensor:
    """First argmax of contiguous [N, V], V a multiple of BLOCK: the maximum of a row vectorises, its index does not."""
    blocks = x.view(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    block = torch.argmax(blocks.amax(dim=-1), dim=-1)
    inside = torch.argmax(blocks[torch.arange(len(block), device=x.device), block], dim=-1)
    return block * BLOCK + inside


def one_hot(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """float32 [N, V] with a one at each row's token."""
    return torch.zeros(tokens.shape[0], vocab, device=tokens.device).scatter_(1, tokens[:, None], 1.0)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token per row by inverse CDF with one uniform: bit for bit the law that `weights` records.

    Args:
        weights: float32 [N, C], non-negative, at least one positive per row; need not be normalised.
        uniforms: float64 [N] in [0, 1).
    Returns:
        int64 [N] columns; never one whose weight is zero.
    """
    if use_triton(weights):
        from .sampling_triton import draw_triton

        return draw_triton(weights, uniforms)
    cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    target = uniforms[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)
    # The first column above the target has a positive weight; only a product rounded up to the total passes the end.
    return torch.minimum(drawn, last_positive(weights) if bool((drawn == weights.shape[1]).any()) else drawn)[:, 0]


def last_positive(weights: torch.Tensor) -> torch.Tensor:
    """Column of the last positive weight in each row: int64 [N, 1]."""
    return weights.shape[1] - 1 - (weights.flip(-1) > 0).to(torch.int8).argmax(dim=-1, keepdim=True)
