"""What SGLang reads when it starts, taught to know us: our flags in its parser, our settings on its server arguments, and
the layer ids of a draft whose config keeps them under `dspark_config`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from sglang_dspark.contract.hooks import AFTER, BEFORE, Hook
from sglang_dspark.settings.config import ConfigError
from sglang_dspark.settings.flags import add_flags, attach, config_of_namespace

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def _after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def _after_from_cli_args(server_args: ServerArgs, cls: type, args: argparse.Namespace) -> ServerArgs:
    try:
        return attach(server_args, config_of_namespace(args))
    except ConfigError as error:
        # A parser's own errors end the process with one line and status 2; ours do the same.
        print(f"sglang serve: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _flatten_draft_config(*args, draft_hf_config, **kwargs):
    """The engine looks for a draft's layer ids at the top or under `dflash_config`; ours may be under `dspark_config`."""
    nested = getattr(draft_hf_config, "dspark_config", None)
    if isinstance(nested, dict):
        for key, value in nested.items():
            setattr(draft_hf_config, key, value)
    return args, {"draft_hf_config": draft_hf_config, **kwargs}


HOOKS = (
    Hook("sglang.srt.server_args:ServerArgs.add_cli_args", AFTER, _after_add_cli_args, ("parser",)),
    Hook("sglang.srt.server_args:ServerArgs.from_cli_args", AFTER, _after_from_cli_args, ("args",)),
    Hook(
        "sglang.srt.speculative.dflash_utils:parse_dflash_draft_config",
        BEFORE,
        _flatten_draft_config,
        ("draft_hf_config",),
    ),
)
