"""The engine's layers without the engine: one rank in this process, for tests of single models."""

from __future__ import annotations

import contextlib
import socket

import torch


@contextlib.contextmanager
def single_rank():
    """Distributed state of one rank, and published server arguments, as the engine's layers expect them."""
    from sglang.srt.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.plugins import load_plugins

    load_plugins()
    publish_arguments()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    initialize_model_parallel()
    with torch.inference_mode():
        yield
    destroy_model_parallel()
    destroy_distributed_environment()


def publish_arguments() -> None:
    """The engine's process-wide configuration, for a model that does not exist: no layer looks at it."""
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="none"), role="scheduler", ranks=SpawnRanks(world_rank=0))


@contextlib.contextmanager
def running(backend):
    """What the engine sets around a forward, so that attention layers find their backend."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=backend)):
        yield
