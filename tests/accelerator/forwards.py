"""Single forwards in the child: attention against plain torch, the draft's graph against its eager forward, whole-block
graphs that must decline. Every function returns plain numbers."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch

from tests.accelerator.engine import engine

LENS = (5, 9, 3, 1)  # tokens before each request's rows


def verification(runner, counts, *, padding=0, width=None, tier=None, causal=True, ids=None, spec_width=None):
    """A forward over `counts` rows per request, as the worker builds it, with a layout on the device where it is ragged."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    from sglang_dspark.step.forward import BlockVerifyInput

    count, width = len(counts), width or max(counts)
    lens, rows = torch.tensor(LENS[:count]), torch.arange(1, count + 1)
    request = torch.repeat_interleave(torch.arange(count), torch.tensor(counts))
    column = torch.cat([torch.arange(c) for c in counts])
    ids = torch.arange(sum(counts)) * 7 % 400 + 10 if ids is None else ids
    ids, positions = _padded(ids, padding), _padded(lens[request] + column, padding)
    slots = engine().requests.req_to_token[rows[:, None], lens[:, None] + torch.arange(width)].long()
    plan = runner.kv_index_translator.plan(
        req_pool_indices=rows, seq_lens=lens, seq_lens_cpu=None, read_extent=width, write_virtual=slots.reshape(-1)
    )
    layout = None
    if tier is not None:
        layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=torch.tensor(counts), graph_num_tokens=tier)
    spec = BlockVerifyInput(
        draft_token=ids, positions=positions, draft_token_num=width, rows_per_request=counts, causal=causal,
        capture_hidden_mode=CaptureHiddenMode.NULL, ragged_verify_layout=layout, num_tokens_per_req=spec_width or width,
    )  # fmt: skip
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=count, input_ids=ids, req_pool_indices=rows, seq_lens=lens,
        out_cache_loc=None, seq_lens_sum=None, seq_lens_cpu=None, positions=positions, spec_info=spec,
        spec_algorithm=runner.spec_algorithm, capture_hidden_mode=CaptureHiddenMode.NULL,
        global_num_token_non_padded_cpu=len(ids),
    )  # fmt: skip
    plan.bind(batch, runner.kv_index_translator, cols=_padded(request * width + column, padding, -1))
    return batch


def _padded(rows: torch.Tensor, padding: int, value: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, padding), value=value)


def attention_error(counts: list[int], causal: bool, tier: int | None, cut: bool = False) -> float:
    """The largest difference of `dspark_triton` from plain attention over live rows; `tier`: in a captured graph's static
    buffers. `cut` leaves out the last key of every row in the plain attention: the tolerance's teeth."""
    from sglang.srt.layers.radix_attention import AttentionType

    from sglang_dspark.accelerator.triton import RaggedTritonBackend

    made = engine()
    made.reset()
    runner = made.runners[0]
    width = 5
    batch = verification(
        runner, counts, padding=(tier or sum(counts)) - sum(counts), width=width, tier=tier or sum(counts)
    )
    backend = RaggedTritonBackend(runner)
    if tier is None:
        backend.init_forward_metadata(batch)
    else:
        _as_captured(backend, runner, tier, batch)
    layer = next(m for m in runner.model.modules() if type(m).__name__ == "RadixAttention")
    layer = SimpleNamespace(**{**{k: getattr(layer, k) for k in dir(layer) if k in _LAYER}, "attn_type": None})
    layer.attn_type = AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY
    noise = torch.Generator().manual_seed(1)
    rows = len(batch.input_ids)
    q = torch.randn(rows, layer.tp_q_head_num * layer.head_dim, generator=noise)
    k, v = (torch.randn(rows, layer.tp_k_head_num, layer.head_dim, generator=noise) for _ in range(2))
    with torch.inference_mode():
        found = backend.forward_extend(q, k, v, layer, batch, save_kv_cache=False)
    keys, values = made.pools[0].get_kv_buffer(layer.layer_id)
    wanted, start = [], 0
    for i, count in enumerate(counts):
        slots = made.requests.req_to_token[i + 1, : LENS[i]].long()
        own = slice(start, start + count)
        wanted.append(
            _plain(q[own], torch.cat((keys[slots], k[own])), torch.cat((values[slots], v[own])), layer, causal, cut)
        )
        start += count
    return float((found[:start].view(start, -1) - torch.cat(wanted)).abs().max())


_LAYER = (
    "tp_q_head_num", "tp_k_head_num", "tp_v_head_num", "head_dim", "qk_head_dim", "v_head_dim", "scaling", "layer_id",
    "logit_cap", "logit_capping_method", "sliding_window_size", "is_cross_attention", "xai_temperature_len", "k_scale",
    "v_scale", "k_scale_float", "v_scale_float",
)  # fmt: skip


def _as_captured(backend, runner, tier: int, batch) -> None:
    """Static buffers as SGLang's graph runner prepares them: slots for more requests than run, capture, then this batch."""
    from dataclasses import replace

    slots = min(tier, 4)
    backend.init_cuda_graph_state(slots, tier)
    grow = slots - batch.batch_size
    batch.req_pool_indices = _padded(batch.req_pool_indices, grow)
    batch.seq_lens, batch.batch_size = _padded(batch.seq_lens, grow, 1), slots
    capture = SimpleNamespace(**{**vars(batch), "spec_info": replace(batch.spec_info, ragged_verify_layout=None)})
    backend.init_forward_metadata_out_graph(capture, in_capture=True)
    backend.init_forward_metadata_out_graph(batch)


def _plain(q, k, v, layer, causal: bool, cut: bool) -> torch.Tensor:
    rows, keys, group = q.shape[0], k.shape[0], layer.tp_q_head_num // layer.tp_k_head_num
    q = q.view(rows, layer.tp_q_head_num, layer.head_dim).transpose(0, 1)
    k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen = seen.tril(keys - rows) if causal else seen
    if cut:
        seen[:, 0] = False
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=layer.scaling)
    return out.transpose(0, 1).reshape(rows, -1)


def draft_graph_error(baked: bool = False) -> tuple[float, float]:
    """Largest difference of a replay of the draft's graph from its eager forward, over two batches, and the scale.

    `baked`: the draft adds a host number to its states that the steps change, as a step's own Python could.
    """
    from sglang_dspark.accelerator.triton import RaggedTritonBackend

    made = engine()
    made.reset()
    made.choose(accelerated=True)
    runner, model = made.runners[1], made.worker.drafter.model
    runner.attn_backend = RaggedTritonBackend(runner)  # a capture replaces its backend's buffers: the worker's stay
    embed, shift = type(model).forward_embed, SimpleNamespace(value=0.0)
    if baked:
        type(model).forward_embed = lambda self, ids: embed(self, ids) + shift.value
    kept, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
    try:
        made.capture(1)
        graphs, worst, scale = runner.decode_cuda_graph_runner, 0.0, 0.0
        for seed in (0, 1):
            shift.value = float(seed)
            ids = torch.randint(6, 500, (2 * 4,), generator=torch.Generator().manual_seed(seed))
            with torch.inference_mode():
                graph = graphs.execute(verification(runner, [4, 4], causal=False, ids=ids)).hidden_states.clone()
                runner.decode_cuda_graph_runner = None
                eager = runner.forward(verification(runner, [4, 4], causal=False, ids=ids)).logits_output.hidden_states
                runner.decode_cuda_graph_runner = graphs
            worst, scale = max(worst, float((graph - eager).abs().max())), max(scale, float(eager.abs().max()))
    finally:
        type(model).forward_embed, runner.decode_cuda_graph_runner, runner.attn_backend = embed, kept, runner.ragged
    return worst, scale


def whole_block_graph_takes(counts: list[int]) -> bool:
    """Whether SGLang's graphs by requests would take this verification of ours."""
    made = engine()
    made.choose(accelerated=True)
    made.capture(0)
    graphs, verifier = made.runners[0].decode_cuda_graph_runner, made.worker.verifier
    runner, verifier.runner = verifier.runner, SimpleNamespace(decode_cuda_graph_runner=None)  # no token tiers
    graphs.ragged_verify_mode = False
    try:
        whole = all(count == 5 for count in counts)
        batch = verification(runner, counts, width=5, spec_width=verifier.width_for_graphs(whole=whole))
        return bool(graphs.can_run_graph(batch))
    finally:
        graphs.ragged_verify_mode, verifier.runner = True, runner


def flashinfer_plan(
    counts: list[int], rows: int | None
) -> tuple[list[int], list[int], list[list[int]], list[list[int]]]:
    """What SGLang hands to FlashInfer's plan for a verification: row offsets, key offsets, each request's slots, and the
    slots that it should read. `rows`: windows known on the device only, in a batch of so many rows."""
    from dataclasses import replace

    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    from sglang_dspark.accelerator.layout import device_layout

    made, width = engine(), 5
    runner = made.runners[0]
    batch = verification(runner, counts, padding=(rows or sum(counts)) - sum(counts), width=width)
    if rows is None:
        layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=counts, device="cpu", grid=[sum(counts)])
    else:
        layout = device_layout(torch.tensor(counts) - 1, rows)
    indices, kv_indptr, qo_indptr, mask = replace(
        batch.spec_info, ragged_verify_layout=layout
    ).generate_attn_arg_prefill(
        req_pool_indices=batch.req_pool_indices,
        paged_kernel_lens=batch.seq_lens,
        paged_kernel_lens_sum=int(batch.seq_lens.sum()),
        translator=runner.kv_index_translator,
        plan=batch.kv_loc_plan,
    )
    assert mask is None
    kv = kv_indptr.tolist()
    read = [indices[a:b].tolist() for a, b in itertools.pairwise(kv)]
    table = made.requests.req_to_token
    right = [table[i + 1, : LENS[i] + n].tolist() for i, n in enumerate(counts)]
    return qo_indptr.tolist(), kv, read, right
