"""The speculative numbers in a request's `meta_info`: rates over what was verified, and a sum that adds up.

The engine divides by gamma x steps, whatever was verified, and counts drafts behind the request's end as if they had
been returned. Here `spec_num_proposed_drafts` is the number of drafts inside the request's windows, the rate divides by
it, and `spec_num_cut_tokens` is what stood behind the end, so that for a finished request

    spec_num_correct_drafts + spec_verify_ct + prefills - spec_num_cut_tokens = completion_tokens

with one bonus token per verification and one token per prefill (1, and 1 more for every retraction).
"""

from __future__ import annotations

from sglang_dspark.contract.hooks import AFTER, Hook
from sglang_dspark.settings.flags import speculates


def _recount(_, manager, meta_info: dict, recv_obj, i: int) -> None:
    if not speculates(manager.server_args):
        return
    steps = meta_info.get("spec_verify_ct")
    if not steps:
        return
    accepted = meta_info["spec_num_correct_drafts"]
    verified = recv_obj.spec_num_cap_tokens[i] - steps  # a window and its anchor row make one cap
    meta_info["spec_num_proposed_drafts"] = verified
    meta_info["spec_accept_rate"] = accepted / verified if verified else 0.0
    meta_info["spec_accept_length"] = 1 + accepted / steps
    if meta_info.get("finish_reason") is not None:
        prefills = 1 + recv_obj.retraction_counts[i]
        meta_info["spec_num_cut_tokens"] = accepted + steps + prefills - recv_obj.completion_tokens[i]


HOOKS = (
    Hook(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._calculate_spec_decoding_metrics",
        AFTER,
        _recount,
        ("meta_info", "recv_obj", "i"),
    ),
)
