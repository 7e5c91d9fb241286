"""Confidence logits to survival in a running server: the draft's own temperatures, then what live outcomes teach."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import torch

from dspark_kernels.types import upload
from dspark_scheduler import Fingerprint, OnlineCalibrator, SequentialTemperatureScaling
from dspark_scheduler.calibration import sigmoid

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
        self.online = {kind: OnlineCalibrator(gamma) for kind in KINDS} if mode == "online" else {}
        self._tables: tuple[tuple[int, ...], torch.Tensor] | None = None
        self.recorder: Recorder | None = None  # keeps raw outcomes for `sglang-dspark calibrate`
        if mode not in ("online", "off"):
            self.temperatures = np.asarray(SequentialTemperatureScaling.load(mode, fingerprint).temperatures)
        elif mode == "online" and (draft_folder / "sts.json").is_file():
            self.temperatures = _draft_temperatures(draft_folder / "sts.json", head, gamma)

    def conditional(self, logits: np.ndarray, greedy: np.ndarray) -> np.ndarray:
        """Acceptance probability of each draft given those before it.

        Args: logits float [R, k], k <= gamma; greedy bool [R]. Returns float64 [R, k].
        """
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
        verified, and everything before it accepted.
        """
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
            try:
                if path.is_file():
                    calibrator.restore(path, self.fingerprint)
                    restored = True
            except ValueError as error:  # another model's, or of another version: this server starts afresh
                logger.warning("calibration is learned anew: %s", error)
        return restored

    def _scaled(self, logits: np.ndarray) -> np.ndarray:
        padded = np.pad(np.asarray(logits, np.float64), ((0, 0), (0, self.gamma - logits.shape[1])))
        return padded / self.temperatures


class Recorder:
    """Raw confidence and outcomes of every drafted block, for an offline fit; kept in memory, written when asked."""

    def __init__(self, path: Path, gamma: int, limit: int = 200_000) -> None:
        self.path, self.gamma, self.limit = path, gamma, limit
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._count = 0

    def add(self, logits: np.ndarray, acceptance: np.ndarray, observed: np.ndarray) -> None:
        if self._count < self.limit and logits.shape[1] == self.gamma:
            self._rows.append((logits.copy(), np.where(observed, acceptance, 0.0), observed.copy()))
            self._count += len(logits)

    def write(self) -> None:
        """Write everything so far as one .npz: logits, acceptance, observed, each [N, gamma]."""
        if self._rows:
            parts = [np.concatenate(column) for column in zip(*self._rows)]
            with open(self.path, "wb") as file:
                np.savez(file, logits=parts[0], acceptance=parts[1], observed=parts[2])


def _draft_temperatures(path: Path, head: str, gamma: int) -> np.ndarray:
    key = "temperatures" if head == "main" else "hidden_temperatures"
    stored = json.loads(path.read_text())
    if key not in stored:
        return np.ones(gamma)
    temperatures = np.asarray(stored[key], np.float64)
    if temperatures.shape != (gamma,) or not (temperatures > 0).all():
        raise ValueError(f"{path}: `{key}` must be {gamma} positive numbers, one per drafted token")
    return temperatures
