"""Acceptance: which drafted tokens are committed, and the token that follows them.

Four rules, each a short function over one group of requests (`Group`): `accept_greedy`, `accept_token`,
`accept_block`, `accept_coupled`. `accept` splits a batch by rule and merges the results.

A window w <= k is a *truncation of what is emitted*: under the greedy, token and coupled rules the token at the bonus
row w < k is judged on the drafted x_{w+1} like any other, so what a window emits is a prefix of what the full block
emits. Under the block rule the window itself is the block that is judged, and the bonus comes from the target.
Notation: p is the target's law at a row, q the draft's, x the drafted token, u a uniform coin; row j of a request
follows the anchor and j drafts, so row j judges draft j (counting from 0) and row w is the bonus row.
"""

from __future__ import annotations

import torch

from .backend import use_triton
from .gumbel import race
from .sampling import draw, filtered_weights, first_argmax, probabilities
from .types import AcceptResult, AcceptRule
from .verified import Group, Verified


def accept(verified: Verified) -> AcceptResult:
    """Judge a verified batch: AcceptResult of its R requests.

    Source: each rule names its own.
    """
    if use_triton(verified.logits):
        from .accept_triton import accept_triton

        return accept_triton(verified)
    return accept_torch(verified)


def accept_torch(verified: Verified) -> AcceptResult:
    """The torch path of `accept`: by rule, a few requests at a time."""
    requests, block = verified.draft.tokens.shape
    device = verified.logits.device
    result = AcceptResult(
        torch.empty(requests, dtype=torch.int64, device=device),
        torch.empty(requests, block + 1, dtype=torch.int64, device=device),
        torch.empty(requests, block, dtype=torch.float32, device=device),
    )
    for rule, members in verified.noise.rules.groups.items():
        for some, group in verified.parts(members):
            judged = RULES[rule](group)
            for name in ("lengths", "tokens", "acceptance"):
                getattr(result, name)[some] = getattr(judged, name)
    return result


def accept_greedy(group: Group) -> AcceptResult:
    """Temperature 0: a draft is accepted while it is the target's argmax; the first argmax that differs ends the block.

    Emits exactly what plain greedy decoding emits. Σ min(p, q) of two one-hot laws is 1 or 0.
    """
    return _follow(group, first_argmax(group.logits), label=True)


def accept_coupled(group: Group) -> AcceptResult:
    """Seeded requests: every row emits y = argmax(log p + g), g a hash of (seed, position, token id); a draft is
    accepted while it equals y. So the text is the seeded sampler's own, whatever was drafted (docs/design.md, rules).
    """
    positions = group.positions[group.request] + 1 + group.column
    y = race(filtered_weights(group.logits, group.rows), group.seeds[group.request], positions)
    return _follow(group, y, label=False)


def _follow(group: Group, y: torch.Tensor, label: bool) -> AcceptResult:
    """Commit the target's own tokens y [m] up to and including the first that the draft missed, or the bonus row."""
    emitted = y[group.row(torch.arange(group.draft.block_size + 1, device=y.device))]
    verified = group.slots < group.windows[:, None]
    hit = emitted[:, :-1] == group.draft.tokens
    lengths = _leading(hit & verified) + 1
    acceptance = torch.where(verified, hit.float() if label else torch.nan, torch.nan)
    return AcceptResult(lengths, _cut(emitted, lengths), acceptance)


def accept_token(group: Group) -> AcceptResult:
    """Token-wise rejection sampling (Leviathan et al. 2023): x is accepted iff u < p(x) / q(x); the first rejection
    draws from (p - q)+, a block accepted to its end from p.
    """
    p = probabilities(group.logits, group.rows)
    px, qx = _on_drafts(group, p)
    # A cap does not spare the bonus row: it is judged too (as long as something was drafted for it).
    judged = group.slots <= group.windows[:, None]
    # A slot behind the window may not have been drawn at all (`sample_windows`): its law is zero, and p is drawn from.
    stop = _leading((group.coins.accept[:, : group.draft.block_size] * qx < px) & judged & (qx > 0))
    ones = torch.ones_like(px)
    final = _draw_final(group, p, stop, torch.nn.functional.pad(ones, (0, 1)))
    # stop == w + 1: the draft at the bonus row was accepted, and is the last token to be emitted.
    last = torch.where(stop > group.windows, group.draft.tokens.gather(1, group.windows[:, None].clamp(
        max=group.draft.block_size - 1))[:, 0], final)  # fmt: skip
    overlap, _ = _overlaps(group, p, None)
    return _commit(group, torch.minimum(stop, group.windows), last, overlap)


def accept_block(group: Group) -> AcceptResult:
    """Block verification (Sun et al. 2024, Algorithm 2) of the window.

    With s_0 = 1 and s_i = min(s_{i-1} p(x_i) / q(x_i), 1), the block is accepted up to the *last* i for which
    u_i < h_i, where h_w = s_w and h_i = S_i / (S_i + 1 - s_i) with the residual mass S_i = Σ (s_i p - q)+ at row i.
    Then a token is drawn from (s_i p - q)+ at row i, or from p if i = w.
    """
    p = probabilities(group.logits, group.rows)
    px, qx = _on_drafts(group, p)
    scale = joint_scales(px, qx)
    overlap, scaled_overlap = _overlaps(group, p, scale)
    threshold = block_thresholds(scale, scaled_overlap)
    threshold = torch.where(group.slots + 1 == group.windows[:, None], scale[:, 1:], threshold)
    passed = (group.coins.accept[:, : group.draft.block_size] < threshold) & (group.slots < group.windows[:, None])
    stop = torch.where(passed, group.slots + 1, 0).amax(dim=1)
    residual_scale = torch.where(torch.arange(scale.shape[1], device=p.device) < group.windows[:, None], scale, 0.0)
    final = _draw_final(group, p, stop, residual_scale)
    return _commit(group, stop, final, overlap)


def joint_scales(px: torch.Tensor, qx: torch.Tensor) -> torch.Tensor:
    """s_0 = 1 and s_i = min(s_{i-1} p(x_i) / q(x_i), 1) of `accept_block`: px, qx float32 [n, k] -> [n, k + 1]."""
    ratio = torch.where(qx > 0, px / qx, 0.0)
    scale = [torch.ones_like(ratio[:, 0])]
    for k in range(ratio.shape[1]):
        scale.append(torch.clamp(scale[-1] * ratio[:, k], max=1.0))
    return torch.stack(scale, dim=1)


def block_thresholds(scale: torch.Tensor, scaled_overlap: torch.Tensor) -> torch.Tensor:
    """h_1 .. h_k of `accept_block` for a window of the whole block, [n, k].

    Args:
        scale: s_0 .. s_k [n, k + 1]. scaled_overlap: Σ min(s_i p, q) at the rows i = 0 .. k - 1, [n, k].
    """
    mass = (scale[:, 1:-1] - scaled_overlap[:, 1:]).clamp(min=0.0)
    slack = 1.0 - scale[:, 1:-1]
    inner = torch.where(mass + slack > 0, mass / (mass + slack), 1.0)  # 0/0: s_i = 1 and p = q, where later ones accept
    return torch.cat((inner, scale[:, -1:]), dim=1)


RULES = {
    AcceptRule.GREEDY: accept_greedy,
    AcceptRule.TOKEN: accept_token,
    AcceptRule.BLOCK: accept_block,
    AcceptRule.COUPLED: accept_coupled,
}


def _leading(ok: torch.Tensor) -> torch.Tensor:
    """Number of leading True in each row of bool [n, k]: int64 [n]."""
    return ok.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _cut(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    column = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(column < lengths[:, None], tokens, 0)


def _commit(group: Group, accepted: torch.Tensor, last: torch.Tensor, overlap: torch.Tensor) -> AcceptResult:
    """`accepted` drafts and the token `last` after them."""
    tokens = torch.nn.functional.pad(group.draft.tokens, (0, 1)).scatter(1, accepted[:, None], last[:, None])
    return AcceptResult(accepted + 1, _cut(tokens, accepted + 1), overlap)


def _on_drafts(group: Group, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """p(x) and q(x) of every drafted token: two float32 [n, k] (past the window p's are meaningless)."""
    px = p[group.row(group.slots), group.draft.tokens]
    return px, group.draft.probs.gather(2, group.draft.columns[..., None])[..., 0]


def _overlaps(group: Group, p: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Σ min(p, q) and Σ min(s p, q) at every verified slot: float32 [n, k], NaN elsewhere."""
    inside = group.slots < group.windows[:, None]
    support = group.draft.support
    on_support = p if support is None else p.index_select(1, support)
    if bool(inside.all()):  # whole windows: views instead of gathers
        on_support, q = on_support.view(*inside.shape[:1], -1, on_support.shape[1])[:, :-1], group.draft.probs
        plain = torch.minimum(on_support, q).sum(dim=-1)
        return plain, None if scale is None else torch.minimum(on_support * scale[:, :-1, None], q).sum(dim=-1)
    request, slot = torch.nonzero(inside, as_tuple=True)
    on_support, q = on_support[group.first[request] + slot], group.draft.probs[request, slot]
    plain = torch.full(inside.shape, torch.nan, device=p.device)
    plain[request, slot] = torch.minimum(on_support, q).sum(dim=-1)
    if scale is None:
        return plain, None
    on_support *= scale[request, slot][:, None]
    scaled = torch.zeros(inside.shape, device=p.device)
    scaled[request, slot] = torch.minimum(on_support, q).sum(dim=-1)
    return plain, scaled


def _draw_final(group: Group, p: torch.Tensor, stop: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A token from (s p - q)+ at row `stop`, where s = scale[., stop]; from p itself where s = 0. int64 [n].

    A residual without mass cannot be stopped at, except by rounding: then s p equals q, and p is drawn from.
    """
    block, requests = group.draft.block_size, torch.arange(len(stop), device=p.device)
    row = group.first + torch.minimum(stop, group.windows)
    slot = stop.clamp(max=block - 1)
    s = scale[requests, stop.clamp(max=block)][:, None]
    weights = p.index_select(0, row)
    if bool((s > 0).any()):
        weights *= torch.where(s > 0, s, 1.0)
        _subtract_(weights, group.draft.probs[requests, slot] * (s > 0), group.draft.support)
        empty = weights.sum(dim=-1) <= 0
        if bool(empty.any()):
            weights[empty] = p[row[empty]]
    return draw(weights, group.coins.final[requests, stop.clamp(max=block)])


def _subtract_(weights: torch.Tensor, q: torch.Tensor, support: torch.Tensor | None) -> None:
    """weights = (weights - q)+ in place; weights [n, V], q [n, C] on its support."""
    if support is None:
        weights.sub_(q).clamp_(min=0.0)
        return
    ids = support.expand(len(q), -1)
    weights.scatter_(1, ids, weights.gather(1, ids).sub_(q).clamp_(min=0.0))
