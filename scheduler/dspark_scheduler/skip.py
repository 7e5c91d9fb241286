"""When to try what the plan is not doing: drafting while plain decoding wins, and the other way round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeSchedule:
    """How rarely a step does the other thing.

    Without a look now and then a planner never learns that it is wrong. What it knows about acceptance comes from
    drafted steps alone; and if every step verifies the same number of rows, any slope of the cost curve explains them.

    Attributes:
        first: steps before the first probe.
        longest: the interval doubles after every probe that changes nothing, up to this many steps.
    """

    first: int
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.longest:
            raise ValueError(f"need 1 <= first <= longest, got {self.first} and {self.longest}")


# A probing step that takes twice as long, every 128: under 1 %. A plain step where drafting is three times as fast,
# every 512: under 0.2 %. A step that verifies one draft per request more or less than it should, every 128:
# under 0.2 %.
DRAFT_PROBES = ProbeSchedule(16, 128)
PLAIN_PROBES = ProbeSchedule(8, 512)
NEAR_PROBES = ProbeSchedule(32, 128)


class ProbeClock:
    """Counts steps under a ProbeSchedule. One call of `due` per planned step.

    Args:
        schedule: the intervals, in steps.
    """

    def __init__(self, schedule: ProbeSchedule) -> None:
        self.schedule = schedule
        self._interval = schedule.first
        self._waited = 0

    def due(self, waiting: bool) -> bool:
        """Tell the clock whether the plan leaves its thing undone; True if this step should do it all the same."""
        if not waiting:
            self._interval, self._waited = self.schedule.first, 0
            return False
        self._waited += 1
        if self._waited <= self._interval:
            return False
        self._interval, self._waited = min(2 * self._interval, self.schedule.longest), 0
        return True
