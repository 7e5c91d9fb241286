"""`profile` and `calibrate` against a tiny pair: the files they write are the ones that serve accepts.

Bug class: a command that writes something serve refuses (fingerprint, shape), or a calibration fitted on nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.engine.tiny import PROMPTS

COMMAND = str(Path(sys.executable).with_name("sglang-dspark"))
COMMON = ("--dtype", "float32", "--max-total-tokens", "4096", "--max-running-requests", "8", "--log-level", "error")


def run(*arguments: str) -> str:
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout


def model_flags(pair):
    return ("--model-path", str(pair[0]), "--speculative-draft-model-path", str(pair[1]), *COMMON)


def test_a_profile_is_a_cost_file_of_this_server(pair, tmp_path):
    from dspark_scheduler import AdditiveCostModel

    out = tmp_path / "cost.json"
    assert "draft" in run("profile", "--out", str(out), *model_flags(pair))
    cost = AdditiveCostModel.load(out, None)
    assert 0 < cost.step_seconds(1, 1) <= cost.step_seconds(8, 40) < 5
    assert json.loads(out.read_text())["fingerprint"]["gamma"] == 4


def test_a_calibration_is_fitted_on_real_outcomes_and_says_how_many(pair, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "sts.json"
    prompts.write_text("\n".join(json.dumps({"prompt": f"{p} {i}"}) for i, p in enumerate(PROMPTS * 3)))
    printed = run("calibrate", str(prompts), "--out", str(out), "--tokens", "32", *model_flags(pair))
    body = json.loads(out.read_text())["body"]
    assert len(body["temperatures"]) == 4 and body["samples"][0] > 300, printed
    assert body["ece_after"][0] <= body["ece_before"][0] + 1e-9
