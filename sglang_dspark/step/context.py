"""The draft's context: keys and values of committed tokens, written from the target's features of them."""

from __future__ import annotations

import torch

from dspark_kernels.ragged import RaggedBatch
from sglang_dspark.step.types import Step
from sglang_dspark.step.verifier import TargetRows

POSTPONED_STEPS = 16  # plain steps whose features may wait: 16 x 32 requests x 3 layers of 576 are 1.8 MB


class DraftContext:
    """Writes the draft's KV at the target's own slots.

    Plain steps put their rows off and pay once for several: the draft reads its context only when it drafts. What is put
    off is written before the draft runs, before any other write, and before slots may change hands (`catch_up`). A plain
    step then takes 2.5 ± 0.5 % less with one client and 1.9 ± 0.7 % less with 32 (benchmarks/results/toggles.md).
    """

    def __init__(self, model, runner) -> None:
        self.model, self.runner = model, runner
        self.on_cpu = torch.device(runner.device).type == "cpu"
        self._postponed: list[tuple[torch.Tensor, ...]] = []  # arguments of `write`, oldest first

    def absorb(self, step: Step, verified: RaggedBatch, target: TargetRows, lengths: torch.Tensor) -> None:
        """Take in what a step committed and has target KV: the anchor and the accepted drafts.

        Args: lengths int64 [R] committed tokens, bonus included.
        """
        slots = step.plan.write_ids(self.runner.kv_index_translator).view(step.slots.shape)
        if verified.block_size == 0 and not target.used_graph:  # a graph's output is overwritten by the next step
            self._postponed.append((target.features[: step.size], step.prefix_lens, slots[:, 0]))
            if len(self._postponed) >= POSTPONED_STEPS:
                self.catch_up()
            return
        request, column, kept = verified.row_to_request, verified.row_to_column, verified.kept(lengths)
        if self.on_cpu:  # rows that were refused cost time here
            self.write(target.features[kept], verified.positions[kept], slots[request[kept], column[kept]])
            return
        where = torch.where(kept, slots[request, column], 0)  # slot 0 is nobody's: no mask, so nothing waits
        self.write(target.features, verified.positions, where)

    def write(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows now. Args: features [N, m*d]; positions int64 [N]; slots int64 [N] in the draft pool's own ids."""
        self.catch_up()
        self._write(features, positions, slots)

    def catch_up(self) -> None:
        """Write what was postponed."""
        if self._postponed:
            parts, self._postponed = self._postponed, []
            self._write(*map(torch.cat, zip(*parts)))

    def _write(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        if features.shape[0]:
            self.model.write_context(features, positions, slots, self.runner.token_to_kv_pool)
