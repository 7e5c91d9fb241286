"""The live cost of a step: the scheduler's cost model, plus what this server's draft pays before its first token."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark_scheduler import AdditiveCostModel, OnlineCostModel
from dspark_scheduler.cost import checked_table, table_at
from sglang_dspark.schema import first_fault

COST_KIND = "server-cost"  # of the file that keeps a ServerCost
_RATIO_MEMORY = 64.0  # steps over which the draft backbone's time is averaged
_REFUTED = 1.5  # a backbone so many times quicker than believed is believed at once: what else runs can only delay it


class _StoredCost(BaseModel):
    """The JSON of a `ServerCost`; `model` is the scheduler's own."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    model: dict[str, Any]
    block: Annotated[list[list[float]], Field(min_length=2, max_length=2)]
    gamma: Annotated[int, Field(ge=1)]
    short: bool


class ServerCost:
    """A CostModel (dspark_scheduler) for the batch at hand.

    A drafting step pays for the block's forward, whatever is drawn from it; `draft_seconds` of the scheduler's model
    speaks of drawn slots only. `requests` is set before every plan, and the block's seconds are added to any draft.

    Args:
        model: target and head costs; an OnlineCostModel learns, an AdditiveCostModel stays as it is.
        block: (rows, seconds) probes of the draft's forward over its blocks' rows and of writing its context.
        gamma: rows of a whole block.
        short: whether a block is run no longer than the longest window that may be verified.
    """

    def __init__(self, model: OnlineCostModel | AdditiveCostModel, block: tuple, gamma: int, short: bool) -> None:
        self.model = model
        self.block, self.gamma, self.short = block, gamma, short
        self.requests = 1
        self._ratio = 1.0
        self._table: dict[int, float] = {}  # `block` at the numbers of rows that were asked for

    def step_seconds(self, requests, tokens, context=0):
        """Seconds of the target's part of a step (see `AdditiveCostModel.step_seconds`)."""
        return self.model.step_seconds(requests, tokens, context)

    def draft_seconds(self, slots, length=None):
        """Seconds of drafting `slots` tokens from blocks of `length` for the batch at hand, the blocks included."""
        return self.model.draft_seconds(slots) + self.backbone_seconds(self.requests, length)

    def backbone_seconds(self, requests: int, length: int | None = None) -> float:
        """Seconds of one forward over the blocks of `requests` requests, `length` drafts each (None: whole blocks)."""
        rows = requests * (length if self.short and length else self.gamma)
        if rows not in self._table:
            self._table[rows] = float(table_at(self.block, rows))
        return self._table[rows] * self._ratio

    def observe(
        self,
        *,
        requests: int,
        rows: int,
        context: float,
        seconds: float,
        slots: int,
        length: int,
        backbone_seconds: float,
        head_seconds: float,
    ) -> None:
        """Learn from one step; `seconds` is the whole of it, `slots` and `length` 0 for a step that did not draft."""
        if not isinstance(self.model, OnlineCostModel):
            return
        if slots:
            measured = backbone_seconds * self._ratio / max(self.backbone_seconds(requests, length), 1e-9)
            if measured < self._ratio / _REFUTED:  # nothing but the machine itself makes a step this quick
                self._ratio = measured
            # A stalled step must not move the ratio far: one step counts for at most twice what is expected.
            self._ratio += (min(measured, 2 * self._ratio) - self._ratio) / _RATIO_MEMORY
        self.model.observe(
            requests,
            rows,
            context,
            max(seconds - backbone_seconds, 1e-6),
            slots=slots,
            draft_seconds=head_seconds if slots else None,
        )

    def to_dict(self) -> dict:
        """JSON types: the model in use now, and the block as measured now."""
        model = self.model.model if isinstance(self.model, OnlineCostModel) else self.model
        probes, seconds = self.block
        return {
            "model": model.to_dict(),
            "block": [list(map(float, probes)), [float(s) * self._ratio for s in seconds]],
            "gamma": self.gamma,
            "short": self.short,
        }

    @classmethod
    def from_dict(cls, body: dict, *, learn: bool) -> ServerCost:
        """Raises ValueError for anything that `to_dict` would not write."""
        try:
            stored = _StoredCost.model_validate(body)
        except ValidationError as error:
            raise ValueError(f"not a server cost: {first_fault(error)}") from None
        model = AdditiveCostModel.from_dict(stored.model)
        block = checked_table(stored.block, "block")
        return cls(OnlineCostModel(model) if learn else model, block, stored.gamma, stored.short)
