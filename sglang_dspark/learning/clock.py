"""When a step and its parts began and ended: on the host's clock, or by events on the device's stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

STALL_SECONDS = 1.0  # a gap between steps beyond this is idleness, not cost


class HostClock:
    """For a device whose work is done when a call returns: a plain CPU."""

    def now(self) -> float:
        """A stamp: seconds of a clock that never goes back."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Seconds between two stamps."""
        return end - begin


class DeviceClock:
    """For a device that runs behind the host: a stamp is an event, and seconds are known once the device has passed it."""

    def __init__(self, device: torch.device) -> None:
        self._events = torch.get_device_module(device)

    def now(self):
        """A stamp: an event recorded on the device's current stream."""
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin, end) -> float:
        """Seconds between two stamps; waits until the device has passed the later one."""
        end.synchronize()
        return begin.elapsed_time(end) / 1000.0


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """The clock of steps that run on `device`."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


@dataclass
class StepTimes:
    """Stamps of one step. `next` is the begin of the step that followed at once; None: nothing did."""

    clock: HostClock | DeviceClock
    begin: object = None
    next: object = None
    parts: dict[str, tuple[object, object]] = field(default_factory=dict)
    launched: float = 0.0  # host seconds that launching took, parts included
    _started: float = field(default_factory=time.perf_counter)
    _ended: float = 0.0

    def __post_init__(self) -> None:
        self.begin = self.clock.now()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside belongs to this part of the step."""
        begin = self.clock.now()
        yield
        self.parts[name] = (begin, self.clock.now())

    @property
    def on_host(self) -> bool:
        """Whether the parts' seconds are the host's own."""
        return isinstance(self.clock, HostClock)

    def end(self) -> None:
        """The step is launched."""
        self._ended = time.perf_counter()
        self.launched = self._ended - self._started

    def follow(self, following: StepTimes) -> None:
        """Another step begins, and nothing ran in between."""
        if following._started - self._ended <= STALL_SECONDS:
            self.next = following.begin

    @property
    def seconds(self) -> float | None:
        """The whole step, the engine's part included; None where no step followed at once."""
        return None if self.next is None else self.clock.seconds(self.begin, self.next)

    def part_seconds(self) -> dict[str, float]:
        """Seconds of each part that ran."""
        return {name: self.clock.seconds(*stamps) for name, stamps in self.parts.items()}
