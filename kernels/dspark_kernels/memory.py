"""How much memory a step takes, from its shapes alone: a server reserves it before it fills the rest with KV cache."""

from __future__ import annotations

import torch

CHUNK_BYTES = 1 << 28  # of target probabilities at a time, on a GPU


def row_chunks(rows: int, vocab: int) -> list[tuple[int, int]]:
    """The rows of a batch as (start, end), so that a chunk of float32 [rows, vocab] stays within CHUNK_BYTES (sixteen rows
    at least). Starts are multiples of sixteen, so that a kernel is compiled once for all of them."""
    size = max(16, CHUNK_BYTES // (4 * vocab) // 16 * 16)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def step_bytes(
    requests: int,
    gamma: int,
    vocab: int,
    logits_dtype: torch.dtype = torch.bfloat16,
    columns: int | None = None,
    draft_dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Peak device memory, in bytes, of what one step of whole blocks makes beside the models' own activations.

    While the block is drawn: q of every slot, base logits of every slot in the draft's dtype, and one position's bias in
    that dtype and in float32. While it is judged: q, the target's logits, and the chunks of p. The larger of both, and a
    few numbers per row for everything else.

    Args:
        requests: R, running at most. gamma: drafts per request. vocab: V. columns: C that the draft proposes from (None:
            V). logits_dtype: of the target's logits as they reach `accept`. draft_dtype: of the draft's base logits.
    """
    columns = columns or vocab
    rows, slots = requests * (gamma + 1), requests * gamma
    q = 4 * slots * columns
    drafting = (slots + requests) * columns * draft_dtype.itemsize + 4 * requests * columns
    longest = max((end - start for start, end in row_chunks(rows, vocab)), default=0)
    judging = rows * vocab * logits_dtype.itemsize + 4 * longest * vocab
    return q + max(drafting, judging) + 256 * (rows + 1)
