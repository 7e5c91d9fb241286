"""What each choice of the draft is worth: short trainings of equal steps on the same data, one choice changed at a time.

    python -m benchmarks.draft_ablation WORK --steps 300 --out RESULT.json [--rows base ce-only]

WORK is a finished `train-draft` work folder (its shards and held-out answers are used). The measure is teacher-forced on
held-out answers at temperature 1: expected accepted length 1 + Σ Π overlap, whose noise is far below real decoding's;
the greedy column is the same with "the argmaxes agree". Short runs rank choices, they do not say where a long run ends.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_dspark.training.settings import TrainSettings
from sglang_dspark.training.train import Trainer


@dataclass(frozen=True)
class Row:
    """One training: what differs from the base, and what it answers."""

    changes: dict
    question: str


ROWS = {
    "base": Row({}, "one layer, vanilla head, 8192 proposable tokens, 0.1 CE + 0.9 TV, confidence detached"),
    "no-head": Row({"rank": 0, "confidence": "hidden"}, "sequential head off (DFlash's block, with the TV loss)"),
    "ce-only": Row({"ce": 1.0, "tv": 0.0}, "cross-entropy alone, with the head"),
    "no-head-ce-only": Row({"rank": 0, "confidence": "hidden", "ce": 1.0, "tv": 0.0}, "DFlash as published: neither"),
    "2-layers": Row({"layers": 2}, "two layers"),
    "gated": Row({"head": "gated"}, "gated head"),
    "rnn": Row({"head": "rnn"}, "rnn head"),
    "confidence-trains-backbone": Row(
        {"confidence_reaches_backbone": True}, "both confidence heads train the backbone too"
    ),
    "tv-only": Row({"ce": 0.0, "tv": 1.0}, "total variation alone"),
    "3-layers": Row({"layers": 3}, "three layers"),
    "random-start": Row({"init_from_target": False}, "not started from the target's layers"),
    "raw-features": Row({"normalize_features": False}, "features as DeepSpec takes them"),
    "full-vocabulary": Row({"draft_vocab": 0}, "all tokens proposable"),
    "4k-vocabulary": Row({"draft_vocab": 4096}, "half the support"),
}


def measure(name: str, row: Row, work: Path, settings: TrainSettings) -> dict:
    """Train one row and evaluate it on every held-out answer."""
    folder = work / "ablation" / name
    folder.mkdir(parents=True, exist_ok=True)
    for shared in ("shards", "held"):
        if not (folder / shared).exists():
            (folder / shared).symlink_to((work / shared).resolve())
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    trainer = Trainer(settings.model_copy(update=row.changes), settings.feature_layers, folder)
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.run()
    spent = time.process_time() - cpu
    measures = trainer.evaluate(sequences=10_000, anchors=12)
    (folder / "checkpoint.pt").unlink()
    parameters = sum(p.numel() for p in trainer.draft.parameters())
    return {
        "row": name,
        "question": row.question,
        "length_T1": round(measures["held_length"], 4),
        "length_greedy": round(measures["held_agree_length"], 4),
        "overlap": measures["overlap"],
        "anchors": trainer.anchors,
        "steps": trainer.step,
        "cpu_seconds": round(spent, 1),
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "parameters": parameters,
    }


def table(results: list[dict]) -> str:
    """Markdown of the results, with the difference to the base."""
    base = next((r for r in results if r["row"] == "base"), None)
    lines = [
        "| row | T = 1 | Δ | greedy | Δ | overlap by position | anchors per CPU s | parameters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        delta = [f"{r[k] - base[k]:+.3f}" if base else "" for k in ("length_T1", "length_greedy")]
        overlap = " ".join(f"{x:.2f}" for x in r["overlap"])
        rate = r["anchors"] / r["cpu_seconds"]
        lines.append(
            f"| {r['row']}: {r['question']} | {r['length_T1']:.3f} | {delta[0]} | {r['length_greedy']:.3f} | "
            f"{delta[1]} | {overlap} | {rate:.0f} | {r['parameters'] / 1e6:.1f} M |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    base = TrainSettings.load(arguments.work / "settings.json").model_copy(
        update={
            "steps": arguments.steps,
            "minutes": 600.0,
            "checkpoint_minutes": 600.0,
            "threads": arguments.threads,
            "layers": 1,
            "start_from": None,
        }
    )
    results = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    for name in arguments.rows:
        if any(r["row"] == name for r in results):
            continue  # resumable: finished rows stay
        results.append(measure(name, ROWS[name], arguments.work, base))
        header = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine()}
        header |= {"torch": torch.__version__, "settings": base.model_dump(), "steps": arguments.steps}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({**header, "rows": results}, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(table(results))
        print(table(results[-1:]), flush=True)


if __name__ == "__main__":
    main()
