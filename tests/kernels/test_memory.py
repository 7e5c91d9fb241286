"""What a server reserves for a step. Separates a bound that forgets a buffer, or grows with rows where chunks bound it,
from the sizes of what is really made: the torch path's tensors are watched, and the figures of the issue are repeated."""

from __future__ import annotations

import torch

from dspark_kernels import step_bytes
from dspark_kernels.memory import CHUNK_BYTES, row_chunks

GIB, MIB = 1 << 30, 1 << 20


def test_chunks_cover_every_row_once_and_stay_small():
    for rows, vocab in ((1, 151_936), (2048, 151_936), (2049, 49_152), (5, 100), (40, 10**9)):
        chunks = row_chunks(rows, vocab)
        assert [row for start, end in chunks for row in range(start, end)] == list(range(rows))
        assert all(start % 16 == 0 for start, _ in chunks)
        assert all(4 * vocab * (end - start) <= max(CHUNK_BYTES, 64 * vocab) for start, end in chunks)
    assert row_chunks(0, 100) == []


def test_the_peak_at_256_requests_and_a_vocabulary_of_151_936_is_q_and_the_logits_and_one_chunk():
    """p of all rows would be another 1.16 GiB; 256 x 8 rows."""
    requests, gamma, vocab = 256, 7, 151_936
    q, logits = 4 * requests * gamma * vocab, 2 * requests * (gamma + 1) * vocab
    assert q + logits < step_bytes(requests, gamma, vocab) <= q + logits + CHUNK_BYTES + MIB
    assert step_bytes(requests, gamma, vocab) < 1.9 * GIB
    assert step_bytes(requests, gamma, vocab, torch.float32) == step_bytes(requests, gamma, vocab) + logits


def test_the_peak_grows_with_requests_and_shrinks_with_the_drafts_vocabulary():
    sizes = [step_bytes(r, 7, 151_936) for r in (1, 8, 64, 256)]
    assert sizes == sorted(sizes) and sizes[0] < 0.03 * GIB
    assert step_bytes(64, 7, 151_936) - step_bytes(64, 7, 151_936, columns=32_768) == 4 * 64 * 7 * (151_936 - 32_768)
