"""The demo pair in full (`./run test --long`): 100 prompts of 96 tokens, greedy and seeded, alone, three and eight at once.

The text is plain decoding's, token for token, in float32 and in bfloat16, while batches and windows change all the time;
no near-tie is excused. Bug class: a row of the target whose bits depend on the batch, a law that loses a token, a seed that
is spent twice. Last run: 2026-12-01 in bfloat16 in a reduced form, 16 prompts of 40 tokens, compact with causal windows:
16 of 16 equal, greedy and seeded, at 8, 3 and 1 clients. The whole has not been run yet.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_dspark.bench.local import start

pytestmark = pytest.mark.long

TOPICS = (
    "a library",
    "the number 17",
    "how rain forms",
    "a good breakfast",
    "Python's zip",
    "the Moon",
    "trains",
    "an apology to a friend",
    "prime numbers",
    "gardening in spring",
)
TASKS = (
    "Explain {} in one paragraph.",
    "Write three questions about {}.",
    "Tell a short story about {}.",
    "List facts about {}, one per line.",
    "Translate a sentence about {} into French.",
    "Write JSON describing {}.",
    "Write a Python function that has to do with {}.",
    "Argue for and against {}.",
    "Write a poem about {}.",
    "Summarise what a child should know of {}.",
)
PROMPTS = [task.format(topic) for task in TASKS for topic in TOPICS]
# A draft at least everywhere: a planner that leaves drafting alone would make every text plain decoding's.
MODES = [
    {"verify_mode": "static", "accept_rule": "block"},
    {"verify_mode": "cap-accept", "window_policy": "causal", "min_window": 1, "accept_rule": "block"},
    *(
        {"verify_mode": "compact", "window_policy": policy, "min_window": 1, "accept_rule": "block"}
        for policy in ("causal", "lagged", "ahead")
    ),
    *(
        {"verify_mode": "compact", "window_policy": "causal", "min_window": 1, "accept_rule": rule}
        for rule in ("token", "coupled")
    ),
]
KINDS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "top_p": 0.95, "sampling_seed": 7}}
TOKENS = 96


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def server(request, tmp_path_factory):
    common = ("--dtype", request.param, "--log-level", "warning", "--max-total-tokens", "16384")
    running = start(tmp_path_factory.mktemp("demo") / "dspark.log", *common)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def reference(server):
    """What plain decoding says to each kind of request, eight at once."""
    server.configure(verify_mode="off")
    return {kind: [tokens for tokens, _ in answers(server, kind, 8)] for kind in KINDS}


def answers(server, kind: str, concurrency: int) -> list[tuple[list[int], int]]:
    """Per prompt its tokens and how many were drafted and accepted; lengths vary so that the batch keeps changing."""

    def one(prompt: str, shorter: int) -> tuple[list[int], int]:
        body = {
            "text": f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
            "sampling_params": {**KINDS[kind], "max_new_tokens": TOKENS - shorter},
        }
        answer = server.post("/generate", body)
        return answer["output_ids"], answer["meta_info"].get("spec_num_correct_drafts", 0)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, PROMPTS, itertools.cycle((0, 7, 31, 13, 2))))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(str(value) for value in mode.values()))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("concurrency", [8, 3, 1])
def test_the_demo_pairs_text_is_plain_decodings(server, reference, mode, kind, concurrency):
    if concurrency == 1 and mode["verify_mode"] != "compact":
        pytest.skip("one request at a time is run for compact only, to end within hours")
    server.configure(**mode)
    found = answers(server, kind, concurrency)
    equal = sum(ours == tokens for tokens, (ours, _) in zip(reference[kind], found, strict=True))
    drafted = sum(accepted for _, accepted in found) / sum(len(tokens) for tokens, _ in found)
    print(f"{kind} {mode} at {concurrency}: {equal} of {len(PROMPTS)} equal; {drafted:.0%} of the tokens were drafted")
    assert drafted > 0.1, "hardly a draft was accepted: this compared plain decoding with itself"
    assert equal == len(PROMPTS)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_says_the_same_alone_as_in_a_crowd(server, reference, kind):
    server.configure(verify_mode="off")
    assert [tokens for tokens, _ in answers(server, kind, 1)] == reference[kind]
