"""Log-probabilities of the engine's own sampler, exact for unlikely tokens whoever the neighbours are.

Where some request of a batch samples, the engine reads every row's log-probabilities off as log(softmax(x)) in float32:
below about -87 they lose digits, and below -103 all are minus infinity. Where all are greedy, and in verification, it uses
log_softmax. So the number depended on the neighbours, and prefill and plain decoding differed from a verified row
wherever few tokens are allowed: behind a grammar, a bias, penalties or a low temperature. Here it is log_softmax always.

Three hooks: one notes whether a draw is asked for log-probabilities (nothing else happens where it is not), one takes
them after every adjustment, one puts them in the place of the engine's.
"""

from __future__ import annotations

import torch

from sglang_dspark.contract.hooks import AFTER, BEFORE, Hook

ASKED, EXACT = "dspark_asked", "dspark_exact"


def _note(sampler, logits_output, sampling_info, return_logprob, *args, logprob_logits=None, **kwargs) -> None:
    from sglang.srt.environ import envs

    # A watermark brings logits of its own for this, and original log-probabilities are taken before the temperature.
    inexact = (
        logprob_logits is None and not sampling_info.is_all_greedy and not envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()
    )
    setattr(sampler, ASKED, bool(return_logprob) and inexact)


def _take(logits, sampler, _, sampling_info) -> None:
    if getattr(sampler, ASKED, False):
        setattr(sampler, ASKED, False)
        setattr(sampler.output_logprob_processor, EXACT, torch.log_softmax(logits / sampling_info.temperatures, dim=-1))


def _replace(processor, logprobs, *args, **kwargs):
    exact = getattr(processor, EXACT, None)
    if exact is None:
        return None
    setattr(processor, EXACT, None)
    return (processor, exact, *args), kwargs


HOOKS = (
    Hook(
        "sglang.srt.layers.sampler:Sampler.forward",
        BEFORE,
        _note,
        (
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
            "logprob_logits",
        ),
    ),
    Hook("sglang.srt.layers.sampler:Sampler._preprocess_logits", AFTER, _take, ("logits", "sampling_info")),
    Hook(
        "sglang.srt.layers.logprob_processor:OutputLogprobProcessor.compute_logprobs",
        BEFORE,
        _replace,
        ("logprobs", "top_logprobs_nums", "token_ids_logprobs", "batch_next_token_ids"),
    ),
)
