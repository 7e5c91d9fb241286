"""Overlap scheduling without lengths on the host, as on an accelerator: texts, laws and what the worker learns stay right.

Bug class: a number that the host keeps and that is a step old. Lengths taken from `output_ids` or from the engine's own
records, a report filed under the batch of another step, a report that is lost, read twice or read before its step can be
over, a row of a request that has ended, was aborted or retracted while its next step was on its way. A plugin turns a
CPU's server into such a one and keeps a ledger (`overlap`); texts are compared with the target decoded token by token in
transformers. Pool and batch are so small that requests are retracted.

Seen to fail, planted once each in a copy: ids of a report in another order, or of the step that reads it; a report read
one step early, lost now and then, lost where the batch changes, counted twice; room from `output_ids`; prefixes from
`output_ids`; penalties that do not wait for the last result; a roster kept although others run.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_kernels.gumbel import seeded_sample
from dspark_kernels.types import SamplingRows
from tests.engine.tiny import EOS_ID
from tests.server.modes import CAUSAL, EVERY_POLICY, STATIC
from tests.server.overlap import LAG, Ledger, overlapped
from tests.server.test_law import LIMIT, SETTINGS, chi_square, exact_law, sample

PROMPTS = [[6 + (37 * i * i + 11 * i * j + 5 * j) % 500 for j in range(6)] for i in range(12)]
LENGTH = 60
LENGTHS = [LENGTH - 2 * i for i in range(12)]
SAMPLES = 1000
SEEDED = {i: 1000 + i for i in range(1, 12, 3)}  # the others are greedy
# Fewer slots than twelve answers need, and a scheduler that takes them on all the same.
SMALL = ("--max-total-tokens", "400", "--schedule-conservativeness", "0.01")
names = map(str, itertools.count())


@pytest.fixture(scope="module")
def overlap(pair, tmp_path_factory):
    """The server; every batch of twelve is retracted once or more."""
    made = overlapped(pair, tmp_path_factory.mktemp("overlap"), *SMALL)
    yield made
    made.server.kill()


@pytest.fixture(scope="module")
def target(pair):
    return AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)


@torch.inference_mode()
def decoded(target, penalty: float = 0.0) -> list[list[int]]:
    """[12][LENGTH]: what the target says after each prompt when it is asked for one token after the other.

    Args: penalty: taken from a token's logit for each time that it was said.
    """
    ids, index, seeds = torch.tensor(PROMPTS), torch.tensor(list(SEEDED)), torch.tensor(list(SEEDED.values()))
    rows = SamplingRows.of(*([value] * len(SEEDED) for value in (1.0, -1, 1.0, 0.0)))
    begin = ids.shape[1]
    for _ in range(LENGTH):
        logits = target(ids).logits[:, -1]
        said = ids[:, begin:]
        logits.scatter_add_(1, said, torch.full(said.shape, -penalty))
        token = logits.argmax(-1)
        token[index] = seeded_sample(logits[index], rows, seeds, torch.full_like(seeds, ids.shape[1]))
        ids = torch.cat([ids, token[:, None]], dim=1)
    assert not (ids[:, begin:] == EOS_ID).any(), "a text ends by itself: choose other prompts"
    return ids[:, begin:].tolist()


@pytest.fixture(scope="module")
def texts(target):
    return decoded(target)


def asked(lengths: list[int], **more) -> dict:
    """The body of one request for all prompts, `lengths` tokens each."""
    params = [
        {"max_new_tokens": n, "temperature": 0.0, **more}
        | ({"temperature": 1.0, "sampling_seed": SEEDED[i]} if i in SEEDED else {})
        for i, n in enumerate(lengths)
    ]
    return {"input_ids": PROMPTS, "rid": [next(names) for _ in PROMPTS], "sampling_params": params}


def hold_reports(ledger: Ledger) -> None:
    """Every launched step is reported once, in order, under its own requests, and exactly two steps late."""
    assert not any(line["on_host"] for line in ledger.launched), "the engine handed out lengths: nothing is proved"
    assert ledger.rows(ledger.reports) == ledger.rows(ledger.launched)
    assert ledger.lateness == {LAG}


def hold_rows(ledger: Ledger, answers: list[dict]) -> int:
    """What is reported of a request is what the engine says of it; how many rows are of steps that it dropped."""
    reported, dropped = ledger.reported(), 0
    for m in (answer["meta_info"] for answer in answers if not answer["meta_info"]["num_retractions"]):
        rows = reported[m["id"]]
        counted = rows[: m["spec_verify_ct"]]
        assert sum(row.length - 1 for row in counted) == m["spec_num_correct_drafts"]
        assert sum(row.window for row in counted) == m["spec_num_proposed_drafts"]
        assert len(rows) - len(counted) in (0, 1)
        dropped += len(rows) - len(counted)
    return dropped


def hold_totals(ledger: Ledger, before: dict, after: dict) -> None:
    """The status counts each launched row once."""
    rows, gained = ledger.rows(ledger.launched), {}
    for name in ("verified", "accepted", "committed"):
        gained[name] = after["tokens"][name] - before["tokens"][name]
    committed = sum(row.length for row in rows)
    assert gained["committed"] == committed and gained["accepted"] == committed - len(rows)
    assert gained["verified"] == sum(row.window for row in rows)
    assert after["requests"] - before["requests"] == len(rows)
    assert after["steps"] - before["steps"] == len(ledger.launched)
    windows = [row.window for row in rows]
    assert [a - b for a, b in zip(after["windows"], before["windows"])] == [windows.count(w) for w in range(5)]


@pytest.mark.parametrize("mode", EVERY_POLICY.values(), ids=EVERY_POLICY)
def test_texts_and_reports_are_right_while_requests_end_and_are_retracted(overlap, texts, mode):
    overlap.server.configure(**mode)
    before = overlap.status()
    answers = overlap.server.post("/generate", asked(LENGTHS))
    assert [a["output_ids"] for a in answers] == [text[:n] for text, n in zip(texts, LENGTHS)]
    assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0, "nothing was retracted"
    ledger = overlap.ledger(before)
    hold_reports(ledger)
    dropped = hold_rows(ledger, answers)
    assert dropped or mode["verify_mode"] == "off", "no request ended while its next step was on its way"
    hold_totals(ledger, before, overlap.status())


def test_no_window_passes_the_tokens_that_a_request_may_still_get(overlap):
    """Its own limit is a length of the future: what the host knows of it is a step old."""
    overlap.server.configure(**STATIC)
    answers = overlap.server.post("/generate", asked([2 + i for i in range(len(PROMPTS))]))
    assert [a["meta_info"]["spec_num_cut_tokens"] for a in answers] == [0] * len(PROMPTS)


def test_a_penalty_counts_what_the_last_step_said(overlap, target):
    """Such a batch waits for the last result, and only then."""
    overlap.server.configure(**CAUSAL)
    before = overlap.status()
    answers = overlap.server.post("/generate", asked(LENGTHS, frequency_penalty=0.75))
    assert [a["output_ids"] for a in answers] == [text[:n] for text, n in zip(decoded(target, 0.75), LENGTHS)]
    hold_reports(overlap.ledger(before))


def test_streams_that_hang_up_and_aborts_leave_the_others_their_texts_and_reports(overlap, texts):
    overlap.server.configure(**CAUSAL)
    before, url = overlap.status(), overlap.server.url
    with ThreadPoolExecutor(8) as pool:
        leaving = [pool.submit(abandon if i % 2 else abort, url, PROMPTS[i]) for i in range(6)]
        answers = overlap.server.post("/generate", asked(LENGTHS))
        for one in leaving:
            one.result()
    assert [a["output_ids"] for a in answers] == [text[:n] for text, n in zip(texts, LENGTHS)]
    ledger = overlap.ledger(before)
    hold_reports(ledger)
    hold_totals(ledger, before, overlap.status())
    assert len(ledger.reported()) > len(answers), "no request was given up while it ran"


def abandon(url: str, prompt: list[int]) -> None:
    """Read three lines of a long stream and hang up."""
    params = {"max_new_tokens": 300, "ignore_eos": True}
    body = {"input_ids": prompt, "rid": next(names), "stream": True, "sampling_params": params}
    with httpx.stream("POST", url + "/generate", json=body, timeout=60) as answer:
        for _ in zip(range(3), answer.iter_lines()):
            pass


def abort(url: str, prompt: list[int]) -> None:
    """Abort a long request by its id after it has said something."""
    name, params = next(names), {"max_new_tokens": 300, "ignore_eos": True}
    body = {"input_ids": prompt, "rid": name, "stream": True, "sampling_params": params}
    # One client for both: making another would take so long that the request might be over.
    with httpx.Client(timeout=60) as client, client.stream("POST", url + "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        client.post(url + "/abort_request", json={"rid": name})
        assert '"abort"' in [line for line in lines if line.startswith("data: {")][-1]


def test_modes_are_switched_under_load_without_losing_a_report_or_a_text(overlap, texts):
    before, enough = overlap.status(), threading.Event()

    def ask() -> list[dict]:
        answers = []
        while not enough.is_set():
            answers += overlap.server.post("/generate", asked(LENGTHS))
        return answers

    with ThreadPoolExecutor(1) as background:
        running = background.submit(ask)
        try:
            for mode in [*EVERY_POLICY.values()] * 2:
                overlap.server.configure(**mode)
        finally:
            enough.set()
        answers = running.result()
    expected = [text[:n] for text, n in zip(texts, LENGTHS)]
    assert [a["output_ids"] for a in answers] == expected * (len(answers) // len(expected))
    ledger = overlap.ledger(before)
    assert ledger.rows(ledger.reports) == ledger.rows(ledger.launched)
    assert {row.window for row in ledger.rows(ledger.launched)} >= {0, 1, 2}, "no mode had its turn"
    hold_rows(ledger, answers)
    hold_totals(ledger, before, overlap.status())


def test_unseeded_text_follows_the_targets_exact_law(overlap, target):
    overlap.server.configure(**CAUSAL)
    before = overlap.status()
    drawn = sample(overlap.server, SETTINGS["filtered"], SAMPLES)
    statistic, freedom, p = chi_square(exact_law(target, **SETTINGS["filtered"]), drawn)
    assert p > LIMIT, (statistic, freedom)
    ledger = overlap.ledger(before)
    hold_reports(ledger)
    assert len({row.window for row in ledger.rows(ledger.launched)}) >= 3, "windows did not vary"
