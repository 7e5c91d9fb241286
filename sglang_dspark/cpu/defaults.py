"""Server arguments on a plain CPU: what is filled in where the user said nothing. Whatever the user gave wins, or is
refused with a sentence (see `refusals`)."""

from __future__ import annotations

from sglang_dspark.contract.hooks import BEFORE, Hook
from sglang_dspark.cpu import ATTENTION_BACKEND, default_dtype
from sglang_dspark.cpu.refusals import refuse_arguments, refuse_model, refuse_too_little_memory

# A pool that no laptop notices until it is used (its pages are mapped when they are written), enough for 32 chats of
# 2000 tokens: 1.5 GB with the demo model. SGLang lowers it further where `mem_fraction_static` says so.
MAX_TOTAL_TOKENS = 65536
MAX_RUNNING_REQUESTS = 64
# A chunk of this many rows takes about as long as a few decode steps, so a long prompt does not stop the others.
CHUNKED_PREFILL_SIZE = 512
MEM_FRACTION_STATIC = 0.5


def apply_defaults(args) -> None:
    """Fill in what the user left open; called by SGLang with a view of its arguments that records what is written.

    Raises:
        CpuPlatformError: an argument that cannot be served here.
    """
    given = args._raw_input
    refuse_arguments(given)
    args.device = "cpu"
    if given["dtype"] == "auto":
        args.dtype = default_dtype()
    args.attention_backend = ATTENTION_BACKEND  # SGLang has filled in one that needs compiled kernels
    args.sampling_backend = "pytorch"
    args.cuda_graph_config = _without_graphs(args.cuda_graph_config)
    args.disable_overlap_schedule = True  # there is no second device to overlap with, only the same cores
    args.sleep_on_idle = True
    for field, value in (
        ("page_size", 1),
        ("max_total_tokens", MAX_TOTAL_TOKENS),
        ("max_running_requests", MAX_RUNNING_REQUESTS),
        ("chunked_prefill_size", CHUNKED_PREFILL_SIZE),
        ("mem_fraction_static", MEM_FRACTION_STATIC),
    ):
        if given[field] is None:
            setattr(args, field, value)


def check_resolved(server_args) -> None:
    """Check the model behind resolved arguments (BEFORE hook on `ServerArgs.check_server_args`).

    Raises:
        CpuPlatformError: a model that cannot be served here, or that does not fit in memory.
    """
    import psutil
    from sglang.srt.arg_groups.overrides import model_config_of

    config = model_config_of(server_args)
    refuse_model(config)
    refuse_too_little_memory(config.model_path, config.dtype.itemsize, psutil.virtual_memory().available)


def _without_graphs(graphs):
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    for phase in Phase.ALL:
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    return graphs


HOOKS = (Hook("sglang.srt.server_args:ServerArgs.check_server_args", BEFORE, check_resolved, ()),)
