"""Tensor-parallel ranks leave the measurement of a step together, whatever their clocks and their disks say.

Bug class: every probe holds collectives, so a rank that stops by its own clock, or finds a cost file that the others do
not have, leaves them in an all-reduce for ever. Two gloo processes; the second one's clock is an hour ahead, and only the
first has the file.
"""

from __future__ import annotations

import datetime
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dspark_scheduler import Fingerprint
from sglang_dspark.settings.config import DSparkConfig
from sglang_dspark.step import measure, speculation
from sglang_dspark.step.ranks import Ranks

GAMMA = 4
PRINT = Fingerprint("target", "draft", GAMMA, "gpu", "float32", 2, "sglang 0.5.23")


def ranks_of_two() -> Ranks:
    ranks = Ranks.__new__(Ranks)
    ranks.group, ranks.alone = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=None), False
    return ranks


def server(rank: int, folder, cost_model: str) -> speculation.Speculation:
    """Only what finding a cost asks for: every probe is an all-reduce, as a tensor-parallel forward is."""
    for name in ("run_target", "run_block", "run_head"):
        setattr(measure, name, lambda *_: dist.all_reduce(torch.ones(1)))
    if rank:
        clock = measure.time.perf_counter
        measure.time = SimpleNamespace(perf_counter=lambda: clock() * 40 + 3600)
    config = SimpleNamespace(block_size=GAMMA, enable_confidence_head=True, has_hidden_confidence=False)
    drafter = SimpleNamespace(
        gamma=GAMMA, folder=folder, config=config, runner=SimpleNamespace(device="cpu"), ranks=ranks_of_two(),
        short_blocks=True, on_cpu=True, head=None, graph=None,
    )  # fmt: skip
    speculation.state_folder = lambda _: folder / str(rank)  # two nodes: each has a home of its own
    made = speculation.Speculation(DSparkConfig(cost_model=cost_model), drafter, PRINT, learning=rank == 0)
    made.measure(SimpleNamespace(on_cpu=True, tiers=()), 8)
    return made


def work(rank: int, port: int, folder, cost_model: str) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=20), world_size=2, rank=rank)
    made = server(rank, folder, cost_model)
    seconds = torch.tensor([float(made.cost.step_seconds(4, 10))], dtype=torch.float64)
    told = [torch.zeros_like(seconds) for _ in range(2)]
    dist.all_gather(told, seconds)
    if cost_model == "auto":
        assert told[0] == told[1], "the ranks believe different costs"
    dist.destroy_process_group()


@pytest.mark.parametrize("cost_model", ["measure", "auto"])
def test_ranks_with_skewed_clocks_and_one_cost_file_start_together(tmp_path, monkeypatch, cost_model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if cost_model == "auto":
        from tests.step.test_speculation import COST

        COST.save(tmp_path / "0" / "cost.json", PRINT)
    torch.multiprocessing.spawn(work, (port, tmp_path, cost_model), nprocs=2)
