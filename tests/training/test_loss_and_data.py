"""The written-out gradient against autograd, the anchors' bookkeeping against a loop, and the sampler against its law.

Catches: a sign or factor in the analytic gradient, target mass outside the draft's vocabulary forgotten, off-by-one
between a
slot, its label and the target state that predicts it (the bug that trains happily and accepts nothing), padding that
trains.
Strength: gradients agree to 1e-5 in float64 arithmetic's shadow (float32); every batch entry is recomputed one by one.
"""

from __future__ import annotations

import random

import pytest
import torch

from sglang_dspark.training.data import make_batch
from sglang_dspark.training.loss import DistributionLoss, LossWeights, confidence_loss, expected_length
from sglang_dspark.training.shards import Example, ShardWriter, check_shards, finished_indices, read_shard
from sglang_dspark.training.target import draw


def plain_loss(hidden, latents, lm_head, w2, final, totals, labels, weights, factors):
    """Eq. 9-11 as written, for autograd."""
    logits = hidden @ lm_head.T + (0 if w2 is None else latents @ w2.T)
    p, q = logits.softmax(-1), (final @ lm_head.T - totals[:, None]).exp()
    distance = (p - q).abs().sum(-1) + (1 - q.sum(-1))
    picked = logits.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return (weights * (factors.tv * distance - factors.ce * picked * (labels >= 0))).sum(), 1 - distance / 2


@pytest.mark.parametrize("rank", [0, 5])
def test_the_written_gradient_equals_autograd_with_mass_outside_the_support(rank):
    torch.manual_seed(0)
    n, d, whole, support = 300, 12, 40, 25  # more rows than a chunk
    head = torch.randn(whole, d)
    final, lm_head = torch.randn(n, d), head[:support]
    totals = (final @ head.T).logsumexp(-1)
    labels = torch.randint(-1, support, (n,))
    weights = torch.rand(n) / n
    leaves = [torch.randn(n, d, requires_grad=True)]
    leaves += (
        [torch.randn(n, rank, requires_grad=True), torch.randn(support, rank, requires_grad=True)]
        if rank
        else [None, None]
    )
    factors = LossWeights(0.3, 0.8)
    hidden, latents, w2 = leaves
    ours, overlap, _ = DistributionLoss.apply(hidden, latents, lm_head, w2, final, totals, labels, weights, factors)
    (2 * ours).backward()
    found = [leaf.grad.clone() for leaf in leaves if leaf is not None]
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    theirs, expected_overlap = plain_loss(hidden, latents, lm_head, w2, final, totals, labels, weights, factors)
    (2 * theirs).backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(overlap, expected_overlap.detach())
    assert float(expected_overlap.detach().max()) < 1
    for gradient, leaf in zip(found, [leaf for leaf in leaves if leaf is not None], strict=True):
        torch.testing.assert_close(gradient, leaf.grad, atol=1e-6, rtol=1e-4)


def test_the_confidence_is_pulled_to_the_overlap():
    logits = torch.zeros(4, requires_grad=True)
    confidence_loss(logits, torch.tensor([0.9, 0.1, 0.5, 0.7]), torch.full((4,), 0.25)).backward()
    assert (logits.grad.sign() == torch.tensor([-1.0, 1.0, 0.0, -1.0])).all()


def test_expected_length_counts_the_bonus_and_stops_at_the_sequence_end():
    overlap, valid = torch.tensor([[0.5, 0.5, 1.0]]), torch.tensor([[True, True, False]])
    assert float(expected_length(overlap, valid)) == pytest.approx(1 + 0.5 + 0.25)


def example(n: int, prompt: int, index: int = 0, m: int = 2, d: int = 3) -> Example:
    """Features and states that name their own token position, so that a gathered row says where it came from."""
    rows = torch.arange(n).float()
    features = (rows[:, None, None] * 100 + torch.arange(m)[:, None]).expand(n, m, d).bfloat16()
    return Example(
        torch.arange(n).int() + 1000 * index, prompt, features, rows[:, None].expand(n, d).bfloat16(), rows, 0, index
    )


def test_every_slot_knows_its_label_its_previous_token_and_the_state_that_predicts_it():
    batch = make_batch([example(30, 4), example(9, 6, 1)], anchors=7, gamma=3, rng=random.Random(0))
    assert batch.features.shape == (2, 30, 6) and batch.valid.shape == (2, 7, 3)
    for row, (n, prompt, base) in enumerate([(30, 4, 0), (9, 6, 1000)]):
        anchors = batch.positions[row][batch.valid[row, :, 0]].tolist()
        assert len(anchors) == len(set(anchors)) == min(7, n - 1 - prompt)
        for i in range(7):
            a = int(batch.positions[row, i])
            assert prompt <= a < n - 1 and int(batch.tokens[row, i]) == base + a
            assert batch.valid[row, i].tolist() == sorted(batch.valid[row, i].tolist(), reverse=True)
            for k in range(3):
                if batch.valid[row, i, k]:
                    assert int(batch.previous[row, i, k]) == base + a + k
                    assert int(batch.labels[row, i, k]) == base + a + k + 1 < base + n
                    assert float(batch.final[row, i, k, 0]) == float(batch.log_totals[row, i, k]) == a + k


def test_shards_come_back_as_written_and_foreign_ones_are_refused(tmp_path):
    writer = ShardWriter(tmp_path, "answers-0", 40, {"layers": [1, 2]})
    for i in range(5):
        writer.add(example(12 + i, 3, i))
    writer.flush()
    paths = sorted(tmp_path.glob("*.safetensors"))
    found = [e for path in paths for e in read_shard(path)]
    assert len(paths) == 2 and [e.index for e in found] == list(range(5)) and finished_indices(paths) == set(range(5))
    for i, e in enumerate(found):
        expected = example(12 + i, 3, i)
        assert (
            e.prompt_length == 3
            and torch.equal(e.tokens, expected.tokens)
            and torch.equal(e.features, expected.features)
        )
    check_shards(paths, {"layers": [1, 2]})
    with pytest.raises(ValueError, match="layers"):
        check_shards(paths, {"layers": [1, 3]})


def test_drawing_follows_the_weights_and_never_takes_an_impossible_index():
    torch.manual_seed(1)
    weights = torch.rand(1003)  # not a multiple of the chunk
    weights[::3] = 0
    n = 400_000
    counts = torch.bincount(draw(weights.expand(4000, -1).contiguous(), None), minlength=1003)
    for _ in range(n // 4000 - 1):
        counts += torch.bincount(draw(weights.expand(4000, -1).contiguous(), None), minlength=1003)
    assert (counts[::3] == 0).all()
    expected = n * weights / weights.sum()
    kept = expected > 0
    chi2 = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert chi2 < int(kept.sum()) + 6 * (2 * int(kept.sum())) ** 0.5  # 6 standard deviations
