"""A model of acceptance for the simulator: the paper's rates by position, hard and easy requests, an imperfect head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .calibration import sigmoid

# Conditional acceptance by position: DSpark drafts of Qwen3-4B (paper, Fig. 2, from its vector paths), and a draft for
# SmolLM2-135M that this project trained on a CPU (T = 1, all texts).
TABLES: dict[str, tuple[float, ...]] = {
    "math": (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
    "code": (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
    "chat": (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
    "demo": (0.34, 0.35, 0.38, 0.43, 0.39),
}
SAMPLE = 12000


@dataclass(frozen=True)
class Acceptance:
    """Who accepts how much, and how well the confidence head knows it.

    The acceptance probability of a drafted token is σ(b_k + u + e): b_k puts the mean at risk on the table, u is the
    request's own easiness, e the token's. The head sees the same sum through noise.

    Attributes:
        domains: tables of TABLES, equally likely for a request; all of one length.
        request_spread, token_spread: standard deviations of u and e, in logits.
        auc: of the conditional confidence, token against token (position 1).
        context_auc: of a head that reads the hidden state alone (policy `ahead`).
        overconfidence: factor on the calibrated logit; 1 is calibrated, above 1 too sure.

    Raises:
        ValueError: unknown domain, tables of different length, or an AUC that the spread cannot give.
    """

    domains: tuple[str, ...] = ("math", "code", "chat")
    request_spread: float = 0.8
    token_spread: float = 2.4
    auc: float = 0.82
    context_auc: float = 0.78
    overconfidence: float = 1.3

    def __post_init__(self) -> None:
        unknown = [name for name in self.domains if name not in TABLES]
        if unknown or not self.domains:
            raise ValueError(f"unknown domains {unknown}: choose from {sorted(TABLES)}")
        if len({len(TABLES[name]) for name in self.domains}) > 1:
            raise ValueError(f"domains {self.domains} have tables of different length")

    @property
    def gamma(self) -> int:
        """Positions of the tables."""
        return len(TABLES[self.domains[0]])


class AcceptanceSampler:
    """Draws blocks under an `Acceptance`. Its constants are solved on a fixed sample when it is made.

    Args:
        model: what to draw.
    """

    def __init__(self, model: Acceptance) -> None:
        self.model = model
        rng = np.random.default_rng(0)
        easiness = rng.normal(0.0, model.request_spread, SAMPLE)
        noise = rng.normal(0.0, model.token_spread, (SAMPLE, model.gamma))
        self.intercepts = np.stack([_intercepts(TABLES[name], easiness, noise) for name in model.domains])
        domain = np.arange(SAMPLE) % len(model.domains)
        logits = self.intercepts[domain] + easiness[:, None] + noise
        head = rng.standard_normal((SAMPLE, model.gamma))
        self._blur = [_blur_for(auc, logits[:, 0], head[:, 0]) for auc in (model.auc, model.context_auc)]
        self._heads = [_calibrated_head(logits, logits + blur * head) for blur in self._blur]
        self.mean_survival = np.cumprod(sigmoid(logits), axis=1).mean(axis=0)

    def blocks(self, domain: np.ndarray, easiness: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """One block per request.

        Args:
            domain: [R] index into the domains.
            easiness: [R] u of each request.
            rng: source of numbers; takes the same amount from it for the same R.

        Returns:
            (probability, logits, context_logits), each [R, γ]: the true conditional acceptance, what the head says, and
            what a head without drafted tokens says.
        """
        shape = (len(domain), self.model.gamma)
        truth = self.intercepts[domain] + easiness[:, None] + self.model.token_spread * rng.standard_normal(shape)
        seen = [
            self.model.overconfidence * (slope * (truth + blur * rng.standard_normal(shape)) + shift)
            for blur, (slope, shift) in zip(self._blur, self._heads)
        ]
        return sigmoid(truth), *seen


@lru_cache(maxsize=16)
def sampler_of(model: Acceptance) -> AcceptanceSampler:
    """The sampler of a model; made once per process, since solving its constants takes a while."""
    return AcceptanceSampler(model)


def _intercepts(table: tuple[float, ...], easiness: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """b_k such that the mean acceptance of blocks accepted so far is the table's (the easy ones survive longer)."""
    alive, found = np.ones(len(easiness)), []
    for k, rate in enumerate(table):
        low, high = -10.0, 20.0
        for _ in range(28):
            middle = (low + high) / 2
            chance = sigmoid(middle + easiness + noise[:, k])
            low, high = (middle, high) if (alive * chance).sum() < rate * alive.sum() else (low, middle)
        found.append(middle)
        alive = alive * chance
    return np.array(found)


def soft_auc(score: np.ndarray, probability: np.ndarray) -> float:
    """Chance that an accepted token scores above a rejected one, when each is accepted with its own probability."""
    order = np.argsort(score)
    accepted = probability[order]
    rejected_below = np.cumsum(1 - accepted) - (1 - accepted) / 2
    return float((accepted * rejected_below).sum() / (accepted.sum() * (1 - accepted).sum()))


def _blur_for(auc: float, logits: np.ndarray, noise: np.ndarray) -> float:
    """Deviation of the noise at which a head that sees logits + noise has this AUC."""
    probability = sigmoid(logits)
    best = soft_auc(logits, probability)
    if not 0.5 < auc <= best:
        raise ValueError(f"an AUC of {auc} is out of reach: 0.5 to {best:.3f} with this spread")
    low, high = 0.0, 200.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if soft_auc(logits + middle * noise, probability) > auc else (low, middle)
    return low


def _calibrated_head(truth: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope and shift [γ] that make σ(slope·seen + shift) calibrated at each position, for blocks at risk there."""
    probability = sigmoid(truth)
    alive = np.cumprod(np.column_stack([np.ones(len(truth)), probability[:, :-1]]), axis=1)
    slope, shift = np.full(truth.shape[1], 0.5), np.zeros(truth.shape[1])
    for _ in range(25):
        p = sigmoid(slope * seen + shift)
        error, weight = alive * (probability - p), alive * p * (1 - p)
        a, b, d = (weight * seen * seen).sum(0), (weight * seen).sum(0), weight.sum(0)
        g, h = (error * seen).sum(0), error.sum(0)
        slope = slope + np.clip((d * g - b * h) / (a * d - b * b), -1, 1)
        shift = shift + np.clip((a * h - b * g) / (a * d - b * b), -1, 1)
    return slope, shift
