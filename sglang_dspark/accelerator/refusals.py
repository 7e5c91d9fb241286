"""Starts that an accelerator cannot serve with our algorithm: one row per flag, one sentence with the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dspark.settings.config import ConfigError

OFF = "or --verify-mode off for plain decoding"


@dataclass(frozen=True)
class Refusal:
    """`applies` says whether the field's value hits; `reason` is the sentence, with the value as ``{}``."""

    field: str
    applies: Callable[[Any], bool]
    reason: str


def _more_than_one(value: Any) -> bool:
    return (value or 1) > 1


STARTS = (
    Refusal("pp_size", _more_than_one, "--pp-size {}: the draft reads layers of the target that one rank must hold; use "
            f"--tp-size, {OFF}"),
    Refusal("enable_dp_attention", bool, "--enable-dp-attention: ranks with idle batches are not drafted for; use "
            f"--dp-size with a router, {OFF}"),
    Refusal("attn_dp_size", _more_than_one, "--attn-dp-size {}: ranks with idle batches are not drafted for; use "
            f"--dp-size with a router, {OFF}"),
    Refusal("attn_cp_size", _more_than_one, f"--attn-cp-size {{}}: blocks are not split over ranks; use --tp-size, {OFF}"),
    Refusal("enable_prefill_cp", bool, f"--enable-prefill-cp: prompts are not split over ranks; leave the flag out, {OFF}"),
    Refusal("dcp_size", _more_than_one, f"--dcp-size {{}}: the draft's KV is not split over ranks; use --tp-size, {OFF}"),
    Refusal("disaggregation_mode", lambda v: v not in (None, "null"),
            "--disaggregation-mode {}: the draft's KV is not sent from prefill to decode servers; leave the flag out, "
            f"{OFF}"),
    Refusal("enable_pdmux", bool, f"--enable-pdmux: drafts have one stream; leave the flag out, {OFF}"),
    Refusal("enable_two_batch_overlap", bool,
            f"--enable-two-batch-overlap: windows of different lengths are not split in two; leave the flag out, {OFF}"),
    Refusal("enable_lora", bool, "--enable-lora: the engine applies adapters to whole blocks, not to windows of "
            f"different lengths; merge the adapter into the weights, {OFF}"),
    Refusal("lora_paths", bool, "--lora-paths: the engine applies adapters to whole blocks, not to windows of different "
            f"lengths; merge the adapter into the weights, {OFF}"),
)  # fmt: skip


def refuse_start(server_args) -> None:
    """Check SGLang's server arguments, resolved so far.

    Raises:
        ConfigError: the first one that cannot be served.
    """
    for row in STARTS:
        value = getattr(server_args, row.field)
        if row.applies(value):
            raise ConfigError(row.reason.format(value))
