"""The training loss (paper Eq. 8-12) with its gradient written out, so that full logits are never kept.

Per drafted slot: ce·(-log p_d(x*)) + tv·‖p_d - p_t‖₁ + BCE(c, 1 - ½‖p_d - p_t‖₁), each a weighted mean with weights
exp(-(k-1)/decay) over valid slots. Rows are processed in chunks; the logits' gradient is formed and multiplied back at
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 256


@dataclass(frozen=True)
class LossWeights:
    """Factors of the cross-entropy and of the total-variation term; ``measure`` asks for the argmaxes too (costs 3
    %).
    """

    ce: float
    tv: float
    measure: bool = False


class DistributionLoss(torch.autograd.Function):
    """CE and TV of N slots, and each slot's overlap with the target.

    Inputs: hidden [N, d], latents [N, r] or None, lm_head [Vd, d] (frozen), w2 [Vd, r] or None; final [N, d] the
    target's
    hidden states, log_totals [N] float32 of its logits over its whole vocabulary; labels [N] int64 into the draft's
    vocabulary (-1: not proposable, no CE); weights [N] float32, already divided by their sum; factors.
    Outputs: the scalar loss, overlap [N] = Σ min(p_d, p_t) (not differentiated), and whether the argmaxes agree [N].
    """

    @staticmethod
    def forward(ctx, hidden, latents, lm_head, w2, final, log_totals, labels, weights, factors):
        inputs = hidden if latents is None else torch.cat([hidden, latents.to(hidden.dtype)], -1)
        matrix = lm_head if w2 is None else torch.cat([lm_head, w2.to(lm_head.dtype)], -1)
        n, d = hidden.shape
        grad_inputs = torch.empty_like(inputs)
        grad_w2 = None if w2 is None else torch.zeros(w2.shape, dtype=torch.float32, device=w2.device)
        overlap, agree = torch.empty(n, device=hidden.device), torch.empty(n, dtype=torch.bool, device=hidden.device)
        loss = torch.zeros((), device=hidden.device)
        for start in range(0, n, CHUNK):
            rows = slice(start, start + CHUNK)
            part = _chunk(
                F.linear(inputs[rows], matrix).float(),
                F.linear(final[rows], lm_head).float(),
                log_totals[rows],
                labels[rows],
                weights[rows],
                factors,
            )
            loss += part.loss
            overlap[rows], agree[rows] = part.overlap, part.agree
            gradient = part.gradient.to(inputs.dtype)
            grad_inputs[rows] = gradient @ matrix
            if grad_w2 is not None:
                grad_w2 += (gradient.T @ inputs[rows, d:]).float()
        ctx.save_for_backward(grad_inputs, grad_w2)
        ctx.d, ctx.latent_dtype = d, None if latents is None else latents.dtype
        ctx.mark_non_differentiable(overlap, agree)
        return loss, overlap, agree

    @staticmethod
    def backward(ctx, grad_loss, _overlap, _agree):
        grad_inputs, grad_w2 = ctx.saved_tensors
        hidden = grad_inputs[:, : ctx.d] * grad_loss.to(grad_inputs.dtype)
        if grad_w2 is None:
            return hidden, None, None, None, None, None, None, None, None
        latents = (grad_inputs[:, ctx.d :] * grad_loss.to(grad_inputs.dtype)).to(ctx.latent_dtype)
        return hidden, latents, None, grad_w2 * grad_loss, None, None, None, None, None


@dataclass
class _Part:
    loss: torch.Tensor
    overlap: torch.Tensor
    agree: torch.Tensor
    gradient: torch.Tensor


def _chunk(logits, target_logits, log_totals, labels, weights, factors: LossWeights) -> _Part:
    """Loss, overlap and d loss / d logits of a few rows. The target's mass outside the support counts as distance."""
    known = labels >= 0
    safe = labels.clamp_min(0)[:, None]
    agree = logits.argmax(-1) == target_logits.argmax(-1) if factors.measure else torch.zeros_like(known)
    log_normaliser = logits.logsumexp(-1)
    log_label = logits.gather(1, safe)[:, 0] - log_normaliser
    p = logits.sub_(log_normaliser[:, None]).exp_()
    q = target_logits.sub_(log_totals[:, None]).exp_()
    outside = (1 - q.sum(-1)).clamp_min_(0)
    difference = p - q
    distance = difference.abs().sum(-1) + outside
    ce_weight = factors.ce * weights * known
    loss = (factors.tv * weights * distance - ce_weight * log_label).sum()
    sign = difference.sign_()
    mean_sign = (p * sign).sum(-1, keepdim=True)
    gradient = sign.sub_(mean_sign).mul_((factors.tv * weights)[:, None]).add_(ce_weight[:, None]).mul_(p)
    gradient.scatter_add_(1, safe, -ce_weight[:, None])
    return _Part(loss, 1 - 0.5 * distance, agree, gradient)


def confidence_loss(logits: torch.Tensor, overlap: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ w · BCE(σ(logit), overlap): logits, overlap, weights [N], weights already divided by their sum."""
    losses = F.binary_cross_entropy_with_logits(logits.float(), overlap.clamp(0, 1), reduction="none")
    return (losses * weights).sum()


def expected_length(overlap: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """1 + Σ_k Π_{i≤k} overlap_i for blocks [A, γ]; slots past a sequence's end count as rejected -> [A]."""
    return 1 + (overlap * valid).cumprod(-1).sum(-1)
