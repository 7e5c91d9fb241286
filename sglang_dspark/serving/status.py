"""The numbers of a running worker as JSON: what `GET /dspark/status` answers (schema: docs/metrics.md)."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
from sglang.srt.runtime_context import get_parallel

SCHEMA = 1  # raised when a field changes its meaning or goes; new fields may come without
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def status_of(worker) -> dict:
    """The status of one scheduler's DSparkWorker. Every rate names its denominator in docs/metrics.md."""
    meter, speculation = worker.meter, worker.speculation
    worker.settle(everything=True)
    meter.settings(speculation.config)
    totals, survival = meter.totals, measured_survival(meter.totals)
    return {
        "schema": SCHEMA,
        "rank": get_parallel().dp_rank or 0,
        "now": time.time(),
        "config": dataclasses.asdict(speculation.config),
        "policy": speculation.policy_name,
        "gamma": totals.gamma,
        "why_not_trimmed": why_not_trimmed(speculation),
        "not_finite": sum(calibration.not_finite for calibration in speculation.calibrations.values()),
        "draft_eager_because": worker.drafter.eager_because,
        "not_saved": speculation.not_saved,
        "exactness": exactness_of(worker.model_runner.model),
        **counts_of(totals),
        "acceptance": acceptance_of(totals, survival),
        "calibration_error": speculation.calibration.ece(),
        "reliability": reliability_of(speculation.calibration),
        "cost": cost_of(speculation.cost, meter, survival),
        "history": meter.history.by_time(),
        "by_load": meter.history.by_load(),
        "changes": list(meter.history.changes),
        "last_step": meter.last,
        "fingerprint": dataclasses.asdict(speculation.fingerprint),
        "state_folder": str(speculation.folder),
    }


def exactness_of(model) -> dict | None:
    """Which products of the target are padded so that no text depends on the batch, and which cannot be mended."""
    from sglang_dspark.cpu import EXACTNESS

    found = getattr(model, EXACTNESS, None)
    return None if found is None else dataclasses.asdict(found)


def counts_of(totals) -> dict:
    """Totals since the start, and the ratios of them that are asked for most."""
    return {
        "steps": totals.steps,
        "timed_steps": totals.timed,
        "skipped_steps": totals.skipped,
        "settings_changes": totals.changes,
        "requests": totals.requests,
        "tokens": {name: getattr(totals, name) for name in ("offered", "drafted", "verified", "accepted", "committed")},
        "rows": totals.rows,
        "padding": totals.padding,
        "accepted_length": _ratio(totals.committed, totals.requests),
        "acceptance_rate": _ratio(totals.accepted, totals.verified),
        "mean_requests": _ratio(totals.requests, totals.steps),
        "mean_window": _ratio(totals.verified, totals.requests),
        "mean_budget": _ratio(totals.budget, totals.steps),
        "windows": totals.windows.tolist(),
        "seconds": dict(totals.seconds),
        "predicted_seconds": totals.predicted,
    }


def measured_survival(totals) -> np.ndarray:
    """[γ] probability that a block is accepted through each position, from what was verified (Kaplan-Meier).

    Windows censor: a draft outside its window says nothing. The product of conditional rates does not mind. A position
    that was never tried takes the rate of the last one that was; NaN everywhere before anything was.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = totals.accepted_at / totals.verified_at
    for k in range(1, len(rates)):
        if np.isnan(rates[k]):
            rates[k] = rates[k - 1]
    return np.cumprod(rates)


def acceptance_of(totals, survival: np.ndarray) -> dict:
    """Acceptance by position: tries and successes, their ratio, its running product, and the confidence behind it."""
    return {
        "tried": totals.verified_at.tolist(),
        "accepted": totals.accepted_at.tolist(),
        "conditional": [_ratio(a, n) for a, n in zip(totals.accepted_at.tolist(), totals.verified_at.tolist())],
        "survival": _numbers(survival),
        "predicted": [_ratio(p, n) for p, n in zip(totals.predicted_at.tolist(), totals.confident_at.tolist())],
        "outcome": [_ratio(o, n) for o, n in zip(totals.outcome_at.tolist(), totals.confident_at.tolist())],
        "confident": totals.confident_at.tolist(),
    }


def reliability_of(calibration) -> dict[str, list[list[list[float]]]]:
    """By kind of request and position: the filled bins as [weight, mean confidence, mean outcome]."""
    tables = {}
    for kind, calibrator in calibration.online.items():
        table = calibrator.reliability()
        tables[kind] = [[[round(float(x), 4) for x in row] for row in position if row[0] >= 0.5] for position in table]
    return tables


def cost_of(cost, meter, survival: np.ndarray) -> dict | None:
    """The cost model in use: its tables, what every window would bring at several loads, the last steps against it."""
    if cost is None:
        return None
    body = cost.to_dict()
    last, gamma = meter.last, meter.totals.gamma
    requests = last.get("requests", 1)
    context = last.get("context", 0) / requests
    return {
        "tables": body,
        "typical_error": getattr(cost, "typical_error", None),
        "curve": curve(cost, requests, context, gamma),
        "recent": [[r, m, round(s, 6), round(p, 6)] for r, m, s, p in meter.history.recent],
        "forecast": [forecast(cost, r, context, survival) for r in sorted({*loads_of(body), requests})],
    }


def loads_of(model: dict) -> list[int]:
    """Numbers of requests worth a forecast: up to twice what was measured."""
    return [r for r in LOADS if r <= 2 * model["alpha"][0][-1]]


def curve(cost, requests: int, context: float, gamma: int) -> dict:
    """Seconds of a step of `requests` requests over its rows, from none to all drafts verified, without drafting."""
    rows = np.unique(np.linspace(requests, requests * (1 + gamma), min(requests * gamma + 1, 48)).astype(int))
    return {
        "requests": requests,
        "context": context,
        "rows": rows.tolist(),
        "seconds": _numbers(cost.step_seconds(requests, rows, context * requests)),
        "draft_seconds": float(cost.draft_seconds(requests, requests * gamma, gamma)),
    }


def forecast(cost, requests: int, context: float, survival: np.ndarray) -> dict:
    """Tokens per second if `requests` requests all verified w drafts, for w = 0..γ: where its top is, the windows go.

    The planner does better, since it gives each request its own window; this is the picture of why they shrink.
    """
    gamma = len(survival)
    windows = np.arange(gamma + 1)
    tokens = requests * (1 + np.concatenate([[0], np.cumsum(np.nan_to_num(survival))]))
    slots = requests * windows
    draft = np.array([float(cost.draft_seconds(requests, int(n), int(w))) for n, w in zip(slots, windows)])
    seconds = cost.step_seconds(requests, requests + slots, context * requests) + draft
    rate = tokens / np.maximum(seconds, 1e-9)
    return {
        "requests": requests,
        "tokens_per_second": _numbers(rate),
        "seconds": _numbers(seconds),
        "best_window": int(np.argmax(rate)),
    }


def why_not_trimmed(speculation) -> str | None:
    """Why windows stay whole although someone may expect them to shrink; None where they can."""
    mode = speculation.config.verify_mode
    if mode == "static":
        return "verify mode static verifies whole blocks"
    if mode == "off":
        return "verify mode off decodes plainly"
    if speculation.cost is None:
        return "the step's cost is not measured yet"
    if float(np.ptp(speculation.cost.to_dict()["theta"][1])) == 0:
        return "the measured step does not cost more with more rows, so every window is free"
    return None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _numbers(values) -> list[float | None]:
    return [None if np.isnan(x) else float(f"{x:.6g}") for x in np.atleast_1d(values)]
