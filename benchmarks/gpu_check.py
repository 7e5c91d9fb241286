"""Correctness and speed of the kernels on a CUDA machine that has torch and triton, and nothing else of ours installed.

    PYTHONPATH=kernels python benchmarks/gpu_check.py [--scale 1.0] [--vocab 151936]

1. parity: every Triton kernel against the torch path on random shapes (`dspark_kernels.selfcheck`);
2. graphs: a small transformer with ragged attention under `RaggedGraph`, captured and replayed at every tier, against the
   same callable run eagerly over the same buffers: outputs and KV cache, after larger and smaller batches;
3. head: a draft's block captured for batches of every rule, against the same function run eagerly;
4. timings by CUDA events: ours, the same step on the torch path, and the floor of bytes over the copy bandwidth.

One table at the end and an exit code: 0 if 1 to 3 hold, 1 if not, 2 without a CUDA device. Timings never fail a run.
Under 8 minutes. `--device cpu` checks the script itself: parts 2 and 3 without capture, part 1 under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from kernel_times import RESULTS, Shape, law_cases, step_cases

from dspark_kernels import (
    AcceptRule,
    RaggedBatch,
    RaggedGraph,
    RequestRules,
    RequestTensors,
    RowBuffer,
    SamplingRows,
    draft_block,
)
from dspark_kernels.backend import prefer_torch
from dspark_kernels.confidence import ConfidenceHead
from dspark_kernels.markov import HEADS as MARKOV_HEADS
from dspark_kernels.selfcheck import run_checks

REQUESTS, GAMMA, CONTEXT, WIDTH, HEADS, LAYERS, VOCAB = 12, 7, 64, 256, 4, 2, 512
TIERS = (16, 32, 64, 96)
HEAD_TIERS = (1, 2, 4, 8, 16, 32)  # requests


class SmallTransformer(torch.nn.Module):
    """Two layers with a slot-addressed KV cache: enough to see a wrong row, slot, position or stale input."""

    def __init__(self, device: str):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.place = torch.nn.Embedding(CONTEXT, WIDTH)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.mix = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH)
        slots = REQUESTS * CONTEXT + 1  # the last slot belongs to nobody: padding writes there
        self.register_buffer("cache", torch.zeros(LAYERS, 2, slots, WIDTH))
        self.register_buffer("slots_of", torch.arange(REQUESTS * CONTEXT).view(REQUESTS, CONTEXT))
        self.to(device).requires_grad_(False)

    def forward(self, ids, positions, slots, request) -> dict[str, torch.Tensor]:
        """Every row attends to its own request's slots up to its own position: ragged windows in one flat batch."""
        x = self.embed(ids) + self.place(positions)
        visible = torch.arange(CONTEXT, device=x.device) <= positions[:, None]
        for layer in range(LAYERS):
            q, k, v = self.qkv[layer](self.norm(x)).chunk(3, dim=-1)
            self.cache[layer, 0].index_copy_(0, slots, k)
            self.cache[layer, 1].index_copy_(0, slots, v)
            keys, values = self.cache[layer][:, self.slots_of[request]]
            q, keys, values = (t.unflatten(-1, (HEADS, -1)) for t in (q, keys, values))
            scores = torch.einsum("mhd,mshd->mhs", q, keys) / q.shape[-1] ** 0.5
            weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
            x = x + self.mix[layer](torch.einsum("mhs,mshd->mhd", weights, values).flatten(1))
        return {"logits": x @ self.embed.weight.t()}


def random_batch(model: SmallTransformer, requests: int, windows: torch.Tensor, device: str) -> dict[str, torch.Tensor]:
    prefix = torch.randint(0, CONTEXT - GAMMA - 1, (requests,))
    slots = model.slots_of[:requests].cpu().gather(1, prefix[:, None] + torch.arange(GAMMA + 1))
    batch = RaggedBatch.pack(
        torch.randint(0, VOCAB, (requests,)), torch.randint(0, VOCAB, (requests, GAMMA)), windows, prefix, slots
    )
    return {
        "ids": batch.input_ids.to(device),
        "positions": batch.positions.to(device),
        "slots": batch.out_slots.to(device),
        "request": batch.row_to_request.to(device),
    }


def check_graphs(device: str) -> dict:
    """Replays against eager runs of a twin model, batches up and down through the tiers and above the last one."""
    spec = {
        "ids": RowBuffer(),
        "positions": RowBuffer(),
        "slots": RowBuffer(padding=REQUESTS * CONTEXT),
        "request": RowBuffer(),
    }
    models = [SmallTransformer(device) for _ in range(2)]
    graphs = [
        RaggedGraph(model, TIERS, spec, device=device, capture=capture)
        for model, capture in zip(models, (True, False), strict=True)
    ]
    graphs[0].capture_all()
    torch.manual_seed(1)
    worst, batches, tiers = 0.0, 0, set()
    for requests in (1, 12, 2, 9, 12, 3, 12, 1, 6, 4) * 3:
        windows = torch.randint(0, GAMMA + 1, (requests,)) if batches % 3 else torch.full((requests,), GAMMA)
        inputs = random_batch(models[0], requests, windows, device)
        replayed, eager = (graph(**inputs)["logits"].clone() for graph in graphs)
        live = slice(0, REQUESTS * CONTEXT)
        cache = (models[0].cache[:, :, live] - models[1].cache[:, :, live]).abs().max()
        worst = max(worst, float((replayed - eager).abs().max()), float(cache))
        batches += 1
        tiers.add(graphs[0].tier_for(len(inputs["ids"])))
    inputs = {name: torch.cat([value] * 20)[: TIERS[-1] + 9] for name, value in inputs.items()}
    worst = max(worst, float((graphs[0](**inputs)["logits"] - graphs[1](**inputs)["logits"]).abs().max()))
    error = None if worst < 1e-3 and tiers == set(TIERS) else f"differs by {worst}, tiers seen {sorted(tiers)}"
    return {"cases": batches + 1, "worst": worst, "bytes_per_tier": graphs[0].bytes_per_tier, "error": error}


def draft_inputs(requests: int, device: str) -> dict[str, torch.Tensor]:
    """A batch of greedy, sampled, filtered and seeded requests, as the tensors that a captured draft reads."""
    rules = [list(AcceptRule)[int(i)] for i in torch.randint(0, 4, (requests,))]
    rows = SamplingRows.of(
        [0.0 if rule is AcceptRule.GREEDY else 0.9 for rule in rules],
        top_p=[(1.0, 0.8)[i % 2] for i in range(requests)],
    )
    seeds, steps, positions = torch.randint(0, 2**40, (3, requests))
    tensors = RequestTensors.of(rows, RequestRules.of(rules), seeds, steps)
    states = torch.randn(requests, GAMMA, WIDTH)
    inputs = {"states": states, "anchors": seeds % VOCAB, "positions": positions, **vars(tensors)}
    return {name: value.to(device) for name, value in inputs.items()}


def check_head(device: str) -> dict:
    """The head of every kind captured for mixed batches, against the same function run eagerly on the same inputs."""
    differing, cases = [], 0
    padding = vars(RequestTensors.buffers(1, "cpu"))
    for kind, head in MARKOV_HEADS.items():
        for support in (None, torch.randperm(VOCAB, device=device)[: VOCAB // 4]):
            columns = VOCAB if support is None else len(support)
            weight = torch.randn(columns, WIDTH, device=device)
            draft = SimpleNamespace(
                markov_head=head(VOCAB, 32, WIDTH, columns).requires_grad_(False).to(device),
                draft_token_ids=support,
                confidence_head=ConfidenceHead(WIDTH, 32).requires_grad_(False).to(device),
                base_logits=lambda states, weight=weight: states @ weight.t())  # fmt: skip

            def block(states, anchors, positions, draft=draft, **tensors):
                return vars(draft_block(draft, states, anchors, RequestTensors(**tensors), positions))

            rows = {name: RowBuffer((), value.dtype, float(value[0])) for name, value in padding.items()}
            rows |= {
                "states": RowBuffer((GAMMA, WIDTH), torch.float32),
                "anchors": RowBuffer(),
                "positions": RowBuffer(),
            }
            graphs = [RaggedGraph(block, HEAD_TIERS, rows, device=device, capture=capture) for capture in (True, False)]
            graphs[0].capture_all()
            for requests in (1, 8, 3, 32, 5, 17):
                inputs = draft_inputs(requests, device)
                replayed, eager = ({n: v.clone() for n, v in graph(**inputs).items()} for graph in graphs)
                cases += 1
                close = (replayed["confidence"] - eager["confidence"]).abs().max() < 1e-4
                if not (torch.equal(replayed["tokens"], eager["tokens"]) and close):
                    differing.append(f"{kind}, {columns} columns, {requests} requests")
    return {"cases": cases, "error": "; ".join(differing) or None}


def event_ms(function: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds by CUDA events, after three warm-up calls."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def device_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 1 GiB."""
    source = torch.ones(1 << 28, device="cuda")
    sink = torch.empty_like(source)
    return 2 * source.numel() * 4 / (event_ms(lambda: sink.copy_(source), 5) / 1e3)


def timings(vocab: int, deadline: float) -> list[dict]:
    """Ours, the torch path on the GPU, the plain torch way and the floor, until the deadline."""
    bandwidth, rows = device_bandwidth(), []
    for requests in (1, 16, 64):
        shape = Shape(requests, GAMMA, vocab, min(vocab, 32768), hidden=2560, device="cuda")
        for case in law_cases(shape) + step_cases(shape):
            if time.perf_counter() > deadline:
                return rows
            ours = event_ms(case.run)
            with prefer_torch():
                eager = event_ms(case.run, 5)
            plain = None if case.plain is None else event_ms(case.plain, 5)
            floor = case.bytes / bandwidth * 1e3
            rows.append(
                {"name": case.name, "R": requests, "ms": ours, "torch_ms": eager, "plain_ms": plain, "floor_ms": floor}
            )
    return rows


def report(device: str, parity: dict, graphs: dict, head: dict, rows: list[dict]) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = [f"# GPU check: {name}, torch {torch.__version__}", "", "| check | shapes | verdict |", "|---|---|---|"]
    for check, row in parity.items():
        last = "equal" if row["error"] is None else "DIFFERS: " + row["error"].strip().splitlines()[-1]
        lines.append(f"| kernel {check} | {row['cases']} | {last} |")
    last = f"worst {graphs['worst']:.1e}" if graphs["error"] is None else "DIFFERS: " + graphs["error"]
    lines.append(f"| RaggedGraph, bytes per tier {graphs['bytes_per_tier']} | {graphs['cases']} | {last} |")
    last = "equal" if head["error"] is None else "DIFFERS: " + head["error"]
    lines.append(f"| captured head | {head['cases']} | {last} |")
    lines += [
        "",
        "| step | R | ms | torch path ms | plain torch ms | floor ms | times floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain = "" if row["plain_ms"] is None else f"{row['plain_ms']:.3f}"
        lines.append(
            f"| {row['name']} | {row['R']} | {row['ms']:.3f} | {row['torch_ms']:.3f} | {plain} | {row['floor_ms']:.4f} "
            f"| {row['ms'] / row['floor_ms']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of random shapes")
    parser.add_argument("--vocab", type=int, default=151936)
    args = parser.parse_args()
    start = time.perf_counter()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device on this machine", file=sys.stderr)
        return 2
    if args.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--device cpu needs TRITON_INTERPRET=1")
    torch.backends.cuda.matmul.allow_tf32 = False
    parity = run_checks(args.device, args.scale)
    graphs = check_graphs(args.device)
    head = check_head(args.device)
    rows = timings(args.vocab, start + 420) if args.device == "cuda" else []
    text = report(args.device, parity, graphs, head, rows)
    for row in parity.values():
        if row["error"]:
            print(row["error"])
    print(text)
    if args.device == "cuda":
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kernels_gpu.md").write_text(text)
        (RESULTS / "kernels_gpu.json").write_text(
            json.dumps({"parity": parity, "graphs": graphs, "head": head, "timings": rows}, indent=1)
        )
    print(f"{time.perf_counter() - start:.0f} s")
    return int(any(row["error"] for row in (*parity.values(), graphs, head)))


if __name__ == "__main__":
    sys.exit(main())
