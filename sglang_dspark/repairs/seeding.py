"""Seeded sampling in the engine's own sampler: prefill, plain servers and plain steps draw what verification draws.

A request that gives a seed gets argmax(log p + g(seed, position, token id)) everywhere (design, section 2, `coupled`),
so its text is a function of prompt, parameters and seed, whoever its neighbours are and whatever the verify mode. The
engine's seeded sampler is left aside: it needs deterministic inference, and a neighbour's filter changes its noise.
Choice i of a request with n > 1 uses seed + i.

A seed in the Ollama routes' options, which the engine answers with a 500, is one too.

Three hooks: one notes which rows of a forward are seeded (nothing else happens where none is), one keeps those rows'
logits after every adjustment, one puts the race's winners over the engine's own draws before log-probabilities are
read off.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dspark_kernels.gumbel import seeded_sample
from dspark_kernels.types import SamplingRows
from sglang_dspark.contract.hooks import AFTER, AROUND, BEFORE, Hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

ATTRIBUTE = "dspark_seeded"
SEED_SPACE = 1 << 64


@dataclass
class SeededRows:
    """The seeded rows of one forward: `index` int64 [S] into the batch, `seeds` int64 [S], their parameters, and,
    between the engine's last adjustment and its draw, their `logits` [S, V]."""

    index: torch.Tensor
    seeds: torch.Tensor
    rows: SamplingRows
    logits: torch.Tensor | None = None

    @classmethod
    def of(cls, reqs: list[Req], device: torch.device) -> SeededRows | None:
        """The rows whose request gave a seed and samples (a greedy one has nothing to draw); None where there are none."""
        seeded = [
            (i, r.sampling_params)
            for i, r in enumerate(reqs)
            if r.sampling_params.sampling_seed is not None and r.sampling_params.top_k != 1
        ]
        if not seeded:
            return None
        params = [p for _, p in seeded]
        rows = SamplingRows.of(
            [p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            device=device,
        )
        return cls(
            torch.tensor([i for i, _ in seeded], device=device),
            torch.tensor([p.sampling_seed for p in params], dtype=torch.int64, device=device),
            rows,
        )


def _note_seeds(forward_batch, cls, batch, model_runner, **kwargs) -> None:
    info = forward_batch.sampling_info
    if info is not None and not model_runner.is_draft_worker:
        setattr(info, ATTRIBUTE, SeededRows.of(batch.reqs, forward_batch.seq_lens.device))


def _keep_logits(logits, sampler, _, sampling_info) -> None:
    """The engine turns its logits into probabilities in place; ours must be those that verification sees."""
    seeded = getattr(sampling_info, ATTRIBUTE, None)
    if seeded is not None:
        seeded.logits = logits.index_select(0, seeded.index)


def _draw_seeded(original, sampler, probs, sampling_info, positions, simple_sampling_case):
    tokens, capture = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    seeded = getattr(sampling_info, ATTRIBUTE, None)
    if seeded is None:
        return tokens, capture
    drawn = seeded_sample(seeded.logits, seeded.rows, seeded.seeds, positions.index_select(0, seeded.index).long() + 1)
    seeded.logits = None
    tokens = tokens.clone()
    tokens[seeded.index] = drawn.to(tokens.dtype)
    # The capture of a sampling mask recorded the weight of the engine's own draw; without it, it is looked up.
    return tokens, None if capture is None else capture._replace(selected_weight=None)


def _rename_seed(params: dict, *args, **kwargs) -> dict:
    if "seed" in params:
        params["sampling_seed"] = params.pop("seed")
    return params


class Choices:
    """Numbers the choices of a seeded request with n > 1, as they leave for the scheduler: choice i takes seed + i.

    The engine sends n shallow copies of one tokenised request, which share one parameters object; an entry holds that
    object, so its identity is nobody else's while it is counted. Requests that failed half-way are forgotten in turn.
    """

    LIMIT = 4096

    def __init__(self) -> None:
        self._sent: OrderedDict[int, tuple[object, int]] = OrderedDict()

    def number(self, manager, tokenized) -> None:
        """BEFORE hook on the sending of one request."""
        params = getattr(tokenized, "sampling_params", None)
        # The copy that only warms the prefix cache generates nothing and counts as no choice.
        if params is None or params.sampling_seed is None or params.n <= 1 or params.max_new_tokens == 0:
            return
        if params.beam_width is not None and params.beam_width > 1:
            return
        choice = self._sent.pop(id(params), (params, 0))[1]
        if choice + 1 < params.n:
            self._sent[id(params)] = (params, choice + 1)
            if len(self._sent) > self.LIMIT:
                self._sent.popitem(last=False)
        tokenized.sampling_params = _with_seed(params, params.sampling_seed + choice)


def _with_seed(params, seed: int):
    """A copy of the parameters with another seed, wrapped into 64 signed bits as the engine's check demands."""
    import copy

    copied = copy.copy(params)
    copied.sampling_seed = (seed + SEED_SPACE // 2) % SEED_SPACE - SEED_SPACE // 2
    return copied


HOOKS = (
    Hook(
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new",
        AFTER,
        _note_seeds,
        (
            "batch",
            "model_runner",
            "capture_hidden_mode",
            "return_hidden_states_before_norm",
            "extend_position_info",
            "spec_mrope_positions",
            "kv_loc_plan",
            "write_cols",
        ),
    ),
    Hook("sglang.srt.layers.sampler:Sampler._preprocess_logits", AFTER, _keep_logits, ("logits", "sampling_info")),
    Hook(
        "sglang.srt.layers.sampler:Sampler._sample_from_probs",
        AROUND,
        _draw_seeded,
        ("probs", "sampling_info", "positions", "simple_sampling_case"),
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._send_one_request",
        BEFORE,
        Choices().number,
        ("tokenized_obj",),
    ),
    Hook(
        "sglang.srt.entrypoints.ollama.serving:OllamaServing._convert_options_to_sampling_params",
        AFTER,
        _rename_seed,
        ("options",),
    ),
)
