"""Registration with SGLang: run once in every engine process, from the entry point `sglang.srt.plugins`."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_dspark.contract.names import SglangName


def register() -> None:
    """Check the engine, then add our algorithm and every hook, on a plain CPU those of its platform too.

    Raises:
        SystemExit: the installed SGLang is not the one this was written for.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dspark import accelerator
    from sglang_dspark.contract import hooks
    from sglang_dspark.contract.compatibility import require_compatible
    from sglang_dspark.cpu import accelerator_present, slots
    from sglang_dspark.engine.algorithm import DSparkLoadAware
    from sglang_dspark.settings.flags import ALGORITHM

    require_compatible(rows())
    accelerator.offer_attention()
    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DSparkLoadAware)(_worker_class)
    for module in hooked_everywhere():
        hooks.register(module.HOOKS)
    if not accelerator_present():
        hooks.register(slots.HOOKS)


def hooked_everywhere() -> tuple[ModuleType, ...]:
    """The modules whose hooks are in place on every device; of two hooks on one function the first runs inside."""
    from sglang_dspark.accelerator import defaults
    from sglang_dspark.engine import arguments, request_limits, unsupported
    from sglang_dspark.models import gemma4_config
    from sglang_dspark.repairs import (
        empty_grammars,
        finish,
        logprobs,
        penalties,
        seeding,
        stop_patterns,
        tool_streams,
        unread_keys,
        usage,
    )
    from sglang_dspark.serving import answers, control, operation, routes
    from sglang_dspark.step import adjust

    repairs = (seeding, finish, stop_patterns, empty_grammars, logprobs, usage, penalties, unread_keys, tool_streams)
    starts = (arguments, defaults, gemma4_config, request_limits, unsupported)
    return (*starts, *repairs, adjust, control, routes, answers, operation)


def hooked_on_cpu() -> tuple[ModuleType, ...]:
    """The modules whose hooks are in place where no accelerator is; the platform registers all but those of `slots`."""
    from sglang_dspark.cpu import defaults, slots
    from sglang_dspark.cpu.processes import forkserver

    return defaults, slots, forkserver


def rows() -> list[SglangName]:
    """Every row of the compatibility check: the table, and one of each hook."""
    from sglang_dspark.contract.compatibility_table import TABLE

    modules = (*hooked_everywhere(), *hooked_on_cpu())
    return [*TABLE, *(hook.row for module in modules for hook in module.HOOKS)]


def _worker_class(server_args):
    """Asked for by a scheduler when it starts, when all that we use of SGLang is loaded or about to be."""
    from sglang_dspark.contract.compatibility import require_compatible

    require_compatible(rows(), importing=True)
    from sglang_dspark.step.worker import DSparkWorker

    return DSparkWorker
