"""Two tensor-parallel ranks on the CPU (gloo) whose confidences differ: they must stay in step and keep the text.

Bug class: a rank that follows its own floats picks another budget or window than its neighbour, and the next collective
hangs or mixes rows. A plugin that only this test puts on the path adds 1e-3 to every confidence of the second rank.
"""

from __future__ import annotations

import pytest

from tests.engine.tiny import PROMPTS
from tests.server.live import plugin_path, start

PERTURB = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def disturbed(result, *args, **kwargs):
        from sglang.srt.runtime_context import get_parallel
        rank = get_parallel().tp_rank
        if rank:
            print("confidence of rank", rank, "is disturbed", flush=True)
        return (result + 1e-3 * rank).clip(0, 1)

    HookRegistry.register("sglang_dspark.learning.confidence.Calibration.conditional", disturbed, HookType.AFTER)
"""


@pytest.fixture(scope="module")
def two_ranks(pair, tmp_path_factory):
    environment = plugin_path(tmp_path_factory.mktemp("plugin"), "perturb_ranks", PERTURB)
    target, draft = pair
    server = start(
        tmp_path_factory.mktemp("logs") / "tp.log",
        "--model-path",
        str(target),
        "--speculative-draft-model-path",
        str(draft),
        "--tp",
        "2",
        "--min-window",
        "1",
        environment=environment,
    )
    yield server
    server.kill()


@pytest.mark.parametrize("policy", ["causal", "lagged", "ahead"])
def test_ranks_with_disturbed_confidence_stay_in_step(two_ranks, plain, policy):
    two_ranks.configure(verify_mode="compact", window_policy=policy, min_window=0)
    for low in (0, 1):
        two_ranks.configure(min_window=low)
        prompts = [f"{prompt} {i}" for i, prompt in enumerate(PROMPTS * 3)][:12]
        ours = two_ranks.generate(prompts, temperature=0, max_new_tokens=24)
        theirs = plain.generate(prompts, temperature=0, max_new_tokens=24)
        assert [a["output_ids"] for a in ours] == [a["output_ids"] for a in theirs]
    assert "is disturbed" in two_ranks.log.read_text(), "the disturbance never ran: the test proves nothing"
