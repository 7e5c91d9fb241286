"""What a plain decode step costs on a CPU beyond the model's bare forward, at several concurrencies and lengths.

    python benchmarks/cpu_overhead.py [--cpu-time] [--model PATH] [--tokens 48] [--out benchmarks/results/cpu_overhead.json]

*Bare* is transformers' forward of R sequences of one token, without a cache: embedding, layers, norms and lm_head on R
rows, and nothing else. *Step* is the time per token of SGLang's whole loop (scheduler, attention over the pool, sampler,
detokenizer, messages) when R requests decode together: the time of N + 1 new tokens less that of one, over N; the
quickest of three. Bare is measured before and after (A, B, A2), and both are kept. Needs a quiet machine: the load average
is written beside the figures. With `--cpu-time` both are processor time of all processes on one thread instead, which a
busy machine disturbs far less; on more threads the wall time of either is smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import psutil
import torch

CASES = ((1, 64), (1, 448), (4, 64), (8, 64), (16, 64), (16, 192), (16, 448))
REPEATS = 3


def bare_forward(path: str, dtype: torch.dtype, rows: list[int]) -> dict[int, float]:
    """Milliseconds of one forward without a cache, by rows: the median of six times three."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    milliseconds = {}
    for count in rows:
        ids = torch.full((count, 1), 100)
        with torch.inference_mode():
            times = [_time(lambda ids=ids: _repeat(model, ids)) / REPEATS for _ in range(8)][2:]
        milliseconds[count] = 1e3 * statistics.median(times)
    return milliseconds


def _repeat(model, ids: torch.Tensor) -> None:
    for _ in range(REPEATS):  # processor time is counted in hundredths of a second
        model(input_ids=ids, use_cache=False)


def _time(action) -> float:
    start = clock()
    action()
    return clock() - start


def processor_seconds() -> float:
    """User and system time of this process and all its descendants."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


clock = time.perf_counter


def server_steps(path: str, dtype: str, tokens: int) -> dict[tuple[int, int], float]:
    """Milliseconds per decode step of the whole engine, by (requests, prompt length)."""
    import sglang

    engine = sglang.Engine(model_path=path, dtype=dtype, log_level="error", skip_server_warmup=True)
    try:
        return {(r, n): 1e3 * _step_seconds(engine, _prompts(r, n), tokens) for r, n in CASES}
    finally:
        engine.shutdown()


def _prompts(requests: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(requests * 1000 + length)
    return torch.randint(1000, 20000, (requests, length), generator=generator).tolist()


def _step_seconds(engine, prompts: list[list[int]], tokens: int) -> float:
    def run(count: int) -> float:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        return _time(lambda: engine.generate(input_ids=prompts, sampling_params=sampling))

    run(2)  # the prompts' keys and values are in the radix cache from here on
    return min((run(tokens + 1) - run(1)) / tokens for _ in range(REPEATS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint's folder; the demo target otherwise")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_overhead.json"))
    parser.add_argument("--cpu-time", action="store_true", help="processor time on one thread, for a busy machine")
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock = processor_seconds
        os.environ["OMP_NUM_THREADS"] = "1"  # for the engine's processes
        torch.set_num_threads(1)
    from sglang_dspark.cpu import default_dtype

    if args.model is None:
        from sglang_dspark.demo.target import ensure_demo_target

        args.model = str(ensure_demo_target())
    dtype, rows = default_dtype(), sorted({r for r, _ in CASES})
    load_before = os.getloadavg()[0]
    before = bare_forward(args.model, getattr(torch, dtype), rows)
    steps = server_steps(args.model, dtype, args.tokens)
    after = bare_forward(args.model, getattr(torch, dtype), rows)
    print(f"{'R':>3} {'prompt':>6} {'bare A':>8} {'bare A2':>8} {'step':>8} {'over':>8}   ms")
    results = []
    for (r, n), step in steps.items():
        over = step - min(before[r], after[r])
        results.append(
            {
                "requests": r,
                "prompt": n,
                "bare_before_ms": before[r],
                "bare_after_ms": after[r],
                "step_ms": step,
                "over_ms": over,
            }
        )
        print(f"{r:>3} {n:>6} {before[r]:>8.1f} {after[r]:>8.1f} {step:>8.1f} {over:>8.1f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps(
            {
                "model": Path(args.model).name,
                "dtype": dtype,
                "threads": torch.get_num_threads(),
                "tokens": args.tokens,
                "clock": "processor time" if args.cpu_time else "wall time",
                "load_average_before": load_before,
                "load_average_after": os.getloadavg()[0],
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "torch": torch.__version__,
                "results": results,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
