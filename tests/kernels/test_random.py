"""Random numbers. Separates a wrong cipher (known answers), streams that overlap (bits shared between purposes,
steps or requests), and numbers that depend on the batch.

Strength: the cipher is compared with Random123's published vectors and, on 200 random keys, with integers; correlations
of 60 000 numbers are held below 5 sigma; a shared word between two purposes is a correlation of 1.
"""

from __future__ import annotations

import itertools
import math

import torch
from scipy import stats

from dspark_kernels import draw_coins, philox, race
from dspark_kernels.cipher import MASK32, philox_reference
from dspark_kernels.gumbel import exponential, mix32_reference, noise_bits, noise_keys, noise_keys_torch, race_reference
from dspark_kernels.random import draw_coins_torch, unit_interval


def test_the_cipher_gives_the_published_answers():
    """Random123 `kat_vectors`: philox4x32 10."""
    assert philox_reference((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = MASK32
    assert philox_reference((ones, ones), (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = philox_reference((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert pi == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_the_tensor_cipher_is_the_integer_cipher_for_negative_and_huge_keys():
    torch.manual_seed(0)
    seeds, steps = torch.randint(-(2**63), 2**63 - 1, (2, 50))
    words = philox(seeds[:, None], steps[:, None], torch.arange(4)[None], domain=1)
    for i, j in itertools.product(range(50), range(4)):
        seed, step = int(seeds[i]), int(steps[i])
        key, counter = (seed & MASK32, seed >> 32 & MASK32), (step & MASK32, step >> 32 & MASK32, j, 1)
        assert tuple(int(word[i, j]) for word in words) == philox_reference(key, counter)


def test_a_uniform_is_never_one_and_keeps_its_bits():
    top = torch.tensor([MASK32])
    assert float(unit_interval(top)) < 1.0 and float(unit_interval(top, torch.tensor([0xFFFF]))) == 1 - 2.0**-48
    assert float(unit_interval(torch.tensor([0]), torch.tensor([1]))) == 2.0**-48


def test_purposes_steps_indices_and_seeds_are_independent_streams():
    coins = draw_coins(torch.arange(10_000), torch.full((10_000,), 7), 5)
    later = draw_coins(torch.arange(10_000), torch.full((10_000,), 8), 5)
    columns = torch.cat([coins.draft, coins.accept, coins.final, later.draft, later.accept, later.final], dim=1)
    correlation = torch.corrcoef(columns.t()) - torch.eye(columns.shape[1])
    assert float(correlation.abs().max()) < 5 / math.sqrt(10_000)
    neighbours = torch.corrcoef(torch.stack((columns[:-1].flatten(), columns[1:].flatten())))[0, 1]
    assert abs(float(neighbours)) < 5 / math.sqrt(columns.numel())
    for stream in (coins.draft, coins.accept, coins.final):
        assert stats.kstest(stream.flatten().numpy(), "uniform").pvalue > 1e-4


def test_what_a_request_draws_does_not_depend_on_the_batch():
    seeds, steps = torch.tensor([5, -9, 2**40]), torch.tensor([0, 3, 2**33])
    together, alone = draw_coins(seeds, steps, 6), draw_coins(seeds[1:2], steps[1:2], 6)
    longer = draw_coins(seeds, steps, 9)
    for name in ("draft", "accept", "final"):
        assert torch.equal(getattr(together, name)[1:2], getattr(alone, name))
        assert torch.equal(getattr(together, name), getattr(longer, name)[:, :7]), "nor on the block size"


def test_the_compiled_loop_gives_the_bits_of_the_torch_path():
    """Of every seed and step, the largest and negative ones included; asked twice, it says the same."""
    torch.manual_seed(5)
    edges = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**32 - 1])
    seeds = torch.cat((edges, torch.randint(-(2**63), 2**63 - 1, (200,))))
    steps = torch.cat((edges.flip(0), torch.randint(0, 2**40, (200,))))
    expected = draw_coins_torch(seeds, steps, 7)
    for coins in (draw_coins(seeds, steps, 7), draw_coins(seeds, steps, 7)):
        assert all(torch.equal(getattr(coins, name), getattr(expected, name)) for name in ("draft", "accept", "final"))
    assert torch.equal(noise_keys(seeds, steps), noise_keys_torch(seeds, steps))
    strided = torch.stack((seeds, steps), dim=1)
    assert torch.equal(draw_coins(strided[:, 0], strided[:, 1], 7).final, expected.final)


def test_the_race_is_the_gumbel_maximum_of_its_reference():
    torch.manual_seed(1)
    weights = torch.rand(40, 60)
    weights[weights < 0.3] = 0
    seeds, positions = torch.randint(-(2**62), 2**62, (40,)), torch.randint(0, 2**34, (40,))
    for ids in (None, torch.randperm(50_000)[:60]):
        won = race(weights, seeds, positions, ids)
        for i in range(40):
            named = list(range(60)) if ids is None else ids.tolist()
            assert int(won[i]) == race_reference(weights[i].tolist(), int(seeds[i]), int(positions[i]), named)


def test_the_race_follows_its_weights_over_positions_and_over_seeds():
    """20 000 draws each; a mixer that forgets the position (or the seed) would draw one token 20 000 times."""
    weights = torch.tensor([0.05, 0.0, 0.45, 0.2, 0.3]).expand(20_000, -1)
    count, zero = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
    for seeds, positions in ((zero + 11, count), (count, zero + 11), (count // 100, count % 100)):
        counts = race(weights, seeds, positions).bincount(minlength=5)
        assert counts[1] == 0
        kept = [0, 2, 3, 4]
        assert stats.chisquare(counts[kept].numpy(), 20_000 * weights[0, kept].numpy()).pvalue > 1e-4


def test_the_noise_of_neighbouring_tokens_and_positions_is_independent():
    keys = noise_keys(torch.full((64,), 3), torch.arange(64))
    from dspark_kernels.gumbel import _mixed_ids

    v = noise_bits(keys, _mixed_ids(2000, torch.device("cpu"))).double() / 2**31
    assert stats.kstest(v.flatten().numpy(), "uniform").pvalue > 1e-4
    for a, b in ((v[:, 1:], v[:, :-1]), (v[1:], v[:-1])):
        assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 5 / math.sqrt(a.numel())
    assert mix32_reference(1) != 1


def test_the_exponential_is_exact_where_races_are_won():
    """Relative error below 1e-6 down to the smallest value (the large values, which lose, are off by up to 1e-3).

    With log(1 - v) alone the values below 2**-25 would be 0 and win every race.
    """
    bits = torch.cat((torch.arange(2000), torch.tensor([2**20, 2**24 + 1, 2**30]))).int()
    exact = -torch.log1p(-(bits.double() + 0.5) / 2**31)
    assert float((exponential(bits).double() / exact - 1).abs().max()) < 1e-6
    assert float(exponential(torch.tensor([2**31 - 1], dtype=torch.int32))) < 17
