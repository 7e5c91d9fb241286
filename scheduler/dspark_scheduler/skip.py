"""When to draft again after plain decoding won: a probing schedule with a growing interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeSchedule:
    """How rarely a step drafts although plain decoding is expected to win.

    Without a look now and then, the planner would never learn that drafting pays again: what it knows about
    acceptance comes from drafted steps alone.

    Attributes:
        first: plain steps before the first probe.
        longest: the interval doubles after every probe that changes nothing, up to this many steps. With a probe that
            costs twice a plain step, 128 keeps the loss under 1 %.
    """

    first: int = 16
    longest: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.longest:
            raise ValueError(f"need 1 <= first <= longest, got {self.first} and {self.longest}")


class ProbeClock:
    """Counts plain steps under a ProbeSchedule. One call of `due` per planned step.

    Args:
        schedule: the intervals, in steps.
    """

    def __init__(self, schedule: ProbeSchedule) -> None:
        self.schedule = schedule
        self._interval = schedule.first
        self._plain = 0

    def due(self, skip: bool) -> bool:
        """Tell the clock whether the plan says skip; True if this step should draft all the same."""
        if not skip:
            self._interval, self._plain = self.schedule.first, 0
            return False
        self._plain += 1
        if self._plain <= self._interval:
            return False
        self._interval, self._plain = min(2 * self._interval, self.schedule.longest), 0
        return True
