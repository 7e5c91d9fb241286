"""Measuring this server's own step: real forwards of target and draft at start-up, on slot 0, before any request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from dspark_kernels.random import draw_noise
from dspark_kernels.types import AcceptRule, RequestRules, SamplingRows, StepNoise
from dspark_scheduler import AdditiveCostModel, fit_cost_model
from sglang_dspark.step.drafter import Drafter
from sglang_dspark.step.forward import CONTEXT, BlockVerifyInput, block_input, probe_rows, run_rows
from sglang_dspark.step.head import BlockRun
from sglang_dspark.step.ranks import Ranks
from sglang_dspark.step.verifier import Verifier

logger = logging.getLogger(__name__)

REQUESTS = (1, 2, 4, 8, 16, 32)
MORE_REQUESTS = (64, 128, 256)  # probed as well where there is an accelerator
MIN_PROBES = 4
ROUNDS = 8
HOST_SECONDS = 0.002  # what the engine spends around a forward; steps of real traffic correct it


def measure(
    drafter: Drafter, verifier: Verifier, *, seconds: float = 10.0, max_requests: int = 32
) -> AdditiveCostModel:
    """Time forwards of the target over (requests, rows), of the draft's block and of its head, for about `seconds`."""
    gamma = drafter.gamma
    sizes = [r for r in REQUESTS + (() if verifier.on_cpu else MORE_REQUESTS) if r <= max_requests] or [1]
    points = sorted({(r, r + round(r * gamma * share)) for r in sizes for share in (0, 0.2, 0.5, 1)})
    timer = _Timer(drafter.ranks, time.perf_counter())
    target = timer.quickest({p: (lambda p=p: run_target(verifier, *p)) for p in points}, 0.7 * seconds)
    lengths = (1, gamma) if drafter.short_blocks and gamma > 1 else (gamma,)
    shapes = {
        r * length: (r, length) for length in lengths for r in sizes
    }  # of two shapes of equal rows the longer block
    blocks = {n: (lambda s=shape: run_block(drafter, *s)) for n, shape in sorted(shapes.items())}
    block = timer.quickest(blocks, 0.85 * seconds)
    head = {}
    if drafter.graph is None:  # else the block's forward is the head's too
        slots = sorted({(r, k) for r in sizes for k in {1, (gamma + 1) // 2, gamma}})
        head = timer.quickest({p: (lambda p=p: run_head(drafter, *p)) for p in slots}, seconds)
    model = fit(target, head, CONTEXT, verifier.tiers)
    logger.info(
        "measured the step's cost with %d probes in %.1f s",
        len(target) + len(block) + len(head),
        time.perf_counter() - timer.started,
    )
    probes = sorted(block)
    return replace(model, block=(probes, [block[n] for n in probes]), whole=None if drafter.short_blocks else gamma)


def fit(
    target: dict[tuple[int, int], float],
    head: dict[tuple[int, int], float],
    context: int,
    tiers: tuple[int, ...] = (),
) -> AdditiveCostModel:
    """A cost model from measured seconds: target by (requests, rows), head by (requests, length), which may be empty.

    `tiers` are the rows that steps are padded to, if they are.
    """
    rows = [(r, m, s + HOST_SECONDS, context * r, 0) for (r, m), s in target.items()]
    rows += [(0, 0, s, 0, r * k) for (r, k), s in head.items()]
    requests, tokens, times, contexts, slots = (list(column) for column in zip(*rows))
    knots = sorted({m for _, m in target})
    return fit_cost_model(
        requests,
        tokens,
        times,
        context=contexts,
        slots=slots,
        theta_knots=knots[:: max(1, len(knots) // 12)] + [knots[-1] + 1],
        head_knots=sorted({r * k for r, k in head})[::2],
        tiers=tiers,
    )


class _Timer:
    """Runs probes against a clock that all ranks share: a probe holds collectives, so every rank must run the same ones."""

    def __init__(self, ranks: Ranks, started: float) -> None:
        self.ranks, self.started = ranks, started

    def quickest(self, probes: dict, deadline: float) -> dict:
        """The quickest run of each probe or of any larger one: what else the machine does can only add to it.

        Every probe runs once to warm up and once to be timed, and more rounds follow until the deadline. On a machine so
        busy that the first round does not end in time, the probes that are left out are the ones in between.
        """
        best: dict = {}
        keys = list(probes)
        order = sorted(keys, key=lambda key: _coarse_first(keys.index(key), len(keys)))
        for round_number in range(ROUNDS):
            for key in order:
                if len(best) >= MIN_PROBES and not self._goes_on(deadline):
                    return lower_envelope(best)
                if round_number == 0:
                    probes[key]()  # the first call of a shape allocates and warms up
                best[key] = min(best.get(key, float("inf")), _timed(probes[key]))
        return lower_envelope(best)

    def _goes_on(self, deadline: float) -> bool:
        return self.ranks.goes_on(time.perf_counter() - self.started <= deadline)


def lower_envelope(seconds: dict) -> dict:
    """Never above the time of a probe that does at least as much; keys are sizes, or tuples of sizes."""

    def least(key) -> float:
        return min(s for other, s in seconds.items() if np.all(np.asarray(other) >= np.asarray(key)))

    return {key: least(key) for key in seconds}


def _coarse_first(index: int, count: int) -> int:
    """An order that visits a range coarsely first: both ends, the middle, the quarters, ..."""
    if index in (0, count - 1):
        return index - count
    return int(f"{index:012b}"[::-1], 2)


def _timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class _Drawn:
    """What drawing reads of a step."""

    size: int
    anchors: torch.Tensor
    rows: SamplingRows
    noise: StepNoise


def run_target(verifier: Verifier, requests: int, rows: int) -> None:
    """One verification of `rows` rows over `requests` requests, all of whose slots are the padding slot."""
    share, extra = divmod(rows, requests)
    counts = [share + (r < extra) for r in range(requests)]
    positions = torch.cat([CONTEXT + torch.arange(n) for n in counts]).to(verifier.runner.device)
    layout = None
    if verifier.tiers:
        tier = verifier.padded(requests, rows)
        positions = torch.nn.functional.pad(positions, (0, tier - rows))
        lens = torch.tensor(counts, device=positions.device)
        layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=lens, graph_num_tokens=tier)
    probe = probe_rows(positions, requests, extra=None if verifier.on_cpu else torch.tensor(counts))
    spec = BlockVerifyInput(
        draft_token=probe.ids,
        positions=positions,
        draft_token_num=verifier.width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        rows_per_request=counts,
        ragged_verify_layout=layout,
    )
    run_rows(verifier.runner, probe, spec, verifier.width)


def run_block(drafter: Drafter, requests: int, length: int) -> None:
    """The draft's forward over blocks of `length`, and the context of one committed token per request."""
    positions = (CONTEXT + torch.arange(length, device=drafter.runner.device)).repeat(requests)
    probe = probe_rows(positions, requests, extra=None if drafter.on_cpu else length)
    run_rows(drafter.runner, probe, block_input(probe, length), length)
    width = drafter.config.hidden_size * len(drafter.config.target_layer_ids)
    features = torch.ones(requests, width, dtype=drafter.model.fc.weight.dtype, device=positions.device)
    with torch.inference_mode():
        drafter.context.write(features, positions[:requests], torch.zeros_like(positions[:requests]))


@torch.inference_mode()
def run_head(drafter: Drafter, requests: int, length: int) -> None:
    """The sequential head over `length` tokens of `requests` requests that sample at temperature 1."""
    device = drafter.runner.device
    zeros = torch.zeros(requests, dtype=torch.int64, device=device)
    rules = RequestRules.of([AcceptRule.BLOCK] * requests, device=device)
    shape = (requests, drafter.gamma, drafter.config.hidden_size)
    states = torch.ones(shape, dtype=drafter.model.fc.weight.dtype, device=device)
    noise = draw_noise(zeros, zeros, zeros, drafter.gamma, rules)
    step = _Drawn(requests, zeros, SamplingRows.of([1.0] * requests, device=device), noise)
    run = BlockRun(states)
    drafter.head.confidence(run, step, drafter.head.sample(run, step, length))
