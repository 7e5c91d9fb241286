"""Whole steps of the worker in the child: the same requests through a GPU's half and through the CPU's half.

The batch is what SGLang's scheduler hands over: with a GPU's half under overlap it holds no lengths on the host, and the
requests' own records are one step old.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from tests.accelerator.engine import GAMMA, engine

# A stair at eight rows: the planner verifies some drafts of three requests and has to choose which.
COST = {"t0": 0.05, "context": 0.0, "tiers": [], "whole": GAMMA, "block": [[4, 32], [0.002, 0.004]]}
COST |= {"alpha": [[1, 8], [0, 0.01]], "theta": [[1, 40], [0, 0.39]], "head": [[1, 32], [0.001, 0.004]]}


@dataclass(frozen=True)
class Asked:
    """One request; `tokens` before its first step. Penalties as frequency_penalty."""

    temperature: float = 0.0
    most: int | None = None  # its own bound on windows
    seed: int | None = None
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 0.0
    tokens: int = 5


@dataclass(frozen=True)
class Case:
    """`batches`: which requests run at each step. `settings`: of DSparkConfig. `kernels`: our Triton kernels as well."""

    requests: tuple[Asked, ...]
    batches: tuple[tuple[int, ...], ...]
    settings: tuple[tuple[str, object], ...] = (("verify_mode", "static"),)
    kernels: bool = False


@dataclass
class Told:
    """What each step returned, whether the target's graph ran, and the KV [layers, tokens, ...] at the end."""

    lengths: list[list[int]]
    tokens: list[list[list[int]]]
    windows: list[list[int]]
    in_graph: list[bool]
    kv: list[list[torch.Tensor]]


class Loose(SimpleNamespace):
    """A record of the engine's: what was not set is None."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


class Running:
    """A request between steps, as the scheduler keeps it."""

    def __init__(self, index: int, asked: Asked) -> None:
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(
            temperature=asked.temperature, max_new_tokens=40, sampling_seed=asked.seed, top_k=asked.top_k,
            top_p=asked.top_p, min_p=asked.min_p, frequency_penalty=asked.penalty,
            custom_params=None if asked.most is None else {"dspark": {"max_window": asked.most}},
        )  # fmt: skip
        params.normalize(None)
        kv = Loose(kv_committed_len=asked.tokens)
        self.req = Loose(
            rid=f"r{index}", sampling_params=params, output_ids=[], kv=kv, origin_input_ids=[0] * asked.tokens
        )
        self.row, self.length, self.anchor, self.late = index + 1, asked.tokens, 11 + 46 * index, []

    def follow(self, length: int, tokens: list[int], overlap: bool) -> None:
        """Take over a step's result; under overlap the scheduler reads it after the next step has begun."""
        self.length, self.anchor = length, tokens[-1]
        self.late.append((length, tokens))
        while len(self.late) > overlap:
            self.req.kv.kv_committed_len, seen = self.late.pop(0)
            self.req.output_ids += seen


def run(case: Case, accelerated: bool) -> Told:
    made = engine()
    made.reset()
    made.capture(0)
    made.choose(accelerated)
    _begin(made.worker, case)
    everybody = [Running(i, asked) for i, asked in enumerate(case.requests)]
    told = Told([], [], [], [], [])
    with _our_kernels(case.kernels and accelerated), torch.inference_mode():
        for members in case.batches:
            _step(made, [everybody[i] for i in members], accelerated, told)
        made.worker.drafter.context.catch_up()
    for pool in made.pools:
        kept = []
        for one in everybody:
            slots = made.requests.req_to_token[one.row, : one.length].long()
            kept += [b[slots].clone() for i in range(pool.layer_num) for b in pool.get_kv_buffer(i)]
        told.kv.append(kept)
    return told


def _begin(worker, case: Case) -> None:
    """A worker that has learned nothing."""
    from dspark_scheduler import AdditiveCostModel
    from sglang_dspark.learning.meter import Meter
    from sglang_dspark.settings.config import DSparkConfig
    from sglang_dspark.step import types
    from sglang_dspark.step.speculation import Speculation

    types._arrivals = itertools.count()
    config = DSparkConfig.from_dict({"calibration": "off", **dict(case.settings)})
    worker.speculation = Speculation(config, worker.drafter, worker.speculation.fingerprint, learning=False)
    worker.speculation.cost = AdditiveCostModel.from_dict(COST)
    worker.roster, worker.steps, worker.meter = None, 0, Meter(GAMMA)
    worker.reports._waiting.clear()
    worker._untimed.clear()


def _step(made, members: list[Running], accelerated: bool, told: Told) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lens = torch.tensor([one.length for one in members])
    rows = torch.tensor([one.row for one in members])
    batch = Loose(
        reqs=[one.req for one in members],
        seq_lens=lens,
        seq_lens_cpu=None if accelerated else lens.clone(),
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        spec_info=Loose(bonus_tokens=torch.tensor([one.anchor for one in members])),
        forward_mode=ForwardMode.DECODE,
        spec_algorithm=made.runners[0].spec_algorithm,
        sampling_info=Loose(has_custom_logit_processor=False),
        device="cpu",
    )
    result = made.worker.forward_batch_generation(batch)
    lengths = result.accept_lens.tolist()
    tokens = [row[:n] for row, n in zip(result.next_token_ids.view(len(members), -1).tolist(), lengths)]
    assert torch.equal(result.new_seq_lens, lens + result.accept_lens)
    assert result.next_draft_input.bonus_tokens.tolist() == [row[-1] for row in tokens]
    told.lengths.append(lengths)
    told.tokens.append(tokens)
    told.windows.append((result.cap_lens - 1).tolist())
    told.in_graph.append(bool(result.can_run_cuda_graph))
    waits = any(one.req.sampling_params.frequency_penalty for one in members)  # such steps wait for the last result
    for one, row in zip(members, tokens):
        one.follow(one.length + len(row), row, overlap=accelerated and not waits)


@contextlib.contextmanager
def _our_kernels(on: bool):
    """`dspark_kernels` takes its Triton path, under the interpreter."""
    import importlib
    import pkgutil

    import dspark_kernels

    modules = [
        importlib.import_module(f"dspark_kernels.{m.name}") for m in pkgutil.iter_modules(dspark_kernels.__path__)
    ]
    holders = [module for module in modules if hasattr(module, "use_triton")]
    kept = [module.use_triton for module in holders]
    if on:
        for module in holders:
            module.use_triton = lambda tensor: True
    try:
        yield
    finally:
        for module, function in zip(holders, kept):
            module.use_triton = function


def both(case: Case) -> tuple[Told, Told, list[float]]:
    """A GPU's half, the CPU's half, and the largest difference of their KV, target and draft."""
    gpu, cpu = run(case, True), run(case, False)
    apart = []
    if gpu.tokens == cpu.tokens:  # else other tokens have other keys
        apart = [max(float((a - b).abs().max()) for a, b in zip(x, y)) for x, y in zip(gpu.kv, cpu.kv)]
    return replace(gpu, kv=[]), replace(cpu, kv=[]), apart
