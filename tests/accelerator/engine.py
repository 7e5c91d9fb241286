"""A target and our worker on CPU tensors with a GPU's half: SGLang's own graph runner, token tiers, Triton attention.

Lives in a child process of the tests (Triton's interpreter is chosen before triton is imported, and SGLang publishes one
configuration per process). Only the graph backend and what asks a CUDA stream are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

LAG = 2  # as the worker's own, where steps are launched ahead of the device
GAMMA, CAPTURED = 4, (1, 2, 4)  # requests whose graphs are captured: tiers of 5, 10 and 20 rows
MOST = 8  # running requests
ROW = 100  # slots from one request's to the next one's in the pool


class Engine:
    """The objects that a scheduler holds, and what each test starts from."""

    def __init__(self, folder: Path) -> None:
        _no_fused_layers()  # before SGLang's first import of a layer registers them
        from sglang.srt.plugins import load_plugins

        from tests.engine.tiny import tiny_target
        from tests.engine.tiny_draft import soften_layers, tiny_draft

        target = soften_layers(tiny_target(folder / "target", "qwen3", layers=4))
        draft = tiny_draft(folder / "draft", target, agreeing=True)
        load_plugins()
        self._start(target, draft)
        self.runners = (self.target.model_runner, self.worker.drafter.runner)
        self.pools = [runner.token_to_kv_pool for runner in self.runners]
        self._fill()
        _graphs_without_a_device()
        for runner in self.runners:
            _accelerate(runner)

    def _start(self, target: Path, draft: Path) -> None:
        from sglang.srt.distributed import bootstrap
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        from sglang_dspark.settings.config import DSparkConfig
        from sglang_dspark.settings.flags import ALGORITHM, attach
        from sglang_dspark.step.worker import DSparkWorker

        arguments = ServerArgs(
            model_path=str(target), dtype="float32", max_total_tokens=2048, max_running_requests=MOST,
            log_level="error", speculative_algorithm=ALGORITHM, speculative_draft_model_path=str(draft), random_seed=1,
        )  # fmt: skip
        attach(arguments, DSparkConfig(verify_mode="static", calibration="off"))
        arguments.resolve_once()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
        self.target = TpModelWorker(server_args=arguments, gpu_id=0, nccl_port=port)
        self.worker = DSparkWorker(server_args=arguments, gpu_id=0, nccl_port=port, target_worker=self.target)
        self.target.alloc_memory_pool()
        self.requests, allocator = self.target.get_memory_pool()
        self.worker.alloc_memory_pool(
            memory_pool_config=self.target.model_runner.memory_pool_config,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=allocator,
        )

    def _fill(self) -> None:
        """Random keys and values for everybody, and slots in another order than positions."""
        shuffle = torch.Generator().manual_seed(5)
        for i in range(1, MOST + 1):
            self.requests.req_to_token[i, :60] = ROW * i + torch.randperm(60, generator=shuffle)
        noise, self.fresh = torch.Generator().manual_seed(3), []
        for pool in self.pools:
            layers = [pool.get_kv_buffer(i) for i in range(pool.layer_num)]
            self.fresh.append([tuple(b.normal_(generator=noise).clone() for b in pair) for pair in layers])

    def reset(self) -> None:
        for pool, kept in zip(self.pools, self.fresh):
            for i, pair in enumerate(kept):
                for buffer, value in zip(pool.get_kv_buffer(i), pair):
                    buffer.copy_(value)

    def capture(self, *which: int) -> None:
        """Capture the graphs of the target (0) and the draft (1), by rows."""
        import sglang.srt.model_executor.runner.decode_cuda_graph_runner as module
        from sglang.srt.environ import envs

        envs.SGLANG_RAGGED_VERIFY_MODE.set("compact")
        for runner in (self.runners[i] for i in which):
            if runner.decode_cuda_graph_runner is None:
                with torch.no_grad():
                    runner.decode_cuda_graph_runner = module.DecodeCudaGraphRunner(runner)

    @functools.cached_property
    def graph(self):
        """Our head in the tail of the draft's captured forward; compared with the eager draft, as at a server's start."""
        made = self.worker.drafter
        made.on_cpu = False
        made.join_capture(max(CAPTURED))
        self.runners[1].decode_cuda_graph_runner = None  # another test may have captured it without its head
        self.capture(1)
        made.check_graph()
        assert made.graph is not None, made.eager_because
        return made.graph

    def choose(self, accelerated: bool) -> None:
        """Which half the worker runs."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        worker = self.worker
        worker.verifier.on_cpu = worker.drafter.on_cpu = worker.drafter.context.on_cpu = not accelerated
        worker.reports.lag = LAG if accelerated else 0
        worker.drafter.short_blocks = False  # a CPU would leave out masks, and draft a little differently
        head = worker.drafter.head
        vars(head).pop("sample", None)
        if not accelerated:  # a graph draws whole blocks, and the token rule judges a bonus row on the draft behind it
            head.sample = lambda run, step, length: type(head).sample(head, run, step, GAMMA)
        ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph if accelerated else (lambda self: False)
        for runner in self.runners:
            runner.attn_backend = runner.ragged if accelerated else runner.plain
        worker.drafter.graph = self.graph if accelerated else None


@functools.cache
def engine() -> Engine:
    torch.set_num_threads(1)
    return Engine(Path(tempfile.mkdtemp()))


def _no_fused_layers() -> None:
    """The CPU's own norms, rotations and random numbers are loops over memory that no graph can see."""
    from dspark_kernels import gumbel, random
    from sglang_dspark.cpu.attention import layers

    layers.register = lambda: None
    gumbel.HAS_NUMBA = random.HAS_NUMBA = False


def _graphs_without_a_device() -> None:
    import sglang.srt.model_executor.runner.decode_cuda_graph_runner as module

    from tests.accelerator.graphs import RecordedBackend

    module.resolve_decode_backend = RecordedBackend
    module.graph_capture = lambda stream=None: contextlib.nullcontext(SimpleNamespace(stream=None))
    module.get_or_create_global_graph_capture_stream = lambda: None
    module.get_batch_sizes_to_capture = lambda *_, **__: (list(CAPTURED), [])
    module.DecodeCudaGraphRunner._publish_read_done = lambda self, in_graph: None
    torch.cpu.is_current_stream_capturing = lambda: False


def _accelerate(runner) -> None:
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    from sglang_dspark.accelerator.triton import RaggedTritonBackend
    from sglang_dspark.cpu.attention.backend import CpuAttentionBackend

    runner.init_attention_backends()
    runner.plain, runner.ragged = CpuAttentionBackend(runner), RaggedTritonBackend(runner)
    runner.attn_backend, runner.decode_cuda_graph_runner = runner.ragged, None
    runner.graph_shared_output = GraphSharedOutput(device="cpu", max_rows=64)
    runner.eager_runner = runner.prefill_cuda_graph_runner = EagerRunner(runner)
