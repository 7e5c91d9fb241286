"""Confidence logits to survival in a running server: the draft's own temperatures, then what live outcomes teach."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark_kernels.types import upload
from dspark_scheduler import Fingerprint, OnlineCalibrator, SequentialTemperatureScaling
from dspark_scheduler.calibration import sigmoid
from sglang_dspark.errors import first_fault
from sglang_dspark.learning.cache import from_cache

logger = logging.getLogger(__name__)

KINDS = ("sampled", "greedy")  # temperature 0 accepts by another law, so it is calibrated apart


class Calibration:
    """Turns the raw confidence of one head into conditional acceptance probabilities, per position and kind of request.

    Args:
        gamma: positions.
        head: "main", or "hidden" for the second head that reads no drafted token.
        mode: "online", "off", or the path of a file written by `sglang-dspark calibrate`.
        draft_folder: where the draft's own `sts.json` may lie; its temperatures come first.
        fingerprint: what the file must have been fitted on.

    Raises:
        ValueError: the file does not fit (see `SequentialTemperatureScaling.load`), or `sts.json` is malformed.
    """

    def __init__(self, gamma: int, head: str, mode: str, draft_folder: Path, fingerprint: Fingerprint) -> None:
        self.gamma, self.head = gamma, head
        self.mode = mode
        self.fingerprint = fingerprint
        self.temperatures = np.ones(gamma)
        self.not_finite = 0  # rows of confidence that were NaN or infinite: their requests decode plainly that step
        self.online = {kind: OnlineCalibrator(gamma) for kind in KINDS} if mode == "online" else {}
        self._tables: tuple[tuple[int, ...], torch.Tensor] | None = None
        self.recorder: Recorder | None = None  # keeps raw outcomes for `sglang-dspark calibrate`
        if mode not in ("online", "off"):
            self.temperatures = np.asarray(
                SequentialTemperatureScaling.load(mode, fingerprint).temperatures, np.float64
            )
        elif mode == "online" and (draft_folder / "sts.json").is_file():
            self.temperatures = draft_temperatures(draft_folder / "sts.json", head, gamma)

    def conditional(self, logits: np.ndarray, greedy: np.ndarray) -> np.ndarray:
        """Acceptance probability of each draft given those before it; 0 in a row whose confidence is not finite.

        Args: logits float [R, k], k <= gamma; greedy bool [R]. Returns float64 [R, k].
        """
        usable = finite_rows(logits)
        if not usable.all():
            return np.where(usable[:, None], self.conditional(np.where(usable[:, None], logits, 0.0), greedy), 0.0)
        scaled = self._scaled(logits)
        if not self.online:
            return sigmoid(scaled)[:, : logits.shape[1]]
        rows = np.where(greedy[:, None], self.online["greedy"].apply(scaled), self.online["sampled"].apply(scaled))
        return rows[:, : logits.shape[1]]

    def on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """What `conditional` computes as slopes and shifts of the logits: float32 [2, gamma] each on `device`, a row for
        sampled requests and one for greedy ones. They are copied again, without a wait, when they were fitted again."""
        fitted = tuple(calibrator.steps // calibrator.refit_every for calibrator in self.online.values())
        if self._tables is None or self._tables[0] != fitted:
            slope = np.stack([1.0 / self.temperatures] * len(KINDS))
            shift = np.zeros_like(slope)
            for row, kind in enumerate(KINDS if self.online else ()):
                slope[row] /= self.online[kind].temperatures
                shift[row] = self.online[kind].shifts
            self._tables = fitted, upload(torch.from_numpy(np.stack([slope, shift]).astype(np.float32)), device)
        return self._tables[1].unbind()

    def observe(self, logits: np.ndarray, greedy: np.ndarray, acceptance: np.ndarray, observed: np.ndarray) -> None:
        """Learn from one step.

        Args: logits [R, k] as drafted; greedy bool [R]; acceptance [R, k] in [0, 1] where observed; observed bool [R, k]:
        verified, and everything before it accepted. Rows whose logits are not finite teach nothing.
        """
        usable = finite_rows(logits)
        if not usable.all():
            self._count_not_finite(len(usable) - int(usable.sum()))
            logits, greedy, acceptance, observed = (x[usable] for x in (logits, greedy, acceptance, observed))
        if self.recorder is not None:
            self.recorder.add(logits, acceptance, observed)
        if not self.online:
            return
        width = ((0, 0), (0, self.gamma - logits.shape[1]))
        scaled, labels, mask = self._scaled(logits), np.pad(acceptance, width), np.pad(observed, width)
        for kind, rows in (("sampled", ~greedy), ("greedy", greedy)):
            if rows.any():  # a kind that nobody asks for now keeps what it knows
                self.online[kind].observe(scaled[rows], labels[rows], mask[rows])
                self.online[kind].end_step()

    def _count_not_finite(self, rows: int) -> None:
        if not self.not_finite:
            logger.error(
                "the draft's %s confidence is not finite for %d requests of this step, which decode plainly; further ones "
                "are counted, not logged",
                self.head,
                rows,
            )
        self.not_finite += rows

    def ece(self) -> dict[str, list[float | None]]:
        """Expected calibration error per position of the confidence in use, by kind of request; None: nothing seen."""
        return {
            kind: [None if np.isnan(x) else float(x) for x in calibrator.ece()]
            for kind, calibrator in self.online.items()
        }

    def save(self, folder: Path) -> None:
        """Keep what was learned, with its fingerprint."""
        for kind, calibrator in self.online.items():
            calibrator.save(folder / f"calibration-{self.head}-{kind}.json", self.fingerprint)

    def restore(self, folder: Path) -> bool:
        """Take over what an earlier server learned on exactly this; says whether there was anything."""
        restored = False
        for kind, calibrator in self.online.items():
            path = folder / f"calibration-{self.head}-{kind}.json"
            restored |= from_cache(
                path, lambda path, calibrator=calibrator: calibrator.restore(path, self.fingerprint), "calibration"
            )
        return restored

    def _scaled(self, logits: np.ndarray) -> np.ndarray:
        padded = np.pad(np.asarray(logits, np.float64), ((0, 0), (0, self.gamma - logits.shape[1])))
        return padded / self.temperatures


def finite_rows(logits: np.ndarray) -> np.ndarray:
    """Which requests' drafts can be judged: bool [R], whether all logits [R, k] of the row are finite."""
    return np.isfinite(logits).all(axis=1)


class Recorder:
    """Raw confidence and outcomes of every drafted block, for an offline fit; kept in memory, written when asked."""

    def __init__(self, path: Path, gamma: int, limit: int = 200_000) -> None:
        self.path, self.gamma, self.limit = path, gamma, limit
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._count = 0

    def add(self, logits: np.ndarray, acceptance: np.ndarray, observed: np.ndarray) -> None:
        """Keep rows of one step, [R, gamma] each, up to the limit; steps with a shorter block are left out.

        Acceptance counts as 0 where it was not observed.
        """
        if self._count < self.limit and logits.shape[1] == self.gamma:
            self._rows.append((logits.copy(), np.where(observed, acceptance, 0.0), observed.copy()))
            self._count += len(logits)

    def write(self) -> None:
        """Write everything so far as one .npz: logits, acceptance, observed, each [N, gamma]."""
        if self._rows:
            parts = [np.concatenate(column) for column in zip(*self._rows)]
            with open(self.path, "wb") as file:
                np.savez(file, logits=parts[0], acceptance=parts[1], observed=parts[2])


class _DraftTemperatures(BaseModel):
    """A draft's own `sts.json`: a temperature for each drafted token, of each confidence head that was fitted."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    temperatures: list[Annotated[float, Field(gt=0)]] | None = None
    hidden_temperatures: list[Annotated[float, Field(gt=0)]] | None = None


def draft_temperatures(path: Path, head: str, gamma: int) -> np.ndarray:
    """The temperatures float64 [gamma] of confidence head "main" or "hidden" in a draft's `sts.json`; ones if it has none.

    Raises:
        ValueError: the file cannot be read, a number is not positive and finite, or there is not one for each token.
    """
    try:
        stored = _DraftTemperatures.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        raise ValueError(f"{path}: {first_fault(error)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    key = "temperatures" if head == "main" else "hidden_temperatures"
    temperatures = getattr(stored, key)
    if temperatures is None:
        return np.ones(gamma)
    if len(temperatures) != gamma:
        raise ValueError(
            f"{path}: `{key}` holds {len(temperatures)} numbers and the draft's block_size is {gamma}: one per drafted "
            "token is right (remove the file to start without)"
        )
    return np.asarray(temperatures, np.float64)
