"""Server arguments on a plain CPU: what is filled in, and what is refused with one sentence."""

from __future__ import annotations

from sglang_dspark.cpu import ATTENTION_BACKEND, default_dtype

MAX_TOTAL_TOKENS = 65536
MAX_RUNNING_REQUESTS = 64
CHUNKED_PREFILL_SIZE = 512
MEM_FRACTION_STATIC = 0.5


def apply_defaults(args) -> None:
    """Fill in what the user left open; called by SGLang with a view of its arguments that records what is written."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    args.device = "cpu"
    if args.dtype == "auto":
        args.dtype = default_dtype()
    if args._raw_input["attention_backend"] is None:  # SGLang has filled in a backend that needs compiled kernels
        args.attention_backend = ATTENTION_BACKEND
    args.sampling_backend = "pytorch"
    graphs = args.cuda_graph_config
    for phase in Phase.ALL:
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    args.cuda_graph_config = graphs
    args.disable_overlap_schedule = True
    args.sleep_on_idle = True
    if args.page_size is None:
        args.page_size = 1
    if args.max_total_tokens is None:
        args.max_total_tokens = MAX_TOTAL_TOKENS
    if args.max_running_requests is None:
        args.max_running_requests = MAX_RUNNING_REQUESTS
    if args.chunked_prefill_size is None:
        args.chunked_prefill_size = CHUNKED_PREFILL_SIZE
    if args.mem_fraction_static is None:
        args.mem_fraction_static = MEM_FRACTION_STATIC
