"""SGLang's `Engine` in a program of your own, speculating: settings are attached to its arguments.

    python examples/engine.py MODEL DRAFT

MODEL is a folder or a hub name, DRAFT a DSpark draft for it (`./run train-draft` makes one for a small model).
"""

from __future__ import annotations

import sys

from sglang import Engine
from sglang.srt.server_args import ServerArgs

from sglang_dspark.settings.config import DSparkConfig
from sglang_dspark.settings.flags import ALGORITHM, attach

PROMPTS = ["The river ran", "Numbers such as 12"]


def main(model: str, draft: str) -> None:
    arguments = ServerArgs(
        model_path=model, speculative_algorithm=ALGORITHM, speculative_draft_model_path=draft, log_level="error"
    )
    engine = Engine(server_args=attach(arguments, DSparkConfig(min_window=1)))
    try:
        for answer in engine.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 32}):
            meta = answer["meta_info"]
            print(f"{answer['text']!r}: {meta['completion_tokens']} tokens in {meta['spec_verify_ct']} steps")
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine starts processes, which import this file again
    main(*sys.argv[1:])
