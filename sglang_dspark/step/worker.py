"""The speculative worker: prefill, and one decode step from budget to commit (docs/structure.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

from dspark_kernels.ragged import RaggedBatch
from dspark_scheduler import Plan
from sglang_dspark.accelerator.device import describe_device
from sglang_dspark.learning.clock import StepTimes, clock_of
from sglang_dspark.learning.meter import Meter
from sglang_dspark.learning.report import LAG, Record, Reports
from sglang_dspark.settings.flags import config_of
from sglang_dspark.step.adjust import adjust_logits
from sglang_dspark.step.commit import Committed, judge
from sglang_dspark.step.drafter import Drafter
from sglang_dspark.step.speculation import SAVE_EVERY, Speculation, fingerprint_of
from sglang_dspark.step.types import Drafted, Roster, Step
from sglang_dspark.step.verifier import TargetRows, Verifier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs


class DSparkWorker(BaseSpecWorker):
    """Runs a target and its draft for the engine's scheduler, one batch at a time."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self._server_args, self._target_worker = server_args, target_worker
        self.model_runner = target_worker.model_runner
        self.drafter = Drafter(server_args, gpu_id, nccl_port, target_worker)
        self._draft_worker = self.drafter.worker
        self.gamma = self.drafter.gamma
        self.verifier = Verifier(target_worker, self.gamma)
        parallel = get_parallel()
        device = torch.device(self.model_runner.device)
        fingerprint = fingerprint_of(
            self.model_runner.model_config, self.drafter.folder, self.gamma, describe_device(device), parallel.tp_size
        )
        first = parallel.tp_rank == 0 and not parallel.dp_rank
        self.speculation = Speculation(config_of(server_args), self.drafter, fingerprint, learning=first)
        self.meter, self.clock = Meter(self.gamma), clock_of(device)
        at_once = device.type == "cpu" and server_args.disable_overlap_schedule
        self.reports = Reports(device, lag=0 if at_once else LAG)
        self.roster: Roster | None = None
        self.steps = 0
        self._untimed: deque[Record] = deque()  # records whose step is counted and not timed yet, oldest first
        self._last_times: StepTimes | None = None  # of the last step, if nothing has run since

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
        self.drafter.join_capture(self.model_runner.max_running_requests)
        super().init_cuda_graphs()
        self.drafter.check_graph()
        self.speculation.measure(self.verifier, self.model_runner.max_running_requests)

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish=None, grammar_barrier=None, *, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """The engine's entry: a prefill where the batch extends, else one decode step."""
        publish = on_publish or (lambda lens: None)
        with torch.inference_mode():
            return self.prefill(batch, publish) if batch.forward_mode.is_extend() else self.step(batch, publish)

    def prefill(self, batch: ScheduleBatch, publish: Callable) -> GenerationBatchResult:
        """Target prefill; the draft's KV of the same tokens is written before the radix cache may see them."""
        self._last_times = None  # the time until the next step says nothing about the last one
        self.drafter.context.catch_up()
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
        self.drafter.context.write(output.hidden_states, positions, slots)
        output.hidden_states = None
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = make_draft_input_v2(bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens)
        publish(result.new_seq_lens)
        return result

    def step(self, batch: ScheduleBatch, publish: Callable = lambda lens: None) -> GenerationBatchResult:
        """One decode step: plan, draft, windows, pack, verify, accept, commit (docs/design.md, the step)."""
        step = self.begin(batch)
        policy = self.speculation.policy
        plan = policy.plan(step)  # from survival two steps old
        tier = self.verifier.tier(plan)
        drafted = self.draft(batch, step, plan, tier)  # tokens, law, windows
        judged = step.pack(drafted.block, drafted.windows, tier)  # rows that may be emitted
        whole = self.whole_blocks(plan)
        verified = self.pack_whole(step, drafted) if whole else judged  # rows that the target runs
        with step.times.part("verify"):
            target = self.verifier.forward(batch, step, verified, whole=whole)
        with step.times.part("accept"):
            adjust_logits(target.logits, batch, verified)
            committed = judge(target.logits, verified, judged, drafted.block, step, ceiling=self.speculation.caps)
            committed = self.agreed(committed)
        result = self.result(batch, step, target, verified, judged, committed)
        publish(result.new_seq_lens)
        with step.times.part("commit"):
            self.drafter.context.absorb(step, verified, target, committed.lengths)
        self.report(step, plan, drafted, verified, committed, whole=whole)
        return result

    def begin(self, batch: ScheduleBatch) -> Step:
        """Who runs, within which bounds, and with which noise; what reports are due is learned first."""
        self.steps += 1
        times = StepTimes(self.clock)
        if self._last_times is not None:
            self._last_times.follow(times)
        self._last_times = times
        self.settle()
        if self.steps % SAVE_EVERY == 0:
            self.speculation.save()
        bounds, seed = self.speculation.bounds, self._target_worker.random_seed
        roster = Roster.of(batch.reqs, bounds.rule, self.drafter.device, seed, self.roster)
        if roster is not self.roster:
            self.drafter.context.catch_up()  # somebody left, so slots may have changed hands
        self.roster = roster
        translator = self.model_runner.kv_index_translator
        return Step.begin(self.steps, batch, translator, self.gamma, bounds, roster, times)

    def draft(self, batch: ScheduleBatch, step: Step, plan: Plan, tier: int | None) -> Drafted:
        """The step's block and windows; nothing where the plan rests."""
        if plan.skip_draft:
            return Drafted.nothing(step)
        with step.times.part("backbone"):
            run = self.drafter.run(batch, step, plan.draft_length)
        with step.times.part("draft"):
            return self.speculation.policy.draft(step, plan, run, tier)

    def whole_blocks(self, plan: Plan) -> bool:
        """Whether whole blocks are verified and windows only judged: cap-accept asks for it, and graphs that were captured
        for whole blocks take nothing else."""
        full = int(plan.low.min()) == self.gamma and not self.verifier.on_cpu and not self.verifier.tiers
        return not plan.skip_draft and (self.speculation.caps or full)

    def pack_whole(self, step: Step, drafted: Drafted) -> RaggedBatch:
        """Anchors and every drafted token as rows, whatever the windows; padded to a tier on an accelerator."""
        k = drafted.block.block_size
        tier = None if self.verifier.on_cpu else self.verifier.padded(step.size, step.size * (k + 1))
        return step.pack(drafted.block, torch.full_like(drafted.windows, k), tier)

    def agreed(self, committed: Committed) -> Committed:
        """The first rank's on every rank."""
        tensor = self.drafter.ranks.tensor
        committed.lengths, committed.tokens = tensor(committed.lengths), tensor(committed.tokens)
        return committed

    def report(
        self, step: Step, plan: Plan, drafted: Drafted, verified: RaggedBatch, committed: Committed, *, whole: bool
    ) -> None:
        """Send what the step brought to whoever learns from it; on a plain CPU they read it now."""
        step.times.end()
        record = Record(
            step.number, step.ids, step.greedy, step.context, plan, self.speculation.policy,
            drafted.block.block_size, verified.rows, whole, step.times,
        )  # fmt: skip
        self.reports.issue(record, committed.lengths, drafted.windows, drafted.confidence, committed.acceptance)
        self.settle()

    def settle(self, *, everything: bool = False) -> None:
        """Learn from the reports that are due, and from the times of steps that another has followed.

        Args: everything: wait for reports that are not due yet: for whoever asks, between two steps, how it stands.
        """
        for report in self.reports.due(self.steps + (self.reports.lag if everything else 0)):
            self.speculation.learn(report, self.meter)
            self._untimed.append(report.record)
        while self._untimed and self._untimed[0].number <= self.steps - max(1, self.reports.lag):
            self.speculation.learn_time(self._untimed.popleft(), self.meter)

    def result(
        self,
        batch: ScheduleBatch,
        step: Step,
        target: TargetRows,
        verified: RaggedBatch,
        judged: RaggedBatch,
        committed: Committed,
    ) -> GenerationBatchResult:
        """What the engine is told of a step."""
        if batch.return_logprob:
            self._logprobs(batch, target, verified, committed)
        new_lens = step.prefix_lens + committed.lengths
        return GenerationBatchResult(
            logits_output=target.output,
            next_token_ids=committed.tokens.reshape(-1),
            accept_lens=committed.lengths.to(torch.int32),
            block_accept_lens=None if committed.ceiling is None else committed.ceiling.to(torch.int32),
            cap_lens=(judged.windows + 1).to(torch.int32),
            can_run_cuda_graph=target.used_graph,
            next_draft_input=make_draft_input_v2(bonus_tokens=committed.bonus, new_seq_lens=new_lens),
            speculative_num_draft_tokens=self.gamma + 1,
            new_seq_lens=new_lens,
        )

    def _logprobs(self, batch: ScheduleBatch, target: TargetRows, verified: RaggedBatch, committed: Committed) -> None:
        """Log-probabilities of what is emitted; the engine wants gamma+1 rows of logits for every request."""
        rows = target.output.next_token_logits
        strided = rows.new_zeros(verified.requests, self.gamma + 1, rows.shape[1])
        strided[:, : verified.block_size + 1] = verified.scatter(rows)
        target.output.next_token_logits = strided.flatten(0, 1)
        compute_spec_logprobs(batch, target.output, committed.tokens.reshape(-1), chain_stride=self.gamma + 1)
