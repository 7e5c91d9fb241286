"""A loaded server, step by step, without a model: who is running, what is accepted, what a step costs.

Times are those of the cost model; prefill is free and instantaneous, so the figures are about decoding alone. All
policies of one load meet the same traffic: the same requests in the same order and, in a closed loop, the same block at
the same place and step. Committed tokens are counted as expectations given the true acceptance of the verified drafts,
which leaves the means as they are and takes the coin tosses out of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .acceptance import Acceptance, sampler_of
from .calibration import sigmoid
from .contenders import Contender, Decision, Setup, View, make_contender
from .cost import CostModel
from .machines import Machine
from .online_calibration import OnlineCalibrator


@dataclass(frozen=True)
class Load:
    """How requests arrive: a closed loop of `concurrency`, or an open one of `rate` per second (Poisson).

    Attributes:
        concurrency: requests running at all times; None for an open loop.
        rate: arrivals per second; None for a closed loop.
        mean_output: tokens a request generates on average (geometric).
        mean_prompt: tokens of context it starts with on average (geometric).
        max_running: most requests running at once; others wait.
    """

    concurrency: int | None = None
    rate: float | None = None
    mean_output: float = 256.0
    mean_prompt: float = 400.0
    max_running: int = 256

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load has either a concurrency or a rate")
        arrivals = self.rate or self.concurrency or 0
        if not arrivals > 0 or self.max_running < 1 or min(self.mean_output, self.mean_prompt) < 1:
            raise ValueError(f"a load needs positive numbers, got {self}")

    @property
    def label(self) -> str:
        """The load in a few characters."""
        return f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """What a policy made of a load.

    Attributes:
        policy, load: what was run.
        steps, seconds: decode steps counted (after warm-up) and their time, waiting for arrivals apart.
        tokens_per_second: committed tokens per second of stepping.
        tokens_per_user: what one request sees, tokens per second: accepted length over the time of its steps.
        accepted_length: tokens per request and step, bonus included.
        mean_window: drafts verified per request and step.
        windows: [γ + 1] share of each window.
        step_seconds: mean.
        skipped: share of steps without a draft.
        running: mean number of requests.
        waiting_seconds: mean time that a request waited for a place (open loop).
        budgets: [steps] drafts verified in each step.
    """

    policy: str
    load: Load
    steps: int
    seconds: float
    tokens_per_second: float
    tokens_per_user: float
    accepted_length: float
    mean_window: float
    windows: np.ndarray
    step_seconds: float
    skipped: float
    running: float
    waiting_seconds: float
    budgets: np.ndarray


@dataclass
class _Traffic:
    """The requests of a run: who is running, who waits, and the numbers that make them."""

    load: Load
    acceptance: Acceptance
    seed: int
    now: float = 0.0
    next_id: int = 0
    waited: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.people, self.arrivals = np.random.default_rng((self.seed, 1)), np.random.default_rng((self.seed, 2))
        self.next_arrival = 0.0 if self.load.rate is None else self.arrivals.exponential(1 / self.load.rate)
        # Columns: id, domain, easiness, tokens left, context.
        self.rows = np.empty((0, 5))

    def admit(self, first: bool) -> None:
        """Fill the places: at once in a closed loop, with whoever has arrived in an open one."""
        if self.load.concurrency is not None:
            self._add(self.load.concurrency - len(self.rows), first)
            return
        assert self.load.rate is not None
        while self.next_arrival <= self.now or not len(self.rows):
            if len(self.rows) >= self.load.max_running:
                break
            self.now = max(self.now, self.next_arrival)
            self.waited.append(self.now - self.next_arrival)
            self._add(1, False)
            self.next_arrival += self.arrivals.exponential(1 / self.load.rate)

    def _add(self, count: int, staggered: bool) -> None:
        for _ in range(count):
            domain, easiness = self.people.integers(len(self.acceptance.domains)), self.people.standard_normal()
            left, context = (
                self.people.geometric(1 / self.load.mean_output),
                self.people.geometric(1 / self.load.mean_prompt),
            )
            if staggered:  # a loop that has been running for long
                left = max(1, int(left * self.people.random()))
            row = np.array([self.next_id, domain, easiness * self.acceptance.request_spread, left, context])
            self.rows = np.vstack([self.rows, row])
            self.next_id += 1

    def commit(self, tokens: np.ndarray, seconds: float) -> None:
        """Give every request its tokens; whoever is done leaves, and a closed loop puts the next one in its place."""
        self.now += seconds
        self.rows[:, 3] -= tokens
        self.rows[:, 4] += tokens
        done = self.rows[:, 3] <= 0
        if self.load.rate is None and done.any():
            kept, self.rows = self.rows, np.empty((0, 5))
            self._add(int(done.sum()), False)
            kept[done], self.rows = self.rows, kept
        else:
            self.rows = self.rows[~done]


@dataclass
class _Totals:
    """Running sums over the steps that count."""

    gamma: int
    seconds: float = 0.0
    tokens: float = 0.0
    requests: int = 0
    request_seconds: float = 0.0
    skipped: int = 0
    budgets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.windows = np.zeros(self.gamma + 1)

    def add(self, decision: Decision, expected: float, seconds: float) -> None:
        requests = len(decision.windows)
        self.seconds += seconds
        self.tokens += expected
        self.requests += requests
        self.request_seconds += requests * seconds
        self.skipped += decision.length == 0
        self.budgets.append(int(decision.windows.sum()))
        self.windows += np.bincount(decision.windows, minlength=self.gamma + 1)

    def result(self, policy: str, load: Load, waited: list[float]) -> SimulationResult:
        steps, length = len(self.budgets), self.tokens / self.requests
        return SimulationResult(
            policy,
            load,
            steps,
            self.seconds,
            self.tokens / self.seconds,
            self.tokens / self.request_seconds,
            length,
            sum(self.budgets) / self.requests,
            self.windows / self.requests,
            self.seconds / steps,
            self.skipped / steps,
            self.requests / steps,
            float(np.mean(waited)) if waited else 0.0,
            np.array(self.budgets),
        )


def simulate(
    policy: str | Callable[[Setup], Contender],
    acceptance: Acceptance,
    machine: Machine,
    load: Load,
    *,
    steps: int = 300,
    warmup: int = 60,
    seed: int = 0,
    calibrate: bool = True,
    believed: CostModel | None = None,
    noise: float = 0.0,
) -> SimulationResult:
    """Run one policy under one load.

    Args:
        policy: a name for `contenders.make_contender`, or whatever makes a contender of a setup.
        acceptance: what is accepted, and how well the confidence head knows it.
        machine: what steps cost.
        load: how requests arrive.
        steps, warmup: steps that count, and steps before them (calibration and running means settle).
        seed: of the traffic and the blocks.
        calibrate: whether confidence passes an `OnlineCalibrator` that learns from what was verified.
        believed: the cost model that the policy plans with; None is the truth. An OnlineCostModel learns.
        noise: relative deviation of step times, for what the policy is told and what is counted.
    """
    sampler, gamma = sampler_of(acceptance), acceptance.gamma
    setup = Setup(machine, machine.cost if believed is None else believed, gamma, sampler.mean_survival)
    contender = make_contender(policy, setup) if isinstance(policy, str) else policy(setup)
    calibrator = OnlineCalibrator(gamma, refit_every=16) if calibrate and contender.reads != "nothing" else None
    traffic, totals = _Traffic(load, acceptance, seed), _Totals(gamma)
    blocks, coins, jitter = (np.random.default_rng((seed, k)) for k in (3, 4, 5))
    for step in range(warmup + steps):
        traffic.admit(step == 0)
        rows, context = traffic.rows, float(traffic.rows[:, 4].sum())
        truth, of_tokens, of_context = sampler.blocks(rows[:, 1].astype(np.int64), rows[:, 2], blocks)
        logits = of_context if contender.reads == "context" else of_tokens
        raw = sigmoid(logits)
        confidence = raw if calibrator is None else calibrator.apply(logits)
        ids = tuple(rows[:, 0].astype(int).tolist())
        decision = contender.decide(View(step, ids, confidence, raw, context))
        requests, verified = len(rows), int(decision.windows.sum())
        seconds = float(
            machine.cost.step_seconds(requests, requests + verified, context)
            + machine.cost.draft_seconds(requests, decision.slots, decision.length)
        )
        seconds *= float(np.exp(noise * jitter.standard_normal())) if noise else 1.0
        contender.told(requests, requests + verified, context, seconds, decision.slots, decision.length)
        inside = np.arange(gamma) < decision.windows[:, None]
        passed = np.cumprod(inside & (coins.random(truth.shape) < truth), axis=1)
        if calibrator is not None and verified:
            at_risk = inside & np.column_stack([np.ones(requests, bool), passed[:, :-1] > 0])
            calibrator.observe(logits, passed, at_risk)
            calibrator.end_step()
        if step >= warmup:
            totals.add(decision, requests + float((np.cumprod(truth, axis=1) * inside).sum()), seconds)
        traffic.commit(1 + passed.sum(axis=1), seconds)
    return totals.result(policy if isinstance(policy, str) else policy.__name__, load, traffic.waited)
