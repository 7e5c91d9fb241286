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

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .backend import use_triton
from .filters import BLOCK, filter_rows

TOP_K_ALL = 1 << 30  # SGLang's "no top-k"


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of R rows, on the device, with what the host must know to choose a path without a sync.

    Build it with `of` (from host lists) once per change of the batch; `expand` maps requests to ragged rows.

    Fields:
        temperature, top_p, min_p: float32 [R]; top_k: int64 [R]; greedy: bool [R] (temperature 0 or top_k 1).
        all_greedy, any_greedy, any_temperature, any_filter: host booleans. They may be true without need, never
        false against the tensors. any_filter speaks of rows that are not greedy.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    greedy: torch.Tensor
    all_greedy: bool
    any_greedy: bool
    any_temperature: bool
    any_filter: bool

    def __post_init__(self):
        shape = self.temperature.shape
        if len(shape) != 1 or any(t.shape != shape for t in (self.top_k, self.top_p, self.min_p, self.greedy)):
            raise ValueError("sampling parameters must be 1-D tensors of one length")
        if self.all_greedy and self.any_filter:
            raise ValueError("a batch of greedy rows has nothing to filter")

    def __len__(self) -> int:
        return self.temperature.shape[0]

    @classmethod
    def of(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """From host numbers, one per request. None, top_k <= 0 and top_p >= 1 mean "no such filter".

        Raises:
            ValueError: lists of different lengths, a temperature that is negative or not finite, top_p <= 0, or min_p
                outside [0, 1].
        """
        n = len(temperature)
        if any(column is not None and len(column) != n for column in (top_k, top_p, min_p)):
            raise ValueError(f"every parameter needs one value for each of the {n} requests")
        t = torch.tensor(temperature, dtype=torch.float32)
        k = torch.tensor([TOP_K_ALL] * n if top_k is None else top_k, dtype=torch.int64)
        p = torch.tensor([1.0] * n if top_p is None else top_p, dtype=torch.float32)
        m = torch.tensor([0.0] * n if min_p is None else min_p, dtype=torch.float32)
        if not (torch.isfinite(t).all() and (t >= 0).all()):
            raise ValueError(f"temperature must be finite and not negative: {list(temperature)}")
        if not ((p > 0).all() and (m >= 0).all() and (m <= 1).all()):
            raise ValueError("top_p must be above 0 and min_p within [0, 1]")
        k = torch.where(k <= 0, TOP_K_ALL, k)
        greedy = (t < 1e-6) | (k == 1)
        t = torch.where(greedy, 1.0, t)
        filtered = ~greedy & ((k < TOP_K_ALL) | (p < 1) | (m > 0))
        return cls(
            *(x.to(device, non_blocking=True) for x in (t, k, p, m, greedy)),
            all_greedy=bool(greedy.all()),
            any_greedy=bool(greedy.any()),
            any_temperature=bool((t != 1).any()),
            any_filter=bool(filtered.any()),
        )

    def expand(self, rows: torch.Tensor) -> SamplingRows:
        """The parameters of `rows` (int64 [M], request of each row). Host booleans stay those of the batch."""
        names = ("temperature", "top_k", "top_p", "min_p", "greedy")
        picked = {name: getattr(self, name).index_select(0, rows) for name in names}
        return SamplingRows(
            **picked,
            all_greedy=self.all_greedy,
            any_greedy=self.any_greedy,
            any_temperature=self.any_temperature,
            any_filter=self.any_filter,
        )

    def all_sampled(self) -> SamplingRows:
        """The same rows, known to hold no greedy one (a caller that has split the batch by rule)."""
        return SamplingRows(
            self.temperature, self.top_k, self.top_p, self.min_p, self.greedy,
            all_greedy=False, any_greedy=False, any_temperature=self.any_temperature, any_filter=self.any_filter,
        )  # fmt: skip


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
        p[broken] = _careful_softmax(logits[broken], rows.temperature[broken])
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


def _careful_softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
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


def seeded_sample(
    logits: torch.Tensor, rows: SamplingRows, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The plain seeded sampler: argmax(log p + g(seed, position, token id)), p after the filters.

    The law that seeded requests have everywhere: prefill, plain decoding, and the `coupled` rule's verification.

    Args:
        logits: [N, V]; rows: N parameters (greedy rows give their argmax).
        seeds: int64 [N]; positions: int64 [N], absolute position of the token that is drawn.
    Returns:
        int64 [N] token ids.
    """
    from .gumbel import race

    if rows.all_greedy:
        return first_argmax(logits)
    return race(filtered_weights(logits, rows), seeds, positions)
