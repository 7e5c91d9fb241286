"""What an engine step costs, in seconds: the target by requests, rows and context, the draft by its block and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from .fingerprint import Fingerprint, load_measurement, save_measurement

Table = tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]
Count = int | np.ndarray
Seconds = float | np.ndarray
TABLES = ("alpha", "theta", "head", "block")
DENSE = 8192  # tokens up to which θ is kept as an array; beyond, it is computed when asked for


class CostModel(Protocol):
    """Seconds for one engine step."""

    def step_seconds(self, requests: Count, tokens: Count | range, context: float = 0) -> Seconds:
        """Seconds of the target's part of a step: `requests` running, `tokens` rows in the forward pass.

        A planner asks for a range of `tokens`, all its choices at once.
        """

    def draft_seconds(self, requests: Count, slots: Count, length: int) -> Seconds:
        """Seconds of the draft's part: `requests` blocks of `length`, of which `slots` tokens in all are sampled.

        0 for a length of 0, which is a step that does not draft. A planner asks for all its `slots` at once.
        """


@dataclass(frozen=True, eq=False)
class AdditiveCostModel:
    """T = t0 + α(R) + θ(M) + context·tokens_of_context, and δ(slots) + β(R·length) for the draft. All in seconds.

    The tables are piecewise linear and never fall. Below the first probe a table holds its first value; above the last
    it goes on with its last slope. M is rounded up to the next tier before θ is read, because that is the graph that
    will run; above the last tier steps run eagerly, and θ is read at M itself. (Paper, §5.2: SPS(B) is a staircase;
    the additive form with R and context is not in the paper.)

    Attributes:
        t0: what every step pays.
        alpha: (requests, seconds), probes ascending.
        theta: (tokens, seconds), probes ascending.
        tiers: token counts that steps are padded to, ascending; empty if the cost follows the tokens.
        context: seconds per token of context in the batch.
        head: (slots, seconds) of sampling the drafts, probes ascending; None where it is part of `block`, or free.
        block: (rows, seconds) of the draft's forward over its blocks, the writing of its context included; None where
            it is part of `head`, or free.
        whole: rows of every block, for a draft that cannot run shorter ones; None: a block has the length asked for.

    Raises:
        ValueError: a table is empty, unsorted, negative or falling, tiers are unsorted, or whole is below 1.
    """

    t0: float
    alpha: Table
    theta: Table
    tiers: Sequence[int] = ()
    context: float = 0.0
    head: Table | None = None
    block: Table | None = None
    whole: int | None = None
    _dense: np.ndarray = field(init=False, repr=False)
    _read: dict[tuple[str, int], float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in TABLES:
            if getattr(self, name) is not None or name in ("alpha", "theta"):
                object.__setattr__(self, name, checked_table(getattr(self, name), name))
        tiers = tuple(int(tier) for tier in self.tiers)
        if any(b <= a for a, b in zip((0, *tiers), tiers)):
            raise ValueError(f"tiers must be positive and ascending, got {tiers}")
        if not (0 <= self.t0 < np.inf and 0 <= self.context < np.inf):
            raise ValueError(f"t0 and context must be finite and not negative, got {self.t0} and {self.context}")
        if self.whole is not None and (type(self.whole) is not int or self.whole < 1):
            raise ValueError(f"a whole block has a whole number of rows, at least one, got {self.whole}")
        object.__setattr__(self, "tiers", tiers)
        object.__setattr__(self, "_dense", self._theta_of(np.arange(DENSE)))

    def step_seconds(self, requests: Count, tokens: Count | range, context: float = 0) -> Seconds:
        """Seconds of a step without its draft.

        Args:
            requests: R >= 0, scalar or array.
            tokens: M >= 0 rows of the forward pass (anchors and drafts), integer scalar, array or range.
            context: tokens of context of all requests together, scalar or array.

        Returns:
            float or float64 array of the broadcast shape.
        """
        index: Count | range | slice = tokens
        if isinstance(tokens, range):  # a slice needs no copy
            small = tokens.stop <= DENSE
            index = slice(tokens.start, tokens.stop, tokens.step) if small else np.asarray(tokens)
        try:
            theta = self._dense[index]
        except IndexError:  # beyond the dense part
            theta = self._theta_of(np.asarray(tokens))
        return theta + (self.t0 + self._table("alpha", requests) + self.context * context)

    def draft_seconds(self, requests: Count, slots: Count, length: int) -> Seconds:
        """Seconds of the draft, its forward and its head: scalar, or an array of the broadcast shape."""
        return self.block_seconds(requests, length) + (self.head_seconds(slots) if length else 0.0)

    def block_seconds(self, requests: Count, length: int) -> Seconds:
        """Seconds of the draft's forward over `requests` blocks of `length`; 0 for a length of 0."""
        return self._table("block", requests * (self.whole or length)) if length else 0.0

    def head_seconds(self, slots: Count) -> Seconds:
        """Seconds of sampling `slots` tokens, scalar or array; 0 for none."""
        if isinstance(slots, int):
            return self._table("head", slots) if slots else 0.0
        return np.where(np.asarray(slots) > 0, self._table("head", np.asarray(slots)), 0.0)

    def padded(self, tokens: int | np.ndarray) -> np.ndarray:
        """The rows that really run: `tokens` rounded up to the next tier; unchanged above the last."""
        tokens = np.asarray(tokens)
        if not self.tiers:
            return tokens
        tiers = np.asarray(self.tiers)
        place = np.searchsorted(tiers, tokens)
        return np.where(place < len(tiers), tiers[np.minimum(place, len(tiers) - 1)], tokens)

    def _table(self, name: str, x: Count) -> Seconds:
        """A table read at x, 0 if there is none. Whole numbers are remembered: a planner asks for the same few."""
        table = getattr(self, name)
        if table is None:
            return 0.0
        if not isinstance(x, int):
            return table_at(table, x)
        value = self._read.get((name, x))
        if value is None:
            value = self._read[name, x] = float(table_at(table, x))
        return value

    def _theta_of(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(table_at(self.theta, self.padded(tokens)))

    def to_dict(self) -> dict:
        """JSON types from which `from_dict` makes an equal model."""
        tables = {name: getattr(self, name) for name in TABLES}
        columns = {name: t and [list(map(float, column)) for column in t] for name, t in tables.items()}
        return {"t0": self.t0, "context": self.context, "tiers": list(self.tiers), "whole": self.whole, **columns}

    @classmethod
    def from_dict(cls, body: dict) -> AdditiveCostModel:
        """Raises ValueError for unknown or missing keys, and for values of another type."""
        try:
            if set(body) != {"t0", "context", "tiers", "whole", *TABLES}:
                raise ValueError(f"not a cost model: keys {sorted(body)}")
            return cls(**body)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"not a cost model: {error}") from error

    def save(self, path: str | Path, fingerprint: Fingerprint) -> None:
        """Write the tables with what they were measured on."""
        save_measurement(path, "cost", fingerprint, self.to_dict())

    @classmethod
    def load(cls, path: str | Path, fingerprint: Fingerprint) -> AdditiveCostModel:
        """Read tables measured on exactly this; raises FingerprintMismatch naming what differs."""
        return cls.from_dict(load_measurement(path, "cost", fingerprint))


def table_at(table: Table, x: float | np.ndarray) -> float | np.ndarray:
    """Read a piecewise linear table at x: first value below it, last slope above it."""
    probes, seconds = table
    values = np.interp(x, probes, seconds)
    if len(probes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (probes[-1] - probes[-2])
        values = values + slope * np.maximum(np.asarray(x) - probes[-1], 0)
    return values


def checked_table(table: Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The table as two read-only float64 arrays; raises ValueError where it is empty, unsorted, negative or falling."""
    probes, seconds = (np.asarray(column, np.float64) for column in table)
    if probes.ndim != 1 or probes.shape != seconds.shape or len(probes) == 0:
        raise ValueError(f"{name} must be two sequences of one length, got {table!r}")
    if not (np.isfinite(probes).all() and np.isfinite(seconds).all()):
        raise ValueError(f"{name} holds a number that is not finite")
    if (np.diff(probes) <= 0).any():
        raise ValueError(f"{name}: probes must ascend, got {probes.tolist()}")
    if seconds[0] < 0 or (np.diff(seconds) < 0).any():
        raise ValueError(f"{name}: seconds must be non-negative and never fall, got {seconds.tolist()}")
    for column in (probes, seconds):
        column.flags.writeable = False
    return probes, seconds
