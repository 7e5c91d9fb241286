"""Parity of every Triton kernel with the torch path on random shapes: on a GPU, or on a CPU under the interpreter.

`python -m dspark_kernels.selfcheck` on a CUDA machine; `TRITON_INTERPRET=1 python -m dspark_kernels.selfcheck --device
cpu` without one. Each check draws its own shapes (R 1-64, block 1-16, V odd and even, rows apart in memory, NaN and
infinite logits) and compares with the torch path on the CPU; a mismatch raises AssertionError.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from collections.abc import Callable

import torch

from . import memory
from .accept import accept_torch
from .accept_triton import accept_triton
from .gumbel import exponential, noise_bits, noise_keys, race, token_hashes
from .gumbel_triton import race_triton
from .markov import sample_block
from .mixed import sample_rows
from .mixed_triton import mixed_draw_triton
from .ragged import RaggedBatch
from .ragged_triton import pack_triton
from .random import draw_coins_torch, draw_noise
from .random_triton import coins_triton
from .sampling import _law_torch, draw, first_argmax
from .sampling_triton import NORMALISED, RAW, argmax_triton, draw_triton, law_triton
from .types import AcceptRule, BlockDraft, Coins, RequestRules, SamplingRows, StepNoise
from .verified import Verified
from .windows import allocate_windows_torch, window_bounds
from .windows_triton import allocate_windows_triton

Check = Callable[[random.Random, str], None]


def random_logits(g: random.Random, rows: int, vocab: int) -> torch.Tensor:
    """[rows, vocab] logits of some dtype and layout, some with NaN, infinities or nothing left."""
    x = torch.randn(rows, vocab) * 3
    if g.random() < 0.2:
        x = torch.randn(vocab, rows).t() * 2
    if g.random() < 0.2:
        x = torch.cat((x, x), dim=1)[:, :vocab]
    if g.random() < 0.2:
        x = x.bfloat16()
    for value in (torch.nan, torch.inf, -torch.inf):
        if g.random() < 0.2:
            x[g.randrange(rows), g.randrange(vocab)] = value
    if g.random() < 0.1:
        x[g.randrange(rows)] = -torch.inf
    return x


def random_rows(g: random.Random, rows: int, filtered: float = 0.5, greedy: float = 0.15) -> SamplingRows:
    """Parameters of which about half filter; top_p is an odd number, so that no sum of equal tokens meets it."""

    def choose(options: list, off: float) -> list:
        return [g.choice(options) if g.random() < filtered else off for _ in range(rows)]

    temperature = [0.0 if g.random() < greedy else g.choice([1.0, 0.7, 1.3]) for _ in range(rows)]
    return SamplingRows.of(
        temperature, choose([2, 5, 20], -1), choose([0.9137, 0.5171, 0.1213], 1.0), choose([0.0517, 0.2113], 0.0)
    )


def to_device(value, device: str):
    """A copy of a dataclass of tensors (or of one tensor) on the device, layout kept."""
    if isinstance(value, torch.Tensor):
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return moved.copy_(value)
    if isinstance(value, dict):
        return {key: to_device(part, device) for key, part in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: to_device(getattr(value, name), device) for name in value.__dataclass_fields__})
    return value


def check_law(g: random.Random, device: str) -> None:
    """The law of a row after temperature and filters agrees with torch within rounding."""
    vocab, count = g.choice([3, 7, 16, 33, 100, 257, 300]), g.randint(1, 3)
    logits, rows = random_logits(g, count, vocab), random_rows(g, count, filtered=0.3)
    normalise = g.random() < 0.5
    ours = law_triton(to_device(logits, device), to_device(rows, device), normalise).cpu()
    torch.testing.assert_close(ours, _law_torch(logits, rows, normalise), atol=2e-6, rtol=1e-5)


def check_argmax(g: random.Random, device: str) -> None:
    logits = random_logits(g, g.randint(1, 8), g.choice([1, 3, 64, 128, 301]))
    if g.random() < 0.5:
        logits = logits.round()  # ties
    assert torch.equal(argmax_triton(to_device(logits, device)).cpu(), first_argmax(logits))


def check_draw(g: random.Random, device: str) -> None:
    """Equal weights and uniforms draw equal columns, and never one of weight 0."""
    count, columns = g.randint(1, 4), g.choice([1, 2, 17, 64, 333])
    weights = torch.rand(count, columns)
    weights[weights < g.choice([0.0, 0.5, 0.9])] = 0.0
    weights[:, g.randrange(columns)] += 0.01
    uniforms = torch.rand(count, dtype=torch.float64)
    uniforms[0] = g.choice([0.0, 1.0 - 2.0**-48, float(uniforms[0])])
    drawn = draw_triton(to_device(weights, device), uniforms.to(device)).cpu()
    assert torch.equal(drawn, draw(weights, uniforms))
    assert bool((weights.gather(1, drawn[:, None]) > 0).all())


def check_coins(g: random.Random, device: str) -> None:
    """Coins are equal to the bit."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (g.randint(1, 8),))
    steps, count = torch.randint(0, 2**40, seeds.shape), g.randint(1, 16)
    coins = draw_coins_torch(seeds, steps, count)
    for ours, theirs in zip(coins_triton(seeds.to(device), steps.to(device), count + 1),
                            (coins.draft, coins.accept, coins.final), strict=True):  # fmt: skip
        assert torch.equal(ours.cpu(), theirs)


def check_race(g: random.Random, device: str) -> None:
    """The same column wins, ties to the last bits apart."""
    count, columns = g.randint(1, 4), g.choice([1, 5, 17, 100, 1500])
    weights = torch.rand(count, columns)
    weights[weights < 0.3] = 0.0
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (count,)), torch.randint(0, 2**33, (count,))
    ids = g.choice([None, torch.randperm(60000)[:columns]])
    won = race_triton(to_device(weights, device), seeds.to(device), positions.to(device),
                      None if ids is None else ids.to(device)).cpu()  # fmt: skip
    expected = race(weights, seeds, positions, ids)
    for row in torch.nonzero(won != expected).flatten().tolist():  # only a tie to the last bits may be broken otherwise
        bits = noise_bits(
            noise_keys(seeds[row : row + 1], positions[row : row + 1]), token_hashes(columns, ids, weights.device)
        )
        score = weights[row] / exponential(bits)[0]
        assert abs(float(score[won[row]] / score[expected[row]]) - 1) < 1e-5


def check_windows(g: random.Random, device: str) -> None:
    """Windows are equal, with ties, NaN, strided input and bounds among the cases."""
    requests, gamma = g.choice([1, 2, 3, 9, 64]), g.randint(1, 16)
    survival = torch.rand(requests, gamma)
    if g.random() < 0.4:
        survival = (survival * 3).round() / 3
    if g.random() < 0.2:
        survival = torch.full_like(survival, float(g.randrange(2)))
    if g.random() < 0.1:
        survival[0, 0] = torch.nan
    survival = g.choice([survival, survival.cumprod(1), survival.t().contiguous().t().cumprod(1)])
    low = torch.randint(0, 4, (requests,)) if g.random() < 0.4 else 0
    high = torch.randint(0, gamma + 3, (requests,)) if g.random() < 0.4 else None
    budget = g.choice([0, requests * gamma, g.randint(0, requests * gamma + 3)])
    bounds = window_bounds(survival, low, high)
    ours = allocate_windows_triton(*(to_device(x, device) for x in (survival, budget, *bounds)))
    assert torch.equal(ours.cpu(), allocate_windows_torch(survival, budget, *bounds))


def check_pack(g: random.Random, device: str) -> None:
    """Every field of the packed batch is equal, padding included."""
    requests, block = g.choice([1, 2, 5, 33, 64]), g.randint(1, 16)
    windows = torch.randint(0, block + 1, (requests,))
    tier = int((windows + 1).sum()) + g.randint(0, 300)
    slots = g.choice([None, torch.randint(1, 999, (requests, block + 1))])
    args = (torch.randint(0, 99, (requests,)), torch.randint(0, 99, (requests, block)), windows,
            torch.randint(0, 99, (requests,)), slots)  # fmt: skip
    expected = RaggedBatch.pack(*args, tier=tier, pad_slot=7)
    for name, ours in pack_triton(*(to_device(x, device) for x in args), tier, 7).items():
        theirs = getattr(expected, name)
        assert (ours is None and theirs is None) or torch.equal(ours.cpu(), theirs), name


def check_accept(g: random.Random, device: str) -> None:
    requests, block, vocab = g.choice([1, 2, 3, 6]), g.choice([1, 2, 3, 5, 16]), g.choice([5, 16, 41])
    if g.random() < 0.1:
        requests, block, vocab = 20, 2, 5  # more requests than the smallest chunk has rows
    rules = [g.choice([*AcceptRule, AcceptRule.BLOCK, AcceptRule.BLOCK]) for _ in range(requests)]
    if g.random() < 0.3:
        rules = [rules[0]] * requests
    temperature = [0.0 if rule is AcceptRule.GREEDY else g.choice([1.0, 0.7]) for rule in rules]
    rows = SamplingRows.of(temperature, None, [g.choice([1.0, 1.0, 0.8317]) for _ in rules])
    groups = RequestRules.of(rules)
    seeds, positions = torch.randint(-(2**60), 2**60, (requests,)), torch.randint(0, 99, (requests,))
    noise = draw_noise(seeds, torch.randint(0, 99, (requests,)), positions, block, groups)
    base, support = torch.randn(requests, block, vocab), None
    if g.random() < 0.5:
        base, support = base[..., :4], torch.randperm(vocab)[:4]
    anchors = torch.randint(0, vocab, (requests,))
    draft = sample_block(None, base, torch.zeros(requests, block, 1), anchors, rows, noise, support)
    windows = torch.randint(0, block + 1, (requests,))
    live = int((windows + 1).sum())
    batch = RaggedBatch.pack(anchors, draft.tokens, windows, positions, tier=live + g.randint(0, 3))
    logits = torch.randn(batch.rows, vocab) * 2
    logits[live:] = torch.nan  # padding rows must not be read
    verified = Verified(logits, batch, draft, rows, noise)
    expected, on_device = accept_torch(verified), to_device(verified, device)
    chunk = memory.CHUNK_BYTES
    try:
        memory.CHUNK_BYTES = g.choice([chunk, 0])  # the smallest chunk is of sixteen rows
        ours = accept_triton(on_device)
    finally:
        memory.CHUNK_BYTES = chunk
    assert torch.equal(ours.lengths.cpu(), expected.lengths), (rules, ours, expected)
    assert torch.equal(ours.tokens.cpu(), expected.tokens), (rules, ours, expected)
    torch.testing.assert_close(ours.acceptance.cpu(), expected.acceptance, atol=1e-5, rtol=0, equal_nan=True)


def check_mixed(g: random.Random, device: str) -> None:
    """Rows of all rules in one launch, against the same rows in groups; with and without a support."""
    count, columns = g.randint(1, 6), g.choice([2, 5, 17, 64, 300])
    rules = [g.choice(list(AcceptRule)) for _ in range(count)]
    rows = random_rows(g, count, greedy=0.0)
    rows = SamplingRows.of(
        [0.0 if rule is AcceptRule.GREEDY else float(t) for rule, t in zip(rules, rows.temperature, strict=True)],
        rows.top_k.tolist(), rows.top_p.tolist(), rows.min_p.tolist(),
    )  # fmt: skip
    groups, positions = RequestRules.of(rules), torch.randint(0, 2**33, (count,))
    noise = draw_noise(torch.randint(-(2**60), 2**60, (count,)), torch.randint(0, 99, (count,)), positions, 3, groups)
    logits = random_logits(g, count, columns)
    expected = sample_rows(logits, rows, noise)
    coins = torch.zeros(count, 1, dtype=torch.float64) if noise.coins is None else noise.coins.final
    ours = (to_device(x, device) for x in (logits, rows, groups.rule, coins, noise.seeds, positions))
    logits, rows, rule, coins, seeds, positions = ours
    law = law_triton(logits, rows, True, mode=torch.where(rule == 3, RAW, NORMALISED).to(torch.int32))
    drawn = mixed_draw_triton(logits, law, rule, coins, seeds, positions, 0, None)
    assert torch.equal(drawn.cpu(), expected), (rules, drawn, expected)


def check_residual(g: random.Random, device: str) -> None:
    """The block rule stops inside with s = 1/2, where (s p - q)+ leaves token 0 alone and (p - q)+ would not."""
    vocab, support = g.choice([(3, None), (8, torch.tensor([0, 1, 2])), (50, torch.tensor([0, 1, 2]))])
    p = torch.tensor([[0.25, 0.75, 0.0], [0.6, 0.4, 0.0], [1.0, 0.0, 0.0]])
    logits = torch.nn.functional.pad(p, (0, vocab - 3)).log()
    q = torch.tensor([[[0.5, 0.5, 0.0], [0.1, 0.3, 0.6]]])
    tokens, zero = torch.tensor([[0, 2]]), torch.zeros(1, dtype=torch.int64)
    draft, groups = BlockDraft(tokens, tokens, q, support), RequestRules.of([AcceptRule.BLOCK])
    accept_coins = torch.tensor([[0.0, 0.999, 0.999]], dtype=torch.float64)
    final = torch.tensor([[0.0, g.choice([0.0, 0.9, 0.99]), 0.0]], dtype=torch.float64)
    noise = StepNoise(zero, zero, groups, Coins(accept_coins, accept_coins, final))
    batch = RaggedBatch.pack(zero, tokens, zero + 2, zero, tier=3)
    verified = Verified(logits, batch, draft, SamplingRows.of([1.0]), noise)
    for result in (accept_torch(verified), accept_triton(to_device(verified, device))):
        assert result.tokens.tolist() == [[0, 0, 0]] and result.lengths.tolist() == [2]


CHECKS: dict[str, tuple[Check, int]] = {  # with the number of random shapes under the interpreter
    "law": (check_law, 60),
    "argmax": (check_argmax, 100),
    "draw": (check_draw, 100),
    "coins": (check_coins, 60),
    "race": (check_race, 60),
    "windows": (check_windows, 120),
    "pack": (check_pack, 60),
    "accept": (check_accept, 60),
    "residual": (check_residual, 12),
    "mixed": (check_mixed, 60),
}


def run_checks(device: str, scale: float = 1.0, seed: int = 0) -> dict[str, dict]:
    """Run every check.

    Args:
        device: where the Triton kernels run. scale: multiplies the number of shapes. seed: of the shapes.
    Returns:
        name -> {"cases": shapes that agreed, "seconds": wall time, "error": None or the traceback of the first that did not}.
    """
    report = {}
    for name, (check, shapes) in CHECKS.items():
        g = random.Random(seed)
        torch.manual_seed(seed)
        start, done, error = time.perf_counter(), 0, None
        try:
            for _ in range(max(1, int(shapes * scale))):
                check(g, device)
                done += 1
        except Exception:  # noqa: BLE001 - the report carries the traceback
            error = traceback.format_exc()
        report[name] = {"cases": done, "seconds": round(time.perf_counter() - start, 2), "error": error}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Parity of the Triton kernels with the torch path.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = run_checks(args.device, args.scale)
    if args.json:
        print(json.dumps(report))
    else:
        for name, row in report.items():
            verdict = "equal" if row["error"] is None else row["error"]
            print(f"{name:8} {row['cases']:4d} shapes {row['seconds']:7.2f} s  {verdict}")
    raise SystemExit(any(row["error"] for row in report.values()))


if __name__ == "__main__":
    main()
