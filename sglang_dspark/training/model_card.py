"""The README.md of a trained draft: what it is for, how it was made, and what was measured."""

from __future__ import annotations

from pathlib import Path

from sglang_dspark.models.draft_config import DraftConfig
from sglang_dspark.training.settings import TrainSettings


def write_model_card(folder: Path, settings: TrainSettings, config: DraftConfig, tables: dict) -> None:
    """Write ``folder/README.md`` from the run's settings and ``Pipeline.evaluate``'s tables."""
    (folder / "README.md").write_text("\n".join(_lines(settings, config, tables)) + "\n")


def _lines(s: TrainSettings, c: DraftConfig, tables: dict) -> list[str]:
    head = c.markov_head_type if c.markov_rank else "none"
    training = tables["training"]
    target = Path(s.target).name
    lines = [
        f"# DSpark draft for {target}",
        "",
        (
            f"Proposes {c.block_size} tokens a step for `{target}` under `sglang-dspark serve`. It shares the target's "
            "embedding and lm_head, and is of no use without that target. Made by `sglang-dspark train-draft`."
        ),
        "",
        "## Make",
        "",
        "| | |",
        "|---|---|",
        f"| block | {c.architecture}, {c.num_hidden_layers} layer(s), features: target layers {list(c.target_layer_ids)} |",
        f"| sequential head | {head}, rank {c.markov_rank} |",
        f"| confidence | {s.confidence} |",
        f"| proposable tokens | {c.support_size} of {c.vocab_size} |",
        f"| mask token | {c.mask_token_id} (never part of an answer) |",
        f"| loss | {s.ce:g} CE + {s.tv:g} TV + confidence BCE, position decay {s.decay:g} |",
        f"| training | {training['minutes']:g} min, {training['step']} steps, {training['anchors']} anchors |",
        (
            f"| data | {s.prompts or 'prompts from packages (sglang_dspark/prompts/sources.py)'}; the target's own "
            f"answers at temperature {s.temperature:g}, {s.greedy_share:.0%} of them greedy; {s.text_tokens} packaged tokens |"
        ),
        f"| machine, date | {tables['machine']}, {tables['date']} |",
        "",
        "## Measured: real rejection sampling on held-out prompts",
        "",
        (
            "Accepted length counts the bonus token. Conditional acceptance at position k is over the rounds that "
            "accepted all before k. `macro` weighs the classes equally, `all` the rounds."
        ),
        "",
    ]
    for name, table in tables["acceptance"].items():
        lines += [f"### {name}", "", "| class | accepted length | " + " | ".join(map(str, range(1, c.block_size + 1)))]
        lines[-1] += " | rounds |"
        lines.append("|" + "---|" * (c.block_size + 3))
        for kind, row in table.items():
            cells = " | ".join(f"{x:.2f}" for x in row["conditional"])
            lines.append(f"| {kind} | {row['length']:.2f} | {cells} | {row['rounds']} |")
        lines.append("")
    if tables["confidence"]:
        lines += ["## Confidence, per position", "", "| | AUC | ECE raw | ECE after STS |", "|---|---|---|---|"]
        for name, q in tables["confidence"].items():
            cells = (" ".join(f"{x:.2f}" for x in q["auc"]), *(_percent(q[k]) for k in ("ece", "ece_scaled")))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _percent(values) -> str:
    return " ".join(f"{100 * x:.1f} %" for x in values)
