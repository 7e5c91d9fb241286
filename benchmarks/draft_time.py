"""What one draft pass costs: context update, block, head with sampling, for R requests at a given context.

    python -m benchmarks.draft_time DRAFT TARGET [--threads 2] --out benchmarks/results/draft_time.json

Times are of the plain-torch draft (training/model.py) in bfloat16: the engine's adds or saves what its kernels do. The
minimum over the repetitions is what the machine can do; the median says how busy it was meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from sglang_dspark.training.model import DSparkDraft, load_draft
from sglang_dspark.training.target import Target, draw


@torch.inference_mode()
def one_pass(draft: DSparkDraft, context: torch.Tensor, new: torch.Tensor, anchors, lengths) -> torch.Tensor:
    """Fuse two new tokens' features a request, run the block, sample its γ tokens at temperature 1."""
    context[:, -new.shape[1] :] = draft.fuse(new)
    hidden = draft.blocks(context, anchors[:, None], lengths[:, None])[:, 0]
    base, previous, state = draft.base_logits(hidden), anchors, None
    for k in range(draft.config.block_size):
        logits = base[:, k]
        if draft.markov_head is not None:
            bias, state = draft.markov_head.bias(previous, hidden[:, k], state)
            logits = logits + bias
        previous = draft.token_ids(draw(torch.softmax(logits.float(), -1)))
    return previous


def measure(draft: DSparkDraft, requests: int, context_length: int, repetitions: int) -> dict:
    """Milliseconds of a pass for ``requests`` requests: minimum and median."""
    c = draft.config
    context = torch.randn(requests, context_length, c.hidden_size).bfloat16()
    new = torch.randn(requests, 2, c.hidden_size * len(c.target_layer_ids)).bfloat16()
    anchors = torch.randint(0, c.vocab_size, (requests,))
    lengths = torch.full((requests,), context_length)
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        one_pass(draft, context, new, anchors, lengths)
        times.append(1e3 * (time.perf_counter() - start))
    return {"requests": requests, "min_ms": round(min(times), 2), "median_ms": round(statistics.median(times), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = Target(arguments.target, ())
    draft = load_draft(arguments.draft, target.embedding, target.lm_head, torch.bfloat16)
    load = os.getloadavg()[0]
    rows = [measure(draft, r, arguments.context, arguments.repetitions) for r in (1, 4, 8, 16)]
    result = {
        "rows": rows,
        "threads": arguments.threads,
        "context": arguments.context,
        "repetitions": arguments.repetitions,
        "load_average_before": load,
        "layers": draft.config.num_hidden_layers,
        "draft_vocab_size": draft.config.support_size,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
