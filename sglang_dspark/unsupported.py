"""Requests that cannot be served as asked, each refused with a 400 and the reason instead of being half served.

The table in docs/compatibility.md says what works and what does not; these are its refusals that the engine does not
make itself. `speculating` rows hold only where this server speculates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"


@dataclass(frozen=True)
class Unsupported:
    """`asked` says whether a request asks for it; `speculating`: only a server that speculates lacks it."""

    asked: Callable[[object, object], bool]
    reason: str
    speculating: bool


def _media(obj, manager) -> bool:
    given = any(getattr(obj, name, None) for name in ("image_data", "video_data", "audio_data"))
    return given and not manager.model_config.is_multimodal


TABLE = (
    Unsupported(_media, "this model reads text only: leave out image_data, video_data and audio_data", False),
    Unsupported(lambda obj, _: bool(getattr(obj, "return_hidden_states", False)),
                "return_hidden_states is not served with speculation, whose draft consumes them: start the server with "
                "--verify-mode off", True),
    Unsupported(lambda obj, _: bool(getattr(obj, "return_sampling_mask", False)),
                "return_sampling_mask is not served with speculation, which keeps no mask of a verified row: start the "
                "server with --verify-mode off", True),
)


def install() -> None:
    """Register the hook; call it while plugins load."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(VALIDATE, _refuse, HookType.BEFORE)


def _refuse(manager, obj, input_ids) -> None:
    """Runs in the process that answers HTTP.

    Raises:
        ValueError: the first row that the request asks for; the engine turns it into a 400.
    """
    from sglang_dspark.flags import ALGORITHM

    speculates = (manager.server_args.speculative_algorithm or "").upper() == ALGORITHM
    for row in TABLE:
        if (speculates or not row.speculating) and row.asked(obj, manager):
            raise ValueError(row.reason)
