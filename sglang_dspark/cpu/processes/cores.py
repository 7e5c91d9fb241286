"""Which cores a rank computes on, in place of SGLang's binding, which calls compiled CPU kernels."""

from __future__ import annotations

import os

import torch


def cores_of_rank(rank: int, ranks: int, cores: list[int]) -> list[int]:
    """Split the cores among the ranks, evenly and in order; with more ranks than cores, ranks share one.

    Args:
        rank: 0 <= rank < ranks; cores: one logical CPU per physical core, sorted, at least one.

    Raises:
        ValueError: a rank out of range, or no core.
    """
    if not 0 <= rank < ranks or not cores:
        raise ValueError(f"rank {rank} of {ranks} on {len(cores)} cores")
    if ranks >= len(cores):
        return [cores[rank % len(cores)]]
    first, last = rank * len(cores) // ranks, (rank + 1) * len(cores) // ranks
    return cores[first:last]


def bind_rank(*, device: str) -> list[int]:
    """Give this process its share of the cores and return it (replaces `bootstrap._bind_threads_if_cpu`).

    One rank keeps every core and the number of threads that torch has chosen, which follows OMP_NUM_THREADS. Several
    are bound: two teams that spin on the same cores would take turns by the operating system's clock.
    """
    from sglang.srt.runtime_context import get_device, get_parallel
    from sglang.srt.utils.common import get_cpu_ids_by_node

    parallel = get_parallel()
    ranks = parallel.dp_size * parallel.tp_size * parallel.pp_size
    cores = [int(core) for node in get_cpu_ids_by_node() for core in node.split(",")]
    if ranks == 1:
        return cores
    mine = cores_of_rank(get_device().gpu_id % ranks, ranks, cores)
    os.sched_setaffinity(0, mine)
    torch.set_num_threads(len(mine))
    return mine


def replace_bindings() -> None:
    """Put torch and gloo where SGLang would call its compiled kernels for threads and shared-memory reductions.

    On arm64 it calls them whether they are there or not.
    """
    from sglang.srt.distributed import bootstrap, parallel_state

    for module, name, ours in (
        (bootstrap, "_bind_threads_if_cpu", bind_rank),
        (bootstrap, "_init_cpu_threads_env", lambda **_: None),
        (parallel_state, "is_shm_available", lambda dtype, world_size, local_size: False),
    ):
        getattr(module, name)  # an AttributeError here means that SGLang has changed
        setattr(module, name, ours)
