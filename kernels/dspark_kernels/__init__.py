"""The device mathematics of DSpark: one law for p and q, Markov sampling, ragged verification, acceptance, graphs.

torch and triton only. Every module holds the plain reference, the torch path (what a CPU runs), and a dispatcher to
the Triton path (what a GPU runs); docs/design.md says what they are for.
"""

from __future__ import annotations

from .accept import accept, accept_block, accept_coupled, accept_greedy, accept_token
from .confidence import ConfidenceHead
from .graphs import FixedBuffer, RaggedGraph, RowBuffer
from .gumbel import race
from .markov import HEADS, GatedMarkov, RnnMarkov, VanillaMarkov, sample_block, top_support
from .ragged import RaggedBatch, next_tier
from .random import Coins, draw_coins, philox
from .sampling import SamplingRows, draw, filtered_weights, probabilities, seeded_sample
from .types import AcceptResult, AcceptRule, BlockDraft, RequestRules, StepNoise
from .windows import allocate_windows

__all__ = [
    "HEADS",
    "AcceptResult",
    "AcceptRule",
    "BlockDraft",
    "Coins",
    "ConfidenceHead",
    "FixedBuffer",
    "GatedMarkov",
    "RaggedBatch",
    "RaggedGraph",
    "RequestRules",
    "RnnMarkov",
    "RowBuffer",
    "SamplingRows",
    "StepNoise",
    "VanillaMarkov",
    "accept",
    "accept_block",
    "accept_coupled",
    "accept_greedy",
    "accept_token",
    "allocate_windows",
    "draw",
    "draw_coins",
    "filtered_weights",
    "next_tier",
    "philox",
    "probabilities",
    "race",
    "sample_block",
    "seeded_sample",
    "top_support",
]
