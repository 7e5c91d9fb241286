"""What the last minutes were like, in memory of a fixed size: steps by time and by load, for page and status."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

SLOT_SECONDS = 2.0
SLOTS = 150  # five minutes
RECENT = 240  # timed steps kept one by one, for the cost picture
LOADS = 12  # classes of running requests: 1, 2, 3-4, 5-8, ... up to 1025 and more
CHANGES = 32  # settings kept
_COLUMNS = ("steps", "requests", "committed", "skipped", "timed", "seconds", "predicted")


class History:
    """Sums of steps by slots of two seconds, and by load since the settings last changed.

    Args:
        gamma: block size; windows are counted from 0 to gamma.
        clock: seconds since 1970.
    """

    def __init__(self, gamma: int, clock=time.time) -> None:
        self.gamma, self.clock = gamma, clock
        self._slots = np.zeros((SLOTS, len(_COLUMNS) + gamma + 1))
        self._numbers = np.full(SLOTS, -1, np.int64)
        self._loads = np.zeros((LOADS, len(_COLUMNS) + gamma + 1))
        self.recent: deque[tuple] = deque(maxlen=RECENT)  # (requests, rows, seconds, predicted seconds)
        self.changes: deque[dict] = deque(maxlen=CHANGES)

    def add(self, requests: int, committed: int, skipped: bool, windows: np.ndarray) -> None:
        """Count a step: its requests, committed tokens, whether it did not draft, and windows int [gamma+1] by size."""
        for row in self._rows(requests):
            row[:4] += (1, requests, committed, skipped)
            row[len(_COLUMNS) :] += windows

    def time(self, seconds: float, predicted: float, requests: int, rows: int) -> None:
        """The whole time of the last step, once it is known, and what the cost model said."""
        for row in self._rows(requests):
            row[4:7] += (1, seconds, predicted)
        self.recent.append((requests, rows, seconds, predicted))

    def settings(self, config) -> None:
        """The settings changed (or are the first): what is counted by load starts anew."""
        self._loads[:] = 0
        self.changes.append({"at": self.clock(), "verify_mode": config.verify_mode})

    def by_time(self) -> list[dict]:
        """One record per slot that saw a step, oldest first; `at` is the slot's start in seconds since 1970."""
        order = np.argsort(self._numbers)
        oldest = int(self.clock() // SLOT_SECONDS) - SLOTS
        return [
            {"at": float(self._numbers[i] * SLOT_SECONDS), **self._record(self._slots[i])}
            for i in order
            if self._numbers[i] > max(oldest, 0)
        ]

    def by_load(self) -> list[dict]:
        """One record per class of running requests that was met; `up_to` is the class's largest number."""
        return [{"up_to": 1 << i, **self._record(row)} for i, row in enumerate(self._loads) if row[0]]

    def _rows(self, requests: int) -> tuple[np.ndarray, np.ndarray]:
        number = int(self.clock() // SLOT_SECONDS)
        place = number % SLOTS
        if self._numbers[place] != number:
            self._numbers[place] = number
            self._slots[place] = 0
        return self._slots[place], self._loads[min((requests - 1).bit_length(), LOADS - 1)]

    def _record(self, row: np.ndarray) -> dict:
        head = dict(zip(_COLUMNS, row[: len(_COLUMNS)].tolist()))
        counts = {name: int(head[name]) for name in ("steps", "requests", "committed", "skipped", "timed")}
        return {**head, **counts, "windows": row[len(_COLUMNS) :].astype(int).tolist()}
