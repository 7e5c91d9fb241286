"""The numbers of a running worker as JSON: what `GET /dspark/status` answers (schema: docs/metrics.md)."""

from __future__ import annotations

import dataclasses

import numpy as np


def status_of(worker) -> dict:
    """The status of one scheduler's DSparkWorker. Every rate names its denominator in docs/metrics.md."""
    totals, speculation = worker.meter.totals, worker.speculation
    steps = max(totals.steps, 1)
    return {
        "config": dataclasses.asdict(speculation.config),
        "policy": speculation.policy_name,
        "gamma": totals.gamma,
        "steps": totals.steps,
        "skipped_steps": totals.skipped,
        "tokens": {name: getattr(totals, name) for name in ("offered", "drafted", "verified", "accepted", "committed")},
        "rows": totals.rows,
        "accepted_length": _ratio(totals.committed, totals.committed - totals.accepted),
        "acceptance_rate": _ratio(totals.accepted, totals.verified),
        "verified_at": totals.verified_at.tolist(),
        "accepted_at": totals.accepted_at.tolist(),
        "windows": totals.windows.tolist(),
        "mean_budget": totals.budget / steps,
        "seconds": dict(totals.seconds),
        "predicted_seconds": totals.predicted,
        "calibration_error": speculation.calibration.ece(),
        "why_not_trimmed": why_not_trimmed(speculation),
    }


def why_not_trimmed(speculation) -> str | None:
    """Why windows stay whole although someone may expect them to shrink; None where they can."""
    mode = speculation.config.verify_mode
    if mode == "static":
        return "verify mode static verifies whole blocks"
    if mode == "off":
        return "verify mode off decodes plainly"
    model = getattr(speculation.cost.model, "model", speculation.cost.model)
    if float(np.ptp(model.theta[1])) == 0:
        return "the measured step does not cost more with more rows, so every window is free"
    return None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
