"""Measuring this server's own step: real forwards of target and draft at start-up, on slot 0, before any request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from dspark_kernels.sampling import SamplingRows
from dspark_kernels.types import AcceptRule, RequestRules, StepNoise
from dspark_scheduler import fit_cost_model
from sglang_dspark.step.drafter import Drafter
from sglang_dspark.step.types import BlockVerifyInput
from sglang_dspark.step.verifier import Verifier

logger = logging.getLogger(__name__)

REQUESTS = (1, 2, 4, 8, 16, 32)
MORE_REQUESTS = (64, 128, 256)  # probed as well where there is an accelerator
CONTEXT = 128  # tokens before each probe's rows: a short chat
MIN_PROBES = 4
HOST_SECONDS = 0.002  # what the engine spends around a forward; steps of real traffic correct it


def measure(drafter: Drafter, verifier: Verifier, *, seconds: float = 10.0, max_requests: int = 32) -> dict:
    """Time forwards of the target over (requests, rows), the draft's backbone and its head, for about `seconds`.

    Returns: a body for `ServerCost.from_dict`.
    """
    gamma = drafter.gamma
    sizes = [r for r in REQUESTS + (() if verifier.on_cpu else MORE_REQUESTS) if r <= max_requests] or [1]
    points = [(r, r + round(r * gamma * share)) for r in sizes for share in (0, 0.2, 0.5, 1)]
    points = sorted(set(points))
    started = time.perf_counter()

    def quickest(probes: dict, share: float) -> dict:
        """Ranks probe the same shapes equally often: the first one's clock says when the time is up."""
        left = started + share * seconds
        return _quickest(probes, lambda: drafter.ranks.goes_on(time.perf_counter() <= left))

    target = quickest({p: (lambda p=p: run_target(verifier, *p)) for p in points}, 0.7)
    lengths = (1, gamma) if drafter.short_blocks and gamma > 1 else (gamma,)
    shapes = {
        r * length: (r, length) for length in lengths for r in sizes
    }  # of two shapes of equal rows the longer block
    block = quickest({n: (lambda s=shape: run_backbone(drafter, *s)) for n, shape in sorted(shapes.items())}, 0.85)
    slots = sorted({(r, k) for r in sizes for k in {1, (gamma + 1) // 2, gamma}})
    head = quickest({p: (lambda p=p: run_head(drafter, *p)) for p in slots}, 1.0)
    model = fit(target, head, CONTEXT, verifier.tiers)
    logger.info(
        "measured the step's cost with %d probes in %.1f s",
        len(target) + len(block) + len(head),
        time.perf_counter() - started,
    )
    probes = sorted(block)
    return {
        "model": model.to_dict(),
        "block": [[float(n) for n in probes], [float(block[n]) for n in probes]],
        "gamma": gamma,
        "short": drafter.short_blocks,
    }


def fit(
    target: dict[tuple[int, int], float], head: dict[tuple[int, int], float], context: int, tiers: tuple[int, ...] = ()
):
    """An AdditiveCostModel from measured seconds: target by (requests, rows), head by (requests, length).

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
        draft_knots=sorted({r * k for r, k in head})[::2],
        tiers=tiers,
    )


def _quickest(probes: dict, goes_on: Callable[[], bool]) -> dict:
    """The quickest run of each probe or of any larger one: what else the machine does can only add to it.

    Every probe runs once to warm up and once to be timed, and more rounds follow while time is left. On a machine so
    busy that the first round does not end in time, the probes that are left out are the ones in between.
    """
    best: dict = {}
    order = sorted(probes, key=lambda key: _bits(list(probes).index(key), len(probes)))
    for round_number in range(8):
        for key in order:
            if len(best) >= MIN_PROBES and not goes_on():
                return lower_envelope(best)
            if round_number == 0:
                probes[key]()  # the first call of a shape allocates and warms up
            best[key] = min(best.get(key, float("inf")), _timed(probes[key]))
    return lower_envelope(best)


def lower_envelope(seconds: dict) -> dict:
    """Never above the time of a probe that does at least as much; keys are sizes, or tuples of sizes."""

    def least(key) -> float:
        return min(s for other, s in seconds.items() if np.all(np.asarray(other) >= np.asarray(key)))

    return {key: least(key) for key in seconds}


def _bits(index: int, count: int) -> int:
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


def run_target(verifier: Verifier, requests: int, rows: int) -> None:
    """One verification of `rows` rows over `requests` requests, all of whose slots are the padding slot."""
    share, extra = divmod(rows, requests)
    counts = [share + (r < extra) for r in range(requests)]
    runner, layout = verifier.runner, verifier.layout(counts)
    positions = torch.cat([CONTEXT + torch.arange(n, device=runner.device) for n in counts])
    if layout is not None:
        positions = torch.nn.functional.pad(positions, (0, layout.graph_num_tokens - rows))
    _forward(runner, counts, positions, verifier.width, CaptureHiddenMode.FULL, causal=True, layout=layout)


def run_backbone(drafter: Drafter, requests: int, length: int) -> None:
    """The draft's forward over blocks of `length`, and the context of one committed token per request."""
    positions = (CONTEXT + torch.arange(length, device=drafter.runner.device)).repeat(requests)
    _forward(drafter.runner, [length] * requests, positions, length, CaptureHiddenMode.NULL, causal=False)
    width = drafter.config.hidden_size * len(drafter.config.target_layer_ids)
    features = torch.ones(requests, width, dtype=drafter.model.fc.weight.dtype, device=drafter.runner.device)
    drafter.absorb(features, positions[:requests], torch.zeros_like(positions[:requests]))


def run_head(drafter: Drafter, requests: int, length: int) -> None:
    """The sequential head over `length` tokens of `requests` requests that sample at temperature 1."""
    device = drafter.runner.device
    zeros = torch.zeros(requests, dtype=torch.int64, device=device)
    noise = StepNoise.draw(
        zeros, zeros, zeros, drafter.gamma, RequestRules.of([AcceptRule.BLOCK] * requests, device=device)
    )
    states = torch.ones(
        requests, drafter.gamma, drafter.config.hidden_size, dtype=drafter.model.fc.weight.dtype, device=device
    )
    step = _HeadStep(zeros, SamplingRows.of([1.0] * requests, device=device), noise, requests)
    drafter.propose(states, step, length)


class _HeadStep:
    """The four fields of a Step that sampling reads."""

    def __init__(self, anchors, rows, noise, size) -> None:
        self.anchors, self.rows, self.noise, self.size = anchors, rows, noise, size


@torch.inference_mode()
def _forward(
    runner,
    counts: list[int],
    positions: torch.Tensor,
    width: int,
    capture,
    *,
    causal: bool,
    layout: RaggedVerifyLayout | None = None,
) -> None:
    requests, device = len(counts), runner.device
    ids = torch.ones_like(positions)
    pool_rows = torch.arange(requests, device=device)
    lens = torch.full((requests,), CONTEXT, dtype=torch.int64, device=device)
    spec = BlockVerifyInput(
        draft_token=ids,
        positions=positions,
        draft_token_num=width,
        capture_hidden_mode=capture,
        rows_per_request=counts,
        causal=causal,
        ragged_verify_layout=layout,
    )
    forward = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=requests,
        input_ids=ids,
        req_pool_indices=pool_rows,
        seq_lens=lens,
        out_cache_loc=None,
        seq_lens_sum=CONTEXT * requests,
        seq_lens_cpu=lens.cpu(),
        positions=positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=spec,
        capture_hidden_mode=capture,
        global_num_token_non_padded_cpu=len(ids),
    )
    plan = runner.kv_index_translator.plan(
        req_pool_indices=pool_rows,
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        write_virtual=torch.zeros_like(positions),
        read_extent=width,
    )
    plan.bind(forward, runner.kv_index_translator)
    runner.forward(forward)
