"""Time and bytes of every step of a verify cycle on this CPU, against the memory floor.

    python benchmarks/kernel_times.py [--threads 1] [--rounds 30]

The floor is what the step must read and write at least, divided by the copy bandwidth measured in the same run (so it
ignores caches: small steps can beat it). The last columns compare with the plain way to do the same in torch: SGLang's
sort for the filtered law, `torch.multinomial` for a draw, a full-vocabulary float64 Gumbel for the seeded one. Arms are
interleaved round by round; the minimum over the rounds is kept, because a shared machine only ever adds time.
Writes benchmarks/results/kernels.md and kernels.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from dspark_kernels import (
    AcceptRule,
    RaggedBatch,
    RequestRules,
    SamplingRows,
    VanillaMarkov,
    Verified,
    accept,
    allocate_windows,
    draw,
    draw_noise,
    probabilities,
    sample_block,
    seeded_sample,
)
from dspark_kernels.sampling import first_argmax

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Shape:
    """R requests, γ drafts each, vocabulary V, draft vocabulary Vd, hidden size d, Markov rank r."""

    requests: int
    gamma: int
    vocab: int
    draft_vocab: int
    hidden: int = 576
    rank: int = 256
    device: str = "cpu"

    @property
    def rows(self) -> int:
        return self.requests * (self.gamma + 1)


@dataclass(frozen=True)
class Case:
    """One step: what runs, the bytes it must move, and the plain torch way (None if there is no other)."""

    name: str
    run: Callable[[], object]
    bytes: int
    plain: Callable[[], object] | None = None


def language_like(*shape: int, device: str = "cpu") -> torch.Tensor:
    """Logits of a Zipf law of exponent 1.6 with noise, in random order: a nucleus of 0.95 holds some hundred tokens."""
    rank = torch.arange(1, shape[-1] + 1, dtype=torch.float32)
    logits = torch.randn(*shape) - 1.6 * torch.log(rank)[torch.randperm(shape[-1])]
    return logits.to(device)


def plain_filter(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Sort, cumulate, mask, scatter back, renormalise: the law as torch samplers write it."""
    p = torch.softmax(logits.float() / rows.temperature[:, None], dim=-1)
    ranked, order = p.sort(dim=-1, descending=True)
    cumulative = ranked.cumsum(dim=-1)
    rank = torch.arange(p.shape[1], device=p.device)
    ranked[(rank >= rows.top_k[:, None]) | (cumulative - ranked > rows.top_p[:, None])] = 0.0
    ranked[ranked < ranked[:, :1] * rows.min_p[:, None]] = 0.0
    p = torch.zeros_like(p).scatter_(1, order, ranked)
    return p / p.sum(dim=-1, keepdim=True)


def plain_seeded(logits: torch.Tensor) -> torch.Tensor:
    """argmax(log p + g) with a float64 [rows, V] buffer of noise."""
    noise = torch.rand(logits.shape, dtype=torch.float64, device=logits.device)
    return (torch.log_softmax(logits.double(), dim=-1) - torch.log(-torch.log(noise))).argmax(dim=-1)


def law_cases(shape: Shape) -> list[Case]:
    """One row of logits per verified row: the law under each kind of filter, a draw, an argmax, a seeded sample."""
    n, vocab, device = shape.rows, shape.vocab, shape.device
    logits = language_like(n, vocab, device=device)
    kinds = {
        "law T=1": {},
        "law top_k=50": {"top_k": [50] * n},
        "law top_p=0.95": {"top_p": [0.95] * n},
        "law min_p=0.05": {"min_p": [0.05] * n},
    }
    cases = []
    for name, filters in kinds.items():
        rows = SamplingRows.of([1.0] * n, **filters, device=device)
        cases.append(
            Case(
                name,
                lambda rows=rows: probabilities(logits, rows),
                8 * n * vocab,
                (lambda rows=rows: plain_filter(logits, rows)) if filters else lambda: torch.softmax(logits, -1),
            )
        )
    p, uniform = torch.softmax(logits, -1), torch.rand(n, dtype=torch.float64, device=device)
    plain_rows, ids = SamplingRows.of([1.0] * n, device=device), torch.arange(n, device=device)
    cases += [
        Case("argmax", lambda: first_argmax(logits), 4 * n * vocab, lambda: logits.argmax(-1)),
        Case("draw", lambda: draw(p, uniform), 4 * n * vocab, lambda: torch.multinomial(p, 1)),
        Case(
            "seeded sample",
            lambda: seeded_sample(logits, plain_rows, ids, ids),
            4 * n * vocab,
            lambda: plain_seeded(logits),
        ),
    ]
    return cases


def step_cases(shape: Shape) -> list[Case]:
    """What a decode step adds to the two model forwards: noise, block sampling, windows, packing, acceptance."""
    R, k, device = shape.requests, shape.gamma, shape.device
    dtype = torch.bfloat16
    head = (
        VanillaMarkov(shape.vocab, shape.rank, shape.hidden, shape.draft_vocab).to(device, dtype).requires_grad_(False)
    )
    support = torch.randperm(shape.vocab)[: shape.draft_vocab].sort().values.to(device)
    base = language_like(R, k, shape.draft_vocab, device=device).to(dtype)
    hidden = torch.randn(R, k, shape.hidden, dtype=dtype, device=device)
    anchors, counter = torch.randint(0, shape.vocab, (R,), device=device), torch.arange(R, device=device)
    target = language_like(shape.rows, shape.vocab, device=device)
    windows = torch.full((R,), k, device=device)
    survival = torch.rand(R, k, device=device).cumprod(dim=1)
    draft_bytes = k * (shape.draft_vocab * shape.rank * 2 + R * shape.draft_vocab * 2)
    cases = [
        Case("windows", lambda: allocate_windows(survival, R * k // 2), 4 * R * (k + 1)),
        Case(
            "pack",
            lambda: RaggedBatch.pack(anchors, anchors[:, None].expand(R, k), windows, counter, tier=shape.rows),
            8 * (2 * R + R * k + 4 * shape.rows),
        ),
    ]
    for rule in AcceptRule:
        temperature = 0.0 if rule is AcceptRule.GREEDY else 1.0
        rows = SamplingRows.of([temperature] * R, device=device)
        rules = RequestRules.of([rule] * R, device=device)
        noise = draw_noise(counter, counter, counter, k, rules)
        draft = sample_block(head, base, hidden, anchors, rows, noise, support)
        batch = RaggedBatch.pack(anchors, draft.tokens, windows, counter, tier=shape.rows)
        q_bytes = 0 if draft.probs is None else 4 * R * k * shape.draft_vocab
        judge = lambda d=draft, b=batch, r=rows, n=noise: accept(Verified(target, b, d, r, n))
        sample = lambda r=rows, n=noise: sample_block(head, base, hidden, anchors, r, n, support)
        name = rule.name.lower()
        cases.append(Case(f"draft {name}", sample, draft_bytes + q_bytes))
        cases.append(Case(f"accept {name}", judge, 4 * shape.rows * shape.vocab + q_bytes))
        if rule is AcceptRule.BLOCK:
            cases.append(Case("noise", lambda g=rules: draw_noise(counter, counter, counter, k, g), 24 * R * (k + 1)))
    return cases


def copy_bandwidth(seconds: float = 2.0, megabytes: int = 64) -> float:
    """Bytes per second, read and written, of a copy that fits no cache."""
    source, best, end = torch.ones(megabytes << 18), 0.0, time.perf_counter() + seconds
    sink = torch.empty_like(source)
    while time.perf_counter() < end:
        start = time.perf_counter()
        sink.copy_(source)
        best = max(best, 2 * source.numel() * 4 / (time.perf_counter() - start))
    return best


def measure(cases: list[Case], rounds: int) -> list[dict]:
    """Minimum seconds of every case and of its plain way, interleaved."""
    best = {case.name: [float("inf"), float("inf")] for case in cases}
    for _ in range(rounds):
        for case in cases:
            for arm, function in enumerate((case.run, case.plain)):
                if function is not None:
                    start = time.perf_counter()
                    function()
                    best[case.name][arm] = min(best[case.name][arm], time.perf_counter() - start)
    return [
        {
            "name": case.name,
            "bytes": case.bytes,
            "seconds": best[case.name][0],
            "plain_seconds": best[case.name][1] if case.plain else None,
        }
        for case in cases
    ]


def table(results: dict[int, list[dict]], bandwidth: float) -> str:
    lines = [
        "| step | R | MB | ms | floor ms | times floor | plain torch ms | plain / ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for requests, rows in results.items():
        for row in rows:
            ms, floor, plain = row["seconds"] * 1e3, row["bytes"] / bandwidth * 1e3, row["plain_seconds"]
            times = f"{ms / floor:.1f}" if floor > 0.001 else "–"  # below a microsecond the calls are all there is
            against = "| |" if plain is None else f"| {plain * 1e3:.3f} | {plain / row['seconds']:.1f} |"
            lines.append(
                f"| {row['name']} | {requests} | {row['bytes'] / 1e6:.2f} | {ms:.3f} | {floor:.3f} | {times} {against}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--gamma", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    results = {}
    for requests in args.requests:
        shape = Shape(requests, args.gamma, 49152, 8192)
        results[requests] = measure(law_cases(shape) + step_cases(shape), args.rounds)
    head = (
        f"# Kernels on a CPU\n\n`python benchmarks/kernel_times.py --threads {args.threads} --rounds {args.rounds}`, "
        f"{date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"torch {torch.__version__}, {args.threads} thread(s), copy bandwidth {bandwidth / 1e9:.1f} GB/s. γ {args.gamma}, "
        f"V 49152, draft vocabulary 8192, rank 256; {args.gamma + 1} rows per request; minimum of {args.rounds} rounds.\n\n"
    )
    text = head + table(results, bandwidth) + "\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kernels.md").write_text(text)
    record = {"bandwidth": bandwidth, "threads": args.threads, "load": os.getloadavg(), "results": results}
    (RESULTS / "kernels.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
