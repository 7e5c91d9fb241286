"""Answers from a server as files of token ids: nothing is lost, asked twice, or taken from another model."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from typer.testing import CliRunner

from sglang_dspark.cli import app
from sglang_dspark.prompts.prompts import Prompt, mix, save_prompts
from sglang_dspark.training.answer_files import Answer, AnswerFileError, answered_prompts, read_answers, write_answers
from sglang_dspark.training.collect import CollectError, Collector
from tests.engine.tiny import save_tokenizer

PROMPTS = [Prompt("chat", (("user", f"prompt number {i}"),), 0.0 if i % 4 == 0 else 1.0) for i in range(40)]


class Words:
    """A tokenizer: one id a letter."""

    chat_template = None

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return type("Encoded", (), {"input_ids": [ord(letter) for letter in text.strip()]})


@pytest.fixture
def server():
    """Answers with the prompt's last id, three times, then a stop token; `asked` holds what it was asked."""
    asked: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        refuse_after = None

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            refused = Handler.refuse_after is not None and len(asked) >= Handler.refuse_after
            asked.append(body)
            answer = json.dumps({"output_ids": [body["input_ids"][-1]] * 3 + [2]} if not refused else {"error": "full"})
            self.send_response(503 if refused else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    made.asked, made.handler, made.url = asked, Handler, f"http://127.0.0.1:{made.server_port}"
    yield made
    made.shutdown()
    made.server_close()


def test_every_prompt_is_answered_once_and_each_file_reads_back_as_it_was(server, tmp_path):
    collector = Collector(server.url, Words(), "tiny", tmp_path, at_once=8, file_tokens=30)
    assert collector.run(PROMPTS) == 40 * 4 and len(server.asked) == 40
    found = {a.index: a for path in tmp_path.glob("*.npz") for a in read_answers(path, "tiny")}
    assert sorted(found) == list(range(40)) and len(list(tmp_path.glob("*.npz"))) >= 5
    for index, answer in found.items():
        text = [ord(letter) for letter in f"prompt number {index}"]
        assert answer.tokens.tolist() == [*text, *[text[-1]] * 3, 2]
        assert (answer.prompt_length, answer.temperature) == (len(text), PROMPTS[index].temperature)


def test_a_run_that_a_server_ends_keeps_what_was_answered_and_the_next_asks_for_the_rest(server, tmp_path):
    server.handler.refuse_after = 25
    with pytest.raises(CollectError, match="503"):
        Collector(server.url, Words(), "tiny", tmp_path, at_once=4).run(PROMPTS)
    done = answered_prompts(tmp_path)
    assert 20 <= len(done) <= 25
    server.handler.refuse_after = None
    server.asked.clear()
    assert Collector(server.url, Words(), "tiny", tmp_path, at_once=4).run(PROMPTS) == 160
    assert len(server.asked) == 40 - len(done) and len(answered_prompts(tmp_path)) == 40


def test_a_run_stops_at_its_tokens_and_leaves_out_prompts_that_are_too_long(server, tmp_path):
    assert 40 <= Collector(server.url, Words(), "tiny", tmp_path, at_once=2).run(PROMPTS, tokens=40) <= 48
    long = [Prompt("chat", (("user", "x" * 600),))]
    assert Collector(server.url, Words(), "tiny", tmp_path / "long").run(long) == 0


def test_a_server_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(CollectError, match="went away"):
        Collector("http://127.0.0.1:9", Words(), "tiny", tmp_path).run(PROMPTS)


def test_a_file_of_another_target_or_of_something_else_is_refused_by_name(tmp_path):
    path = tmp_path / "answers-0000.npz"
    answer = Answer(np.array([5, 70_000, 7]), 1, 0, 1.0, 3)
    write_answers(path, [answer], "tiny")
    assert read_answers(path)[0].tokens.tolist() == [5, 70_000, 7]  # ids above 65 535 keep their width
    with pytest.raises(AnswerFileError, match="answers of tiny, not of other"):
        read_answers(path, "other")
    whole = path.read_bytes()
    for spoilt in (b"", b"not an archive", whole[: len(whole) // 2]):
        path.write_bytes(spoilt)
        with pytest.raises(AnswerFileError, match="answers-0000.npz is no file of answers"):
            read_answers(path)
    for wrong in ({"prompt_lengths": np.array([3])}, {"lengths": np.array([2])}, {"kind": np.array([99])}):
        columns = {"tokens": np.array([5, 6, 7]), "lengths": np.array([3]), "prompt_lengths": np.array([1])}
        rest = {"kind": np.array([0]), "temperature": np.array([1.0]), "index": np.array([0]), "target": np.array("t")}
        np.savez(path, **(columns | rest | wrong))
        with pytest.raises(AnswerFileError, match="is no file of answers"):
            read_answers(path)


def test_the_command_takes_prompts_of_a_file_and_says_in_one_line_what_is_wrong(server, tmp_path):
    save_tokenizer(tmp_path, 512)
    save_prompts(PROMPTS[:6], tmp_path / "prompts.jsonl")
    base = ["--url", server.url, "--target", str(tmp_path), "--out", str(tmp_path / "answers")]
    done = CliRunner().invoke(app, ["collect", *base, "--prompts", str(tmp_path / "prompts.jsonl")])
    assert done.exit_code == 0 and "holds 24 answered tokens" in done.output
    for wrong, reason in ((("--weight", "chat"), "chat=2"), (("--weight", "cat=2"), "no such class")):
        refused = CliRunner().invoke(app, ["collect", *base, *wrong])
        assert refused.exit_code == 1 and reason in refused.output and len(refused.output.splitlines()) == 1


def test_classes_are_mixed_by_weight():
    def some(kind):
        return [Prompt(kind, (("user", f"{kind} {i}"),)) for i in range(10)]

    mixed = mix({kind: some(kind) for kind in ("chat", "code", "math")}, 100, seed=1, weights={"chat": 3, "math": 0})
    counts = {kind: sum(p.kind == kind for p in mixed) for kind in ("chat", "code", "math")}
    assert counts == {"chat": 75, "code": 25, "math": 0}
