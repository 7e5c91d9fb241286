"""What cannot be served as asked: requests refused with a 400 and the reason, starts refused with one line.

The table in docs/compatibility.md says what works and what does not; these are its refusals that the engine does not
make itself. `speculating` rows hold only where this server speculates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_dspark.contract.hooks import BEFORE, Hook
from sglang_dspark.settings.config import ConfigError
from sglang_dspark.settings.flags import speculates
from sglang_dspark.settings.request import check_sampling_params


@dataclass(frozen=True)
class Unsupported:
    """`asked` says whether a request asks for it; `speculating`: only a server that speculates lacks it."""

    asked: Callable[[object, object], bool]
    reason: str
    speculating: bool


def _media(obj, manager) -> bool:
    given = any(getattr(obj, name, None) for name in ("image_data", "video_data", "audio_data"))
    return given and not manager.model_config.is_multimodal


def _unreadable_processor(obj, manager) -> bool:
    """The scheduler reads it in the middle of a step and would not survive one that it cannot read."""
    given = getattr(obj, "custom_logit_processor", None)
    if not given or not manager.server_args.enable_custom_logit_processor:
        return False  # the engine itself refuses processors that the server does not allow
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        return not callable(CustomLogitProcessor.from_str(given))
    except Exception:  # noqa: BLE001 (what unpickling may raise has no common base)
        return True


TABLE = (
    Unsupported(_media, "this model reads text only: leave out image_data, video_data and audio_data", False),
    Unsupported(
        _unreadable_processor,
        "custom_logit_processor cannot be read: send what CustomLogitProcessor.to_str() returns",
        False,
    ),
    Unsupported(
        lambda obj, _: bool(getattr(obj, "return_hidden_states", False)),
        "return_hidden_states is not served with speculation, whose draft consumes them: start the server with "
        "--verify-mode off",
        True,
    ),
    Unsupported(
        lambda obj, _: bool(getattr(obj, "return_sampling_mask", False)),
        "return_sampling_mask is not served with speculation, which keeps no mask of a verified row: start the "
        "server with --verify-mode off",
        True,
    ),
)


# Ways to answer requests without the one process that holds our request checks, our routes and the numbering of choices.
STARTS = {
    "tokenizer_worker_num": (
        lambda value: value > 1,
        "--tokenizer-worker-num {}: requests are checked in one process; leave the flag out",
    ),
    "smg_grpc_mode": (bool, "--smg-grpc-mode: requests are checked by the HTTP server; leave the flag out"),
    "grpc_mode": (bool, "--grpc-mode: requests are checked by the HTTP server; leave the flag out"),
}


def check_start(arguments) -> None:
    """Refuse a start whose requests would pass us by.

    Args:
        arguments: SGLang's server arguments, parsed or not (its ServerArgs or a namespace of its flags).

    Raises:
        ConfigError: naming the flag and the fix.
    """
    for name, (applies, reason) in STARTS.items():
        if applies(getattr(arguments, name)):
            raise ConfigError(reason.format(getattr(arguments, name)))


def _refuse(manager, obj, input_ids) -> None:
    """Runs in the process that answers HTTP.

    Raises:
        ValueError: the first row that the request asks for; the engine turns it into a 400.
    """
    speculating = speculates(manager.server_args)
    for row in TABLE:
        if (speculating or not row.speculating) and row.asked(obj, manager):
            raise ValueError(row.reason)


HOOKS = (
    Hook("sglang.srt.sampling.sampling_params:SamplingParams.verify", BEFORE, check_sampling_params, ("vocab_size",)),
    Hook(
        "sglang.srt.managers.tokenizer_manager:TokenizerManager._validate_one_request",
        BEFORE,
        _refuse,
        ("obj", "input_ids"),
    ),
)
