"""One block of a draft through the engine's layers, its KV pool and our attention backend, without a server."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from safetensors.torch import load_file

CONTEXTS = (1, 7, 40)  # tokens before the anchor, one request each
SLOTS_PER_REQUEST = 80


def engine_draft(folder, embedding, lm_head):
    """The draft of a checkpoint folder: config by the engine's parser, class by its architecture, weights loaded."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    from sglang_dspark.models import draft, gemma4

    config = get_config(str(folder), trust_remote_code=False)
    kinds = {kind.__name__: kind for kind in (*draft.EntryClass, *gemma4.EntryClass)}
    model = kinds[config.architectures[0]](config)
    model.load_weights(load_file(folder / "model.safetensors").items())
    model.share_with_target(embedding, lm_head)
    return model


def block_states(model, features, anchors, write=None):
    """States [R, gamma, d] of one block behind each request's context.

    Args:
        model: ours, or one of the engine's with the same forward; `draft` of ours says the shape.
        features: one [n, m*d] per request. anchors: int64 [R].
        write: how this model writes its context, (features, positions, slots, pool); None: `model.write_context`.
    """
    return run_block(model, model.draft, features, anchors, write or model.write_context)


def run_block(model, shape, features, anchors, write):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_dspark.cpu.attention.backend import CpuAttentionBackend
    from sglang_dspark.step.forward import BlockVerifyInput
    from tests.engine.in_process import running

    requests, gamma = len(features), shape.block_size
    pool = context_pool(shape)
    slots = request_slots(requests)
    runner = SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=slots.int()), model_config=None
    )
    lens = torch.tensor([len(f) for f in features])
    for r, feature in enumerate(features):
        write(feature, torch.arange(len(feature)), slots[r, : len(feature)], pool)
    ids = torch.full((requests, gamma), shape.mask_token_id)
    ids[:, 0] = anchors
    positions = (lens[:, None] + torch.arange(gamma)).flatten()
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=lens,
        seq_lens_cpu=lens,
        req_pool_indices=torch.arange(requests),
        input_ids=ids.flatten(),
        positions=positions,
        out_cache_loc=torch.cat([slots[r, n : n + gamma] for r, n in enumerate(lens.tolist())]),
        batch_size=requests,
        spec_info=BlockVerifyInput(
            draft_token=ids.flatten(),
            positions=positions,
            draft_token_num=gamma,
            rows_per_request=[gamma] * requests,
            causal=False,
        ),
    )
    backend = CpuAttentionBackend(runner)
    backend.init_forward_metadata(batch)
    with running(backend):
        states = model(ids.flatten(), positions, batch).hidden_states
    return states.view(requests, gamma, -1)


def request_slots(requests):
    """Slots [R, 80], scattered, none of them 0 (which is nobody's)."""
    return 1 + torch.randperm(SLOTS_PER_REQUEST * requests).view(requests, -1)


def context_pool(shape, dtype=torch.float32):
    from sglang_dspark.cpu.pool import CpuKVPool

    return CpuKVPool(
        size=4 * SLOTS_PER_REQUEST,
        page_size=1,
        dtype=dtype,
        head_num=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        layer_num=shape.num_hidden_layers,
        device="cpu",
        enable_memory_saver=False,
    )
