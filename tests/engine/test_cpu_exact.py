"""A row of the target's forward has the same bits whatever the batch: products, and an engine's log-probabilities.

Bug class: a kernel that adds up in another order at another number of rows, for another place in the batch, for another
cut of the prompt or behind a prefix hit. Strength: operands that cancel show another order in nearly every element, and
the engine's log-probabilities are compared to the last bit, in bfloat16 and float32. Seen to fail: without `make_exact`
(both dtypes, in a crowd).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch.nn.functional import linear

from sglang_dspark.commands import doctor
from sglang_dspark.cpu import exact
from sglang_dspark.cpu.row_counts import RowCounts, _row_counts, cancelling_operands, choose, row_counts, signature
from sglang_dspark.serving.status import exactness_of
from tests.engine.engines import engine_of, greedy
from tests.engine.tiny import tiny_target

A, B = b"one order", b"another"


def test_counts_that_differ_run_as_the_next_that_agrees():
    counts = choose({1: B, 2: B, 3: A, 4: None, 5: A, 6: A})
    assert counts.runs == (0, 3, 3, 3, 5, 5, 6) and counts.padded == (1, 2, 4) and counts.exact and not counts.cut


def test_counts_between_two_tried_ones_run_as_they_are_only_where_both_agree():
    assert choose({1: A, 4: A, 8: B, 16: A, 20: A}).runs == (0, 1, 2, 3, 4, *[16] * 12, 17, 18, 19, 20)


def test_more_rows_than_agree_are_cut_and_none_is_lost():
    counts = choose({1: B, 2: A, 3: A, 4: A, 5: B})
    assert counts.cut and counts.runs == (0, 2, 2, 3, 4)
    x, sizes = torch.arange(18.0).view(9, 2), []
    product = counts.apply(lambda some: sizes.append(len(some)) or 2 * some, x)
    assert torch.equal(product, 2 * x) and sizes == [4, 4, 2]


def test_rows_that_differ_by_their_place_at_every_count_are_beyond_mending():
    counts = choose({1: None, 2: None, 8: None})
    assert not counts.exact and counts.changes_nothing
    assert len(counts.apply(lambda some: some, torch.zeros(5, 2))) == 5


def test_padding_adds_rows_of_zeros_and_takes_them_away():
    seen = []
    out = RowCounts((0, 4, 4, 4, 4)).apply(lambda some: seen.append(some) or some, torch.ones(3, 2))
    assert torch.equal(out, torch.ones(3, 2)) and torch.equal(seen[0][3:], torch.zeros(1, 2)) and len(seen[0]) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_another_order_of_the_sum_shows_in_most_elements(dtype):
    row, weight, _ = cancelling_operands(576, 96, dtype)
    products = (row.float() * weight.float()).numpy()
    assert np.abs(products.astype(np.float64).sum(1)).max() < 1e-9 * np.abs(products).max()
    forwards, backwards = (
        torch.from_numpy(np.add.accumulate(p, axis=1)[:, -1].copy()).to(dtype) for p in (products, products[:, ::-1])
    )
    assert float((forwards != backwards).float().mean()) > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs,outputs,bias", [(1536, 576, False), (576, 960, True), (64, 64, False)])
@torch.inference_mode()
def test_every_row_of_a_mended_product_is_that_row_alone(dtype, inputs, outputs, bias):
    """Rows that all differ, at every number of them: what was found with one repeated row holds for any."""
    generator = torch.Generator().manual_seed(2)
    _, weight, added = cancelling_operands(inputs, outputs, dtype)
    row = cancelling_operands(inputs, outputs, dtype)[0]
    x = row * torch.randint(1, 5, (70, 1), generator=generator)  # still nothing but rounding
    counts = row_counts(inputs, outputs, dtype, bias)

    def product(some):
        return linear(some, weight, added if bias else None)

    alone = torch.cat([counts.apply(product, one) for one in x.split(1)])
    for rows in range(1, len(x) + 1):
        assert torch.equal(counts.apply(product, x[:rows]), alone[:rows]), rows
        assert torch.equal(counts.apply(product, x[-rows:]), alone[-rows:]), rows


def test_a_signature_is_refused_where_rows_differ_by_their_place(monkeypatch):
    row, weight, _ = cancelling_operands(16, 8, torch.float32)
    assert signature(row, weight, None, 4) == signature(row, weight, None, 4) is not None
    skewed = torch.arange(4.0)[:, None]
    monkeypatch.setattr("sglang_dspark.cpu.row_counts.linear", lambda x, w, b: linear(x, w, b) + skewed)
    assert signature(row, weight, None, 4) is None


class Model(torch.nn.Module):
    """One linear layer of SGLang's and a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ReplicatedLinear(64, 48, bias=False, params_dtype=torch.float32)
        self.lm_head = torch.nn.Linear(48, 96, bias=False)
        self.logits_processor = SimpleNamespace(use_fp32_lm_head=False, _compute_lm_head=lambda x, head, bias: x)
        for weight in self.parameters():
            weight.requires_grad_(False).normal_()


def test_layers_run_mended_and_the_status_tells_which(monkeypatch):
    wanted = RowCounts((0, 3, 3, 3))
    monkeypatch.setattr(exact, "row_counts", lambda *shape: wanted)
    model, seen = Model(), []
    exact.make_exact(model)
    x = torch.randn(1, 64)
    torch.testing.assert_close(model.layer(x)[0], x @ model.layer.weight.T)
    monkeypatch.setattr(exact, "linear", lambda some, *_: seen.append(len(some)) or linear(some, *_))
    assert model.layer(x[None])[0].shape == (1, 1, 48) and seen == [3]
    assert model.logits_processor._compute_lm_head(torch.ones(2, 48), model.lm_head).shape == (2, 48)
    padded = {"64 to 48 float32": (1, 2), "48 to 96 float32": (1, 2)}
    assert exactness_of(model) == {"padded": padded, "inexact": ()}


def test_a_machine_where_nothing_helps_says_so_in_the_log_the_status_and_doctor(monkeypatch, caplog):
    monkeypatch.setattr("sglang_dspark.cpu.row_counts.signature", lambda *_: None)
    _row_counts.cache_clear()
    try:
        model = Model()
        exact.make_exact(model)
        (finding,) = doctor.exactness()
    finally:
        _row_counts.cache_clear()
    assert exactness_of(model)["inexact"] == ("64 to 48 float32", "48 to 96 float32")
    assert "texts may depend on the batch: a row of 64 to 48 float32" in caplog.text
    assert finding.found.startswith("not on this machine: texts may depend on the batch") and finding.ok


def test_doctor_says_what_is_padded_here():
    (finding,) = doctor.exactness()
    assert finding.found.startswith("yes, ")


def test_a_model_that_nobody_tried_has_no_exactness_to_tell():
    assert exactness_of(torch.nn.Linear(1, 1)) is None


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory):
    """Products with 1536 inputs are those in which bfloat16 treats one row alone differently (on AVX512-BF16)."""
    return tiny_target(tmp_path_factory.mktemp("wide"), layers=2, hidden=768, heads=12, kv_heads=4)


def told(engine, prompts: list[list[int]], chosen: list[int], length: int = 24) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and their log-probabilities of the chosen prompts, which run together with all the others."""
    answers = engine.generate(
        input_ids=prompts, return_logprob=True, sampling_params=[
            {"temperature": 0, "max_new_tokens": length - 3 * (i % 4) * (i not in chosen), "ignore_eos": True}
            for i in range(len(prompts))
        ],
    )  # fmt: skip
    return [
        (answers[i]["output_ids"], np.array([entry[0] for entry in answers[i]["meta_info"]["output_token_logprobs"]]))
        for i in chosen
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_request_has_the_same_bits_alone_in_a_crowd_in_chunks_and_behind_a_prefix_hit(wide_target, dtype):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(6, 500, (n,), generator=generator).tolist() for n in (3, 40, 17, 90, 5, 61, 33, 8)]
    with engine_of(wide_target, dtype=dtype, chunked_prefill_size=48) as engine:
        alone = [told(engine, [prompt], [0])[0] for prompt in prompts]
        engine.flush_cache()
        crowd = told(engine, prompts, list(range(8)))
        again = [told(engine, [prompt], [0])[0] for prompt in prompts]  # behind hits of all but the last token
        engine.flush_cache()
        pairs = [told(engine, [prompts[i], prompts[-i]], [0])[0] for i in range(8)]
        greedy(engine, [prompts[3][:50]], length=4)  # a hit in the middle of a prompt
        branch = told(engine, [prompts[3]], [0])[0]
    for name, others in (("crowd", crowd), ("again", again), ("pairs", pairs), ("branch", [branch])):
        for i, (tokens, logprobs) in enumerate(others):
            expected = alone[3 if name == "branch" else i]
            assert tokens == expected[0], (name, i)
            assert np.array_equal(logprobs, expected[1]), (name, i, np.abs(logprobs - expected[1]).max())
