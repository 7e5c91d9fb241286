"""Server arguments on a GPU: what is filled in where the user said nothing, for our algorithm and for our `off`.

SGLang chooses attention and sampling backends before it asks a speculative algorithm for its arguments, so they are set
by hooks on those earlier places. Whatever the user named wins, or is refused with a sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_kernels.memory import step_bytes
from sglang_dspark.accelerator import RAGGED_TRITON
from sglang_dspark.accelerator.backends import LARGEST_HEAD, check_choice, default_backend
from sglang_dspark.accelerator.refusals import refuse_start
from sglang_dspark.contract.hooks import AFTER, BEFORE, Hook
from sglang_dspark.settings.flags import ATTRIBUTE, config_of, speculates

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_dspark.models.draft_config import DraftConfig

MAX_RUNNING_REQUESTS = 48  # as SGLang's own DSPARK, and fewer where a step of so many would not fit
STEP_SHARE = 0.1  # of the GPU's memory, for what a step makes beside the models' activations


def on_gpu() -> bool:
    """Whether SGLang's platform is CUDA or ROCm."""
    from sglang.srt.runtime_context import get_platform

    return get_platform().is_cuda or get_platform().is_hip


def capability() -> tuple[int, int]:
    """Of the NVIDIA GPU; (0, 0) on every other device, whose numbers mean something else."""
    from sglang.srt.runtime_context import get_platform

    return tuple(get_platform().device_capability) if get_platform().is_cuda else (0, 0)


def before_resolving(server_args: ServerArgs) -> None:
    """Set what the engine reads before it asks the algorithm.

    The sampling backend is torch's, in our `off` too: FlashInfer's renormalises after top-k, after top-p and after min_p,
    while drafts are judged by the law that filters jointly, and one server answers by one law. The top-k of an
    EAGLE tree is 1: the engine takes its TRT-LLM default for nothing else.
    """
    if getattr(server_args, "_resolution_finished", False) or not on_gpu():
        return
    ours = speculates(server_args)
    off = getattr(server_args, ATTRIBUTE, None) is not None and config_of(server_args).verify_mode == "off"
    if (ours or off) and server_args.sampling_backend is None:
        server_args.sampling_backend = "pytorch"
    if ours and server_args.speculative_eagle_topk is None:
        server_args.speculative_eagle_topk = 1


def ragged_default(engines_choice: str, server_args, use_mla_backend: bool, model_config) -> str:
    """The target's attention backend where the user named none; latent attention keeps the engine's choice."""
    if use_mla_backend or not on_gpu() or not speculates(server_args):
        return engines_choice
    text = model_config.hf_text_config
    sizes = (model_config.head_dim, model_config.v_head_dim, getattr(text, "global_head_dim", None))
    head_size = max(size or 0 for size in sizes)
    return default_backend(capability(), head_size, bool(model_config.has_attention_sinks), engines_choice)


def handle_server_args(server_args, draft: DraftConfig) -> None:
    """Called with the rest of the algorithm's arguments: refusals, and what depends on the draft.

    Raises:
        ConfigError: a start, or an attention backend, that cannot be served here.
    """
    refuse_start(server_args)
    check_choice(server_args.decode_attention_backend or server_args.attention_backend, capability())
    if server_args.speculative_draft_attention_backend is None and draft.head_dim > LARGEST_HEAD:
        server_args.speculative_draft_attention_backend = RAGGED_TRITON
    reserve_step(server_args, draft)


def reserve_step(server_args, draft: DraftConfig) -> None:
    """The number of running requests, where it is open, and room for a step of so many beside the KV pool.

    A step keeps the draft's law of every slot and the target's logits of every row (`dspark_kernels.step_bytes`): the
    engine's own reserve does not know of them. A pool that the user sized stays as it is.
    """
    from sglang.srt.utils.common import get_device_memory_capacity

    def needed(requests: int) -> int:
        return step_bytes(requests, draft.block_size, draft.vocab_size, columns=draft.support_size)

    mebibytes = get_device_memory_capacity("cuda")
    memory = None if mebibytes is None else mebibytes * 2**20
    requests = server_args.max_running_requests
    if requests is None:
        requests = MAX_RUNNING_REQUESTS
        while memory is not None and requests > 1 and needed(requests) > STEP_SHARE * memory:
            requests //= 2
        server_args.max_running_requests = requests
    if memory is not None and server_args._raw_input["mem_fraction_static"] is None:
        server_args.mem_fraction_static = round(server_args.mem_fraction_static - needed(requests) / memory, 3)


HOOKS = (
    Hook("sglang.srt.server_args:ServerArgs.resolve_once", BEFORE, before_resolving, ()),
    Hook(
        "sglang.srt.arg_groups.model_override_base:get_default_attn_backend",
        AFTER,
        ragged_default,
        ("server_args", "use_mla_backend", "model_config"),
    ),
)
