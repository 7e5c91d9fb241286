"""Reasoning parsers and tool parsers under blocks of tokens.

Bug class: a parser that is fed several tokens at once and splits them elsewhere; a grammar that is to begin behind the
end of the reasoning, but is masked from the first row of the block, or not at all where the reasoning ends inside the
block, or is rolled back past that end; reasoning tokens counted per block. Servers with and without speculation (one
after the other: memory) are compared field by field, and a stream with its whole answer.
"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.server.cases import OTHER_TOOL, STREAM, TOOL, chat, generate
from tests.server.compare import answers, differences
from tests.server.live import start
from tests.server.modes import MODES

END_OF_THINKING = 511  # this id is called </think> here; a bias on it ends the tiny model's reasoning after a while
SOON = {str(END_OF_THINKING): 9.0}
BLANKS = {
    str(i): -100.0 for i in (203, 204, 207, 226)
}  # tab, line feed, carriage return, space: JSON ends without them
NOW = {str(END_OF_THINKING): 100.0}
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"n": [0-9]{1,3}, "ok": (true|false)\}\}\n</tool_call>'
STRICT = [
    {**tool, "function": {**tool["function"], "strict": True}} for tool in (TOOL, OTHER_TOOL)
]  # or any JSON would do
NAMED = {"type": "function", "function": {"name": "sub"}}

PARSED = [
    *(chat(f"reasoning-{i}", prompt=i, logit_bias=SOON, max_tokens=40) for i in range(4)),
    chat("reasoning-only", prompt=4, max_tokens=10),
    chat("reasoning-cut", prompt=5, logit_bias=SOON, max_tokens=9, stop=["e"]),
    chat("reasoning-seeded", prompt=6, logit_bias=SOON, temperature=1.0, seed=3, n=2),
    *(chat(f"reasoning-regex-{i}", prompt=i, logit_bias=SOON, max_tokens=60, regex="[a-z]{3,12}!") for i in range(3)),
    chat("reasoning-json", prompt=7, logit_bias=SOON, max_tokens=60, response_format={"type": "json_object"}),
    chat("reasoning-not-split", prompt=1, logit_bias=SOON, separate_reasoning=False),
    chat("reasoning-required", prompt=8, logit_bias=SOON | BLANKS, max_tokens=90, tools=STRICT, tool_choice="required"),
    chat("reasoning-named", prompt=9, logit_bias=SOON | BLANKS, max_tokens=90, tools=STRICT, tool_choice=NAMED),
    chat("auto-no-call", prompt=2, logit_bias=SOON, tools=[TOOL], tool_choice="auto"),
    *(
        chat(f"auto-call-{i}", prompt=i, max_tokens=90, logit_bias=SOON, tools=[TOOL], tool_choice="auto", regex=CALL)
        for i in range(3)
    ),
    chat("tool-none", prompt=3, logit_bias=SOON, tools=[TOOL], tool_choice="none"),
]
STREAMED = [chat(f"{case.name}-stream", {**case.body, **STREAM}) for case in PARSED]
CASES = [*PARSED, *STREAMED, generate("thinking-is-not-for-generate", 3, 12, regex="[a-z]{4}", logit_bias=NOW)]
ASKED = ("static", "compact", "cap-accept")


@pytest.fixture(scope="module")
def offered(pair, tmp_path_factory) -> tuple:
    """A folder and the flags of servers with a reasoning parser and a tool parser."""
    folder = tmp_path_factory.mktemp("parsers")
    shutil.copytree(pair[0], folder / "target")
    _name_end_of_thinking(folder / "target")
    return folder, (
        "--model-path",
        str(folder / "target"),
        "--reasoning-parser",
        "deepseek-r1",
        "--tool-call-parser",
        "qwen25",
    )


@pytest.fixture(scope="module")
def theirs(offered) -> dict:
    """Every case under plain decoding."""
    server = start(offered[0] / "plain.log", *offered[1], "--verify-mode", "off")
    try:
        return answers(server.url, CASES)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def ours(offered, pair, theirs) -> dict:
    """(answers to every case, accepted drafts) by mode; the plain server has gone by now."""
    server = start(offered[0] / "dspark.log", *offered[1], "--speculative-draft-model-path", str(pair[1]))
    found = {}
    try:
        for mode in ASKED:
            server.configure(**MODES[mode])
            before = server.get("/dspark/status")["ranks"][0]["tokens"]["accepted"]
            found[mode] = (
                answers(server.url, CASES),
                server.get("/dspark/status")["ranks"][0]["tokens"]["accepted"] - before,
            )
    finally:
        server.kill()
    return found


def _name_end_of_thinking(folder) -> None:
    """Call the tokenizer's last token </think>, and drop the merge that made it."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    (old,) = [token for token, i in vocabulary.items() if i == END_OF_THINKING]
    merges = tokenizer["model"]["merges"]
    assert "".join(merges[-1]) == old, "the last token is the last merge's"
    merges.pop()
    vocabulary["</think>"] = vocabulary.pop(old)
    tokenizer["added_tokens"].append(
        {
            "id": END_OF_THINKING,
            "content": "</think>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": False,
        }
    )
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("mode", ASKED)
def test_parsers_see_the_same_text_as_under_plain_decoding(ours, theirs, mode):
    found, accepted = ours[mode]
    assert not {name: wrong for name in theirs if (wrong := differences(found[name], theirs[name]))}
    assert accepted > 100, "nothing was drafted"


def test_a_stream_is_split_where_its_whole_answer_is(theirs):
    for case, streamed in zip(PARSED, STREAMED, strict=True):
        for choice in theirs[case.name][1]["choices"]:
            message, joined = choice["message"], theirs[streamed.name][1]["choices"][str(choice["index"])]
            assert (message["reasoning_content"] or "") == joined["reasoning_content"], case.name
            assert (message["content"] or "").strip() == joined["content"].strip(), case.name
            if choice["finish_reason"] == "length":
                continue  # of a call that is cut, a stream has said the beginning
            calls = {
                str(i): [call["function"]["name"], call["function"]["arguments"]]
                for i, call in enumerate(message.get("tool_calls") or ())
            }
            assert calls == joined.get("tools", {}), case.name


def test_the_cases_do_reason_and_call_tools(theirs):
    choices = {
        name: body["choices"][0]
        for name, (_, body) in theirs.items()
        if "choices" in body and name in {c.name for c in PARSED}
    }
    split = [
        name
        for name, choice in choices.items()
        if choice["message"]["reasoning_content"] and choice["message"]["content"]
    ]
    called = [name for name, choice in choices.items() if choice["message"].get("tool_calls")]
    print(f"split {split}, called {called}")
    assert len(split) >= 6 and {"reasoning-required", "reasoning-named"} <= set(called)
    assert sum(name.startswith("auto-call") for name in called) >= 2
    assert all(status == 200 for status, _ in theirs.values())
    assert len(theirs["thinking-is-not-for-generate"][1]["text"]) == 4
