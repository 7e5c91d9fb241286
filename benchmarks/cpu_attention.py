"""Processor time of attention alone on a plain CPU: 30 layers of SmolLM2-135M's shape over cold keys and values.

    python benchmarks/cpu_attention.py [--dtype bfloat16] [--repeats 9]

One thread, the quickest of the repeats, in ms per step. Each layer has a pool of its own, so at 16 requests of 448
tokens a step reads 165 MB and the caches help no more than in a model. `roof` is what reading those bytes takes as one
stream, measured beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from sglang_dspark.cpu.attention.paged import PagedAttention
from sglang_dspark.cpu.attention.plan import AttentionPlan

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
CASES = ((1, 64, 1), (1, 448, 1), (16, 64, 1), (16, 192, 1), (16, 448, 1), (1, 448, 6), (16, 192, 6))
PROMPT, DECODED, REQUESTS = 440, 16, 16


def request_slots() -> torch.Tensor:
    """Slots as SGLang hands them out: prompts in a row, then one of each request in turn."""
    table = torch.zeros(REQUESTS, 512, dtype=torch.int32)
    for r in range(REQUESTS):
        table[r, :PROMPT] = torch.arange(PROMPT) + r * PROMPT
        table[r, PROMPT : PROMPT + DECODED] = REQUESTS * PROMPT + torch.arange(DECODED) * REQUESTS + r
    return table


def quickest(action: Callable[[], object], repeats: int) -> float:
    """Milliseconds of processor time of the quickest run, after one to warm up."""
    action()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    shape = (REQUESTS * (PROMPT + DECODED), KV_HEADS, HEAD_DIM)
    pools = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(LAYERS)]
    attention = PagedAttention(request_slots())
    print("requests keys rows       ms     roof")
    for requests, keys, rows in CASES:
        attention.set_plan(AttentionPlan.of(np.full(requests, rows), np.full(requests, keys), np.arange(requests)))
        q = torch.randn(requests * rows, HEADS, HEAD_DIM).to(dtype)
        out = torch.empty_like(q)
        step = quickest(lambda q=q, out=out: [attention(q, k, v, 0.125, True, out) for k, v in pools], args.repeats)
        read = [pool[: requests * keys].view(torch.int8).view(-1).view(torch.int64) for pair in pools for pool in pair]
        roof = quickest(lambda read=read: [piece.max() for piece in read], args.repeats)
        print(f"{requests:>8} {keys:>4} {rows:>4} {step:>8.2f} {roof:>8.2f}")


if __name__ == "__main__":
    main()
