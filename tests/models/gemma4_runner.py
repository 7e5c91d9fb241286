"""Run in a process of its own: a Gemma 4 draft loaded, sized and run by the engine's model runner, on random features.

Usage: python -m tests.models.gemma4_runner FOLDER   (a target of Gemma's embedding is stood in for by a tiny one)
Writes FOLDER/states.safetensors: the features, the shared embedding, and the states of one block behind them.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    from sglang_dspark.step.forward import BlockVerifyInput
    from tests.engine.tiny import tiny_target
    from tests.models.test_gemma4_draft import CONFIG, MASK_ID, D, gemma4_draft, target_modules

    target_path, draft_path = tiny_target(folder / "target", "qwen3", layers=4), folder / "draft"
    draft_path.mkdir()
    embedding = target_modules()
    worker = engine_worker(target_path, gemma4_draft(draft_path), embedding)
    runner, gamma, n = worker.drafter.runner, CONFIG["block_size"], 11
    pool = runner.token_to_kv_pool
    assert (pool.head_dim, pool.head_num, len(pool.k_buffer)) == (512, 1, 2), "the draft's cache has another shape"
    assert type(runner.model).__name__ == "Gemma4DSparkModel"

    with torch.inference_mode():
        features, slots = torch.randn(n, 2 * D) * 3, torch.arange(1, 1 + n + gamma)
        runner.model.write_context(features, torch.arange(n), slots[:n], pool)
        runner.req_to_token_pool.req_to_token[1, : n + gamma] = slots
        ids, positions = torch.tensor([9] + [MASK_ID] * (gamma - 1)), torch.arange(n, n + gamma)
        verify = BlockVerifyInput(
            draft_token=ids, positions=positions, draft_token_num=gamma, capture_hidden_mode=CaptureHiddenMode.NULL,
            rows_per_request=[gamma], causal=False,
        )  # fmt: skip
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=1, input_ids=ids, req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([n]), out_cache_loc=slots[n:], seq_lens_sum=n, seq_lens_cpu=torch.tensor([n]),
            positions=positions, spec_algorithm=runner.spec_algorithm, spec_info=verify,
            capture_hidden_mode=CaptureHiddenMode.NULL, global_num_token_non_padded_cpu=gamma,
        )  # fmt: skip
        states = runner.forward(batch).logits_output.hidden_states
    save_file(
        {"states": states.clone(), "features": features, "embedding": embedding.weight.data},
        folder / "states.safetensors",
    )


def engine_worker(target_path: Path, draft_path: Path, embedding: torch.nn.Module):
    """Target and draft in this process, with the pools and backends that the engine's scheduler would give them."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from sglang_dspark.settings.config import DSparkConfig
    from sglang_dspark.settings.flags import ALGORITHM, attach
    from sglang_dspark.step.worker import DSparkWorker

    arguments = attach(
        ServerArgs(
            model_path=str(target_path), dtype="float32", max_total_tokens=512, max_running_requests=2,
            log_level="error", speculative_algorithm=ALGORITHM, speculative_draft_model_path=str(draft_path),
        ),
        DSparkConfig(verify_mode="static"),
    )  # fmt: skip
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    target = TpModelWorker(server_args=arguments, gpu_id=0, nccl_port=port)
    target.model_runner.model.get_input_embeddings = lambda: embedding
    worker = DSparkWorker(server_args=arguments, gpu_id=0, nccl_port=port, target_worker=target)
    target.alloc_memory_pool()
    requests, slots = target.get_memory_pool()
    worker.alloc_memory_pool(
        memory_pool_config=target.model_runner.memory_pool_config,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=slots,
    )
    worker.drafter.runner.init_attention_backends()
    worker.drafter.runner.init_cuda_graphs()  # on a CPU: its eager runner
    return worker


if __name__ == "__main__":
    main(Path(sys.argv[1]))
