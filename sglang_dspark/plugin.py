"""Registration with SGLang: run once in every engine process, from the entry point `sglang.srt.plugins`."""

from __future__ import annotations


def register() -> None:
    """Check the engine, then add our flags, our algorithm, and the reading of nested draft configs.

    Raises:
        SystemExit: the installed SGLang is not the one this was written for.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dspark.cpu import accelerator_present, slots
    from sglang_dspark.engine import unsupported
    from sglang_dspark.engine.algorithm import DSparkLoadAware
    from sglang_dspark.engine.compatibility import require_compatible
    from sglang_dspark.models import gemma4_config
    from sglang_dspark.repairs import finish, logprobs, penalties, seeding, unread_keys, usage
    from sglang_dspark.serving import control, operation, routes
    from sglang_dspark.settings.flags import ALGORITHM, install_flag_hooks
    from sglang_dspark.settings.request import check_sampling_params
    from sglang_dspark.step import adjust

    require_compatible()
    install_flag_hooks()
    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DSparkLoadAware)(_worker_class)
    HookRegistry.register(
        "sglang.srt.speculative.dflash_utils.parse_dflash_draft_config", _flatten_draft_config, HookType.BEFORE
    )
    HookRegistry.register(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify", check_sampling_params, HookType.BEFORE
    )
    gemma4_config.install()
    seeding.install()
    adjust.install()
    finish.install()
    logprobs.install()
    usage.install()
    penalties.install()
    unsupported.install()
    control.install()
    routes.install()
    unread_keys.install()
    operation.install()
    if not accelerator_present():
        slots.install()


def _worker_class(server_args):
    from sglang_dspark.step.worker import DSparkWorker

    return DSparkWorker


def _flatten_draft_config(*args, draft_hf_config, **kwargs):
    """The engine looks for a draft's layer ids at the top or under `dflash_config`; ours may be under `dspark_config`."""
    nested = getattr(draft_hf_config, "dspark_config", None)
    if isinstance(nested, dict):
        for key, value in nested.items():
            setattr(draft_hf_config, key, value)
    return args, {"draft_hf_config": draft_hf_config, **kwargs}
