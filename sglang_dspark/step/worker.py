"""The speculative worker: prefill, and one decode step from budget to commit (docs/structure.md)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

from dspark_kernels.ragged import RaggedBatch
from sglang_dspark.accelerator.device import describe_device
from sglang_dspark.engine.compatibility import require_compatible
from sglang_dspark.learning.meter import Meter
from sglang_dspark.settings.flags import config_of
from sglang_dspark.step.adjust import adjust_logits
from sglang_dspark.step.commit import Committed, judge
from sglang_dspark.step.drafter import Drafter
from sglang_dspark.step.speculation import SAVE_EVERY, Speculation, fingerprint_of
from sglang_dspark.step.types import Roster, Step, empty_block
from sglang_dspark.step.verifier import TargetRows, Verifier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs


class DSparkWorker(BaseSpecWorker):
    """Runs a target and its draft for the engine's scheduler, one batch at a time."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        require_compatible(importing=True)
        self._server_args, self._target_worker = server_args, target_worker
        self.model_runner = target_worker.model_runner
        self.drafter = Drafter(server_args, gpu_id, nccl_port, target_worker)
        self._draft_worker = self.drafter.worker
        self.gamma = self.drafter.gamma
        self.verifier = Verifier(target_worker, self.gamma)
        parallel = get_parallel()
        fingerprint = fingerprint_of(
            self.model_runner.model_config,
            self.drafter.folder,
            self.gamma,
            describe_device(self.model_runner.device),
            parallel.tp_size,
        )
        first = parallel.tp_rank == 0 and not parallel.dp_rank
        self.speculation = Speculation(config_of(server_args), self.drafter, fingerprint, learning=first)
        self.meter = Meter(self.gamma)
        self.roster: Roster | None = None
        self.steps = 0

    def __getattr__(self, name: str):
        # The scheduler asks its model worker for much that only the target knows.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return self.model_runner.attn_backend, self.drafter.runner.attn_backend

    def weight_update_runners(self) -> list:
        """None beside the target: what the engine's weight updates carry are a target's tensors, not a draft's."""
        return []

    def init_attention_backends(self) -> None:
        """The engine captures the target's graphs right after this."""
        super().init_attention_backends()
        self.verifier.check_backend()
        self.verifier.capture_by_rows(self._server_args)

    def init_cuda_graphs(self) -> None:
        """The last thing the engine asks for before serving: now a step's cost can be measured."""
        super().init_cuda_graphs()
        if self.verifier.tiers:  # the engine was started with graphs
            with torch.inference_mode():
                self.drafter.capture_head(self.model_runner.max_running_requests)
        self.speculation.measure(self.verifier, self.model_runner.max_running_requests)

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish=None, grammar_barrier=None, *, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """The engine's entry: a prefill where the batch extends, else one decode step."""
        with torch.inference_mode():
            result = self.prefill(batch) if batch.forward_mode.is_extend() else self.step(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Target prefill; the draft's KV of the same tokens is written before the radix cache may see them."""
        self.meter.interrupted()
        plan = self.model_runner.kv_index_translator.own_plan(batch)
        slots = plan.write_ids(self.drafter.runner.kv_index_translator)
        positions = torch.cat(
            [
                torch.arange(start, start + count, device=slots.device)
                for start, count in zip(batch.prefix_lens, batch.extend_lens)
            ]
        )
        result = self._target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        output = result.logits_output
        self.drafter.absorb(output.hidden_states, positions, slots)
        output.hidden_states = None
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = make_draft_input_v2(bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens)
        return result

    def step(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """One decode step: budget, draft, windows, pack, verify, accept, commit (design, section 2)."""
        speculation, meter = self.speculation, self.meter
        self.steps += 1
        meter.begin()
        self._learn_last_step()
        windows = speculation.windows
        bounds = speculation.bounds
        roster = Roster.of(
            batch.reqs, bounds.rule, self.model_runner.device, self._target_worker.random_seed, self.roster
        )
        if roster is not self.roster:
            self.drafter.catch_up()  # somebody left, so slots may have changed hands
        self.roster = roster
        step = Step.begin(self.steps, batch, self.model_runner.kv_index_translator, self.gamma, bounds, self.roster)
        budget = windows.budget(step)
        meter.planned(budget)
        drafted = None
        if not budget.skip_draft:
            states = self.drafter.run_block(batch, step, budget.draft_length)
            meter.mark("backbone")
            drafted = windows.draft(step, states, budget)
        meter.mark("draft")
        block = empty_block(step) if drafted is None else drafted.block
        slots = step.slots[:, : block.block_size + 1]
        judged = RaggedBatch.pack(step.anchors, block.tokens, self._on_device(step, drafted), step.prefix_lens, slots)
        verified = judged
        if speculation.config.verify_mode == "cap-accept" and drafted is not None:
            verified = RaggedBatch.pack(
                step.anchors, block.tokens, torch.full_like(judged.windows, block.block_size), step.prefix_lens, slots
            )
        meter.mark()
        target = self.verifier.forward(batch, step, verified)
        meter.mark("verify")
        adjust_logits(target.logits, batch, verified)
        committed = judge(target.logits, verified, judged, block, step)
        committed.lengths, committed.tokens = map(self.drafter.ranks.tensor, (committed.lengths, committed.tokens))
        meter.mark("accept")
        self._commit(step, verified, target, committed)
        meter.mark("commit")
        windows.publish(step, drafted)
        meter.end(step, drafted, judged, verified, committed, speculation)
        if batch.return_logprob:
            self._logprobs(batch, target, verified, committed)
        return self._result(step, target, judged, committed)

    def _on_device(self, step: Step, drafted) -> torch.Tensor:
        if drafted is None:
            return torch.zeros_like(step.anchors)
        return torch.from_numpy(drafted.windows).to(step.anchors.device)

    def _learn_last_step(self) -> None:
        """A step's whole time, the engine's part included, is known when the next one begins."""
        last = self.meter.finish(time.perf_counter())
        if last is not None and self.speculation.cost is not None:
            self.speculation.cost.observe(**last)
        if self.steps % SAVE_EVERY == 0:
            self.speculation.save()

    def _commit(self, step: Step, verified: RaggedBatch, target: TargetRows, committed: Committed) -> None:
        """Write the draft's KV of what was committed and has target KV: the anchor and the accepted drafts."""
        slots = step.plan.write_ids(self.drafter.runner.kv_index_translator).view(step.slots.shape)
        if verified.block_size == 0 and not target.used_graph:  # a graph's output is overwritten by the next step
            self.drafter.absorb_later(target.features, verified.positions, slots[:, 0])
            return
        kept = verified.row_to_column < committed.lengths[verified.row_to_request]
        self.drafter.absorb(
            target.features[kept],
            verified.positions[kept],
            slots[verified.row_to_request[kept], verified.row_to_column[kept]],
        )

    def _logprobs(self, batch: ScheduleBatch, target: TargetRows, verified: RaggedBatch, committed: Committed) -> None:
        """Log-probabilities of what is emitted; the engine wants gamma+1 rows of logits for every request."""
        rows = target.output.next_token_logits
        strided = rows.new_zeros(verified.requests, self.gamma + 1, rows.shape[1])
        strided[:, : verified.block_size + 1] = verified.scatter(rows)
        target.output.next_token_logits = strided.flatten(0, 1)
        compute_spec_logprobs(batch, target.output, committed.tokens.reshape(-1), chain_stride=self.gamma + 1)

    def _result(
        self, step: Step, target: TargetRows, judged: RaggedBatch, committed: Committed
    ) -> GenerationBatchResult:
        new_lens = step.prefix_lens + committed.lengths
        bonus = committed.tokens.gather(1, (committed.lengths - 1).unsqueeze(1)).squeeze(1)
        return GenerationBatchResult(
            logits_output=target.output,
            next_token_ids=committed.tokens.reshape(-1),
            accept_lens=committed.lengths.to(torch.int32),
            block_accept_lens=None if committed.ceiling is None else committed.ceiling.to(torch.int32),
            cap_lens=(judged.windows + 1).to(torch.int32),
            can_run_cuda_graph=target.used_graph,
            next_draft_input=make_draft_input_v2(bonus_tokens=bonus, new_seq_lens=new_lens),
            speculative_num_draft_tokens=self.gamma + 1,
            new_seq_lens=new_lens,
        )
