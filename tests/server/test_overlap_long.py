"""Under overlap without host lengths every request means what it means under plain decoding: the whole table, at random.

Bug class: as `test_overlap`, met by what that file does not ask for: grammars, processors, log-probabilities, ends of every
kind, all in one batch. By hand (`./run test --long`); the last run stands in docs/accelerators.md.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.cases import CASES
from tests.server.compare import answers, differences
from tests.server.conftest import OFFERED
from tests.server.modes import MODES
from tests.server.overlap import LAG, overlapped
from tests.server.test_law import ARMS, LIMIT, SETTINGS, chi_square, exact_law, sample
from tests.server.test_requests_random import search

pytestmark = pytest.mark.long
SECONDS = 300


@pytest.fixture(scope="module")
def overlap(pair, tmp_path_factory):
    made = overlapped(pair, tmp_path_factory.mktemp("overlap"), *OFFERED)
    yield made
    made.server.kill()


def hold_reports(overlap, before: dict) -> None:
    ledger = overlap.ledger(before)
    assert not any(line["on_host"] for line in ledger.launched)
    assert ledger.rows(ledger.reports) == ledger.rows(ledger.launched)
    assert ledger.lateness == {LAG}


@pytest.fixture(scope="module")
def theirs(plain):
    return answers(plain.url, CASES)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_means_the_same_with_and_without_speculation(overlap, theirs, mode):
    overlap.server.configure(**MODES[mode])
    before = overlap.status()
    ours = answers(overlap.server.url, CASES)
    assert not {name: found for name in theirs if (found := differences(ours[name], theirs[name]))}
    hold_reports(overlap, before)


@pytest.mark.timeout(SECONDS + 300)
def test_random_batches_are_answered_alike(overlap, plain):
    before = overlap.status()
    assert search(overlap.server, plain, SECONDS) >= 20
    hold_reports(overlap, before)


@pytest.mark.parametrize("arm", ARMS)
def test_unseeded_text_follows_the_targets_exact_law(overlap, pair, arm):
    overlap.server.configure(**ARMS[arm])
    name = list(SETTINGS)[list(ARMS).index(arm) % len(SETTINGS)]
    law = exact_law(AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32), **SETTINGS[name])
    statistic, freedom, p = chi_square(law, sample(overlap.server, SETTINGS[name]))
    assert p > LIMIT, (statistic, freedom)
