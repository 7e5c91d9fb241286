"""Every policy the simulator can run, ours and others', behind one method: look at a step, decide its windows.

Another policy is one class and one line in `_FACTORIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from .baselines import best_schedule, early_stop_windows, floor_lookup_budget, static_windows, threshold_windows
from .budget import best_budget
from .cost import CostModel
from .machines import Machine
from .online_cost import OnlineCostModel
from .plan import Terms
from .planner import Planner
from .policies import POLICIES
from .probes import PROBES, ProbeRule
from .relay import ContextSurvival, SurvivalRelay
from .survival import survival
from .windows import allocate_windows


class View(NamedTuple):
    """What a step shows: its number, the requests [R], confidence [R, γ] calibrated and raw, and tokens of context."""

    step: int
    ids: tuple[int, ...]
    confidence: np.ndarray
    raw_confidence: np.ndarray
    context: float


class Decision(NamedTuple):
    """Windows [R], the slots that were sampled, and the length of the blocks that ran (0: no draft did)."""

    windows: np.ndarray
    slots: int
    length: int


class Setup(NamedTuple):
    """What a policy is made from: the machine, what the planner believes about its cost, γ, and mean survival [γ]."""

    machine: Machine
    believed: CostModel
    gamma: int
    mean_survival: np.ndarray


class Contender(Protocol):
    """A policy under simulation.

    Attributes:
        reads: which confidence it needs: "tokens" (of the head that reads drafted tokens), "context", or "nothing".
    """

    reads: str

    def decide(self, view: View) -> Decision:
        """Windows for this step."""

    def told(self, requests: int, tokens: int, context: float, seconds: float, slots: int, length: int) -> None:
        """What the step took."""


class _Deaf:
    reads = "tokens"

    def told(self, requests: int, tokens: int, context: float, seconds: float, slots: int, length: int) -> None:
        """Learns nothing."""


class Fixed(_Deaf):
    """The same length for every request: by batch size if `length` is None (a tuned schedule), 0 for `off`."""

    reads = "nothing"

    def __init__(self, setup: Setup, length: int | None) -> None:
        self.setup, self.length = setup, length
        self._by_size: dict[int, int] = {}

    def decide(self, view: View) -> Decision:
        requests, length = len(view.ids), self.length
        if length is None:
            if requests not in self._by_size:
                shape = self.setup.machine.shape(self.setup.gamma)
                self._by_size[requests] = best_schedule(
                    self.setup.believed, self.setup.mean_survival, requests, shape, view.context
                )
            length = self._by_size[requests]
        return drafted(self.setup, static_windows(requests, length), length)


class WholeBlock(_Deaf):
    """A policy that drafts whole blocks and reads this step's confidence: `rule(view) -> windows`."""

    def __init__(self, setup: Setup, rule: Callable[[View], np.ndarray]) -> None:
        self.setup, self.rule = setup, rule

    def decide(self, view: View) -> Decision:
        return Decision(self.rule(view), len(view.ids) * self.setup.gamma, self.setup.gamma)


class FloorLookup(_Deaf):
    """SGLang 0.5.23's planner: K from a table of steps per second at the tiers, read from the probe below, over
    survival two steps old (ones for new requests), spent by this step's survival; it always drafts."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.relay = setup, SurvivalRelay(max_age=2)
        self._tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def decide(self, view: View) -> Decision:
        requests, now = len(view.ids), survival(view.confidence)
        old = self.relay.read(view.step, view.ids, self.setup.gamma)
        self.relay.publish(view.step, view.ids, now)
        probes, speed = self._table(requests)
        budget = floor_lookup_budget(old.filled(np.ones(self.setup.gamma))[0], probes, speed)
        return Decision(allocate_windows(now, budget), requests * self.setup.gamma, self.setup.gamma)

    def _table(self, requests: int) -> tuple[np.ndarray, np.ndarray]:
        """Steps per second as its profiler measures them: full windows of 1, 2, 4, ... requests, drafting included."""
        if not self._tables:
            sizes = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])
            gamma, model = self.setup.gamma, self.setup.believed
            tokens = sizes * (gamma + 1)
            seconds = model.step_seconds(sizes, tokens) + model.draft_seconds(sizes, sizes * gamma, gamma)
            self._tables[0] = tokens, np.asarray(1.0 / seconds)
        return self._tables[0]


class Oracle(_Deaf):
    """The best budget on this step's own survival: not lossless, an upper bound for whoever knows the same survival."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def decide(self, view: View) -> Decision:
        now, machine, gamma = survival(view.confidence), self.setup.machine, self.setup.gamma
        terms = Terms.of(machine.cost, machine.shape(gamma), len(now), context=view.context)
        plan = best_budget(now[None], terms)
        return drafted(self.setup, allocate_windows(now, plan.tokens, max_window=plan.high), plan.draft_length)


class Planned:
    """Our planner under one of its policies, driven as the worker drives it; `probes` as `Planner` takes them."""

    def __init__(self, setup: Setup, name: str, probes: ProbeRule | None = PROBES) -> None:
        self.setup, self.policy = setup, POLICIES[name]
        self.reads = "context" if self.policy.reads == "context" else "tokens"
        drafting = setup.machine.drafting if name == "causal" else setup.machine.drafting_known
        self.planner = Planner(setup.gamma, setup.believed, self.policy, drafting=drafting, probes=probes)

    def decide(self, view: View) -> Decision:
        plan = self.planner.plan(view.step, view.ids, view.context)
        if plan.skip_draft:
            return Decision(plan.low, 0, 0)
        shape = self.planner.shape
        now = survival(view.confidence)
        self.planner.publish(view.step, view.ids, now)
        reads: dict[str, np.ndarray | ContextSurvival | None] = {
            "tokens": now,
            "context": ContextSurvival(now, reads_drafted_tokens=False),
            "nothing": None,
        }
        windows = self.policy.windows(plan, reads[self.policy.reads])
        slots = shape.slots(len(now), plan.draft_length, int(windows.sum()))
        return Decision(windows, int(slots), shape.run(plan.draft_length))

    def told(self, requests: int, tokens: int, context: float, seconds: float, slots: int, length: int) -> None:
        """Feeds the online cost model, if there is one."""
        if isinstance(self.planner.cost, OnlineCostModel):
            self.planner.cost.observe(requests, tokens, context, seconds, slots=slots, length=length)


def drafted(setup: Setup, windows: np.ndarray, length: int) -> Decision:
    """The decision for windows that are cut from drafts of this length."""
    shape = setup.machine.shape(setup.gamma)
    slots = shape.slots(len(windows), length, int(windows.sum())) if length else 0
    return Decision(windows, int(slots), shape.run(length))


_FACTORIES: dict[str, Callable[[Setup, str], Contender]] = {
    "off": lambda setup, _: Fixed(setup, 0),
    "static": lambda setup, length: Fixed(setup, int(length)),
    "schedule": lambda setup, _: Fixed(setup, None),
    "threshold": lambda setup, level: WholeBlock(setup, lambda v: threshold_windows(v.raw_confidence, float(level))),
    "algorithm1": lambda setup, _: WholeBlock(
        setup, lambda v: early_stop_windows(survival(v.confidence), setup.believed, v.context)
    ),
    "floor": lambda setup, _: FloorLookup(setup),
    "lagged": lambda setup, _: Planned(setup, "lagged"),
    "causal": lambda setup, _: Planned(setup, "causal"),
    "ahead": lambda setup, _: Planned(setup, "ahead"),
    "oracle": lambda setup, _: Oracle(setup),
}


def make_contender(name: str, setup: Setup) -> Contender:
    """A policy by name: off, static-K, schedule, threshold-X, algorithm1, floor, lagged, causal, ahead, oracle.

    Raises:
        ValueError: unknown name, or a number that is missing or out of range.
    """
    kind, _, number = name.partition("-")
    if kind not in _FACTORIES:
        raise ValueError(f"unknown policy {name!r}: choose from {', '.join(sorted(_FACTORIES))}")
    if kind in ("static", "threshold") and not number:
        raise ValueError(f"policy {kind!r} needs a number: {kind}-3 or so")
    if kind == "static" and not 0 <= int(number) <= setup.gamma:
        raise ValueError(f"{name}: the block has {setup.gamma} tokens")
    return _FACTORIES[kind](setup, number)


def all_policies(gamma: int) -> list[str]:
    """Every policy, static at every length; the order of tables."""
    lengths = [f"static-{length}" for length in range(1, gamma + 1)]
    return ["off", *lengths, "schedule", "threshold-0.6", "algorithm1", "floor", "lagged", "causal", "ahead", "oracle"]
