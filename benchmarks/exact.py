"""What exact texts cost on a plain CPU: the products of one forward of SmolLM2-135M's shape, plain and by row counts.

    python benchmarks/exact.py [--dtype bfloat16] [--threads 2] [--repeats 30]

Every layer has weights of its own, so they are read from memory as in a model. Plain (A), exact (B) and plain again (A2)
take turns; the medians of each in ms, B against the mean of A and A2, and A2 against A, which is what the machine's own
unrest makes of no difference. Row counts: one request with windows of 0, 1, 2 and 5 drafts, 3, 8 and 16 of them, a chunk.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn.functional import linear

from sglang_dspark.cpu.row_counts import row_counts

LAYERS, LAYER, VOCABULARY = 30, ((576, 960), (576, 576), (576, 3072), (1536, 576)), (576, 49152)
ROWS = (1, 2, 3, 6, 18, 48, 96, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    start = time.perf_counter()
    found = {shape: row_counts(*shape, dtype) for shape in (*LAYER, VOCABULARY)}
    print(f"trying the products took {time.perf_counter() - start:.2f} s; padded:")
    for (inputs, outputs), counts in found.items():
        print(f"  {inputs} to {outputs}: {counts.padded or 'nothing'}{'' if counts.exact else ', NOT EXACT'}")
    weights = [(shape, torch.randn(shape[1], shape[0]).to(dtype)) for shape in (*LAYER * LAYERS, VOCABULARY)]
    inputs = {shape[0]: torch.randn(max(ROWS), shape[0]).to(dtype) for shape in found}

    def plain(rows: int) -> None:
        for (width, _), weight in weights:
            linear(inputs[width][:rows], weight)

    def exact(rows: int) -> None:
        for shape, weight in weights:
            counts, x = found[shape], inputs[shape[0]][:rows]
            if counts.changes_nothing:
                linear(x, weight)
            else:
                counts.apply(lambda some, weight=weight: linear(some, weight), x)

    print("rows        A        B       A2     B/A  A2/A")
    with torch.inference_mode():
        for rows in ROWS:
            arms = [[], [], []]
            for _ in range(args.repeats):
                for arm, forward in zip(arms, (plain, exact, plain), strict=True):
                    start = time.perf_counter()
                    forward(rows)
                    arm.append(1e3 * (time.perf_counter() - start))
            a, b, again = (statistics.median(arm[1:]) for arm in arms)
            print(f"{rows:4d} {a:8.2f} {b:8.2f} {again:8.2f}  {2 * b / (a + again):.3f} {again / a:.3f}", flush=True)


if __name__ == "__main__":
    main()
