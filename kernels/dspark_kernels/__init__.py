"""The device mathematics of DSpark: one law for p and q, Markov sampling, ragged verification, acceptance, graphs.

torch and triton only. Every module holds the plain reference, the torch path (what a CPU runs), and a dispatcher to
the Triton path (what a GPU runs). The rules and the invariants are in docs/design.md.
"""

from __future__ import annotations

from .accept import accept, accept_block, accept_coupled, accept_greedy, accept_token
from .cipher import philox
from .confidence import ConfidenceHead
from .draft import DrawnBlock, draft_block
from .graphs import RaggedGraph, RowBuffer
from .gumbel import race, seeded_sample
from .markov import HEADS, GatedMarkov, RnnMarkov, VanillaMarkov, sample_block
from .memory import step_bytes
from .mixed import sample_rows
from .ragged import RaggedBatch, next_tier
from .random import draw_coins, draw_noise
from .requests import RequestTensors
from .sampling import draw, filtered_weights, first_argmax, probabilities
from .survival import best_tokens, calibrated_survival
from .types import AcceptResult, AcceptRule, BlockDraft, Coins, RequestRules, SamplingRows, StepNoise
from .verified import Verified
from .windows import allocate_windows

__all__ = [
    "HEADS",
    "AcceptResult",
    "AcceptRule",
    "BlockDraft",
    "Coins",
    "ConfidenceHead",
    "DrawnBlock",
    "GatedMarkov",
    "RaggedBatch",
    "RaggedGraph",
    "RequestRules",
    "RequestTensors",
    "RnnMarkov",
    "RowBuffer",
    "SamplingRows",
    "StepNoise",
    "VanillaMarkov",
    "Verified",
    "accept",
    "accept_block",
    "accept_coupled",
    "accept_greedy",
    "accept_token",
    "allocate_windows",
    "best_tokens",
    "calibrated_survival",
    "draft_block",
    "draw",
    "draw_coins",
    "draw_noise",
    "filtered_weights",
    "first_argmax",
    "next_tier",
    "philox",
    "probabilities",
    "race",
    "sample_block",
    "sample_rows",
    "seeded_sample",
    "step_bytes",
]
