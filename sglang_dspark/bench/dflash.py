"""Make the DFlash arm: a copy of a DSpark draft without its sequential head, for a server of its own.

    python -m sglang_dspark.bench.dflash DRAFT OUT
    sglang-dspark serve --model-path MODEL --speculative-draft-model-path OUT --verify-mode static --port 30001
    sglang-dspark bench --control off --arm static --arm dflash@http://127.0.0.1:30001

The backbone and its head are the same weights, so the difference is what the sequential head brings. A DFlash draft has
no confidence (it is trained on the sequential head's tokens), so the copy serves `static` and `off`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

SWITCHES = ("markov_rank", "enable_confidence_head", "confidence_head_with_markov", "enable_hidden_confidence_head")
HEAD_PREFIXES = ("markov_head.", "confidence_head.", "hidden_confidence_head.")


def without_sequential_head(draft: Path, out: Path) -> Path:
    """Write the copy to `out` (which must not exist) and return it.

    Raises:
        FileExistsError: `out` exists. ValueError: the draft has no sequential head to take away.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((draft / "config.json").read_text())
    nested = (config.get(name) for name in ("dspark_config", "dflash_config"))
    places = [config, *(place for place in nested if isinstance(place, dict))]
    if not any(place.get("markov_rank") for place in places):
        raise ValueError(f"{draft} is a DFlash draft already: its markov_rank is 0")
    for place in places:
        for name in SWITCHES:
            if name in place:
                place[name] = 0 if name == "markov_rank" else False
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for file in draft.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(HEAD_PREFIXES)}
        save_file(kept, out / file.name, metadata={"format": "pt"})
    for file in draft.glob("*.json"):
        if file.name not in ("config.json", "sts.json") and not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    return out


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m sglang_dspark.bench.dflash DRAFT OUT")
    print(without_sequential_head(Path(sys.argv[1]), Path(sys.argv[2])))
