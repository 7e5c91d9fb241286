"""Our Qwen3-shaped drafts against SGLang's own draft classes, and the checkpoints that are refused with a sentence.

Bug class: a family that loads under our class and drafts something else than the class it was published for (pairs of
neighbours rotated as halves, a head that reads another state, a confidence without its Markov part), and a key of a
config that changes the draft and that nobody reads. The same random tensors go through both classes in float32.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from sglang_dspark.models.checkpoint import check_draft_folder, read_draft_config
from sglang_dspark.models.draft_config import DraftCheckpointError
from sglang_dspark.models.families import refuse_recurrent_target
from tests.engine.tiny import VOCAB_SIZE, tiny_target
from tests.engine.tiny_draft import tiny_draft
from tests.models.draft_block import CONTEXTS, context_pool, engine_draft, run_block

NESTED = ("mask_token_id", "target_layer_ids", "num_target_layers")
FAMILIES = {
    "ling": {"architecture": "LingDSparkModel", "markov_head_type": "gated", "markov_rank": 24},
    "lfm2": {"architecture": "Lfm2DSparkDraftModel", "rope_is_neox_style": False},
    "other-exporters": {"architecture": "DSparkDraftModel", "markov_head_type": "rnn", "markov_rank": 16},
    "qwen3": {"architecture": "Qwen3DSparkModel"},
}


@pytest.fixture(scope="module")
def engine():
    from tests.engine.in_process import single_rank

    with single_rank():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


def draft_of(family, target, folder):
    folder = tiny_draft(folder, target, **FAMILIES[family])
    if family == "lfm2":  # as Liquid publishes them: nested, and without the key of the confidence head's width
        edit(folder, confidence_head_with_markov=None, dflash_config={key: config_of(folder)[key] for key in NESTED})
        edit(folder, **dict.fromkeys(NESTED))
    return folder


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit(folder, **changes):
    config = config_of(folder) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def sglangs_draft(folder, embedding, lm_head):
    """SGLang's own class of this architecture, with its confidence head (it builds one in this mode only)."""
    from sglang.srt.environ import envs
    from sglang.srt.models import dspark, lfm2_dspark
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(str(folder), trust_remote_code=False)
    kinds = {kind.__name__: kind for kind in dspark.EntryClass + lfm2_dspark.EntryClass}
    with envs.SGLANG_RAGGED_VERIFY_MODE.override("compact"):
        model = kinds[config.architectures[0]](config)
    model.load_weights(load_file(folder / "model.safetensors").items())
    model.attach_shared_modules(embed_tokens=embedding, lm_head=lm_head)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_block_context_and_heads_are_those_of_sglangs_own_class(engine, target, tmp_path, family):
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    folder = draft_of(family, target, tmp_path / "draft")
    own = load_file(target / "model.safetensors")
    embedding = torch.nn.Embedding.from_pretrained(own["model.embed_tokens.weight"].float())
    lm_head = ParallelLMHead(*own["lm_head.weight"].shape, params_dtype=torch.float32)
    lm_head.weight.data[:VOCAB_SIZE] = own["lm_head.weight"]
    ours, theirs = engine_draft(folder, embedding, lm_head), sglangs_draft(folder, embedding, lm_head)

    def write(features, positions, slots, pool):
        theirs.write_target_hidden_kv(target_hidden=features, pool=pool, positions=positions, cache_loc=slots)

    draft, features = ours.draft, [torch.randn(n, 2 * ours.draft.hidden_size) * 3 for n in CONTEXTS]
    pools = [context_pool(draft), context_pool(draft)]
    for writer, pool in zip((ours.write_context, write), pools):
        writer(features[2], torch.arange(40), torch.arange(1, 41), pool)
    for i in range(draft.num_hidden_layers):
        for mine, other in zip(*(pool.get_kv_buffer(i) for pool in pools)):
            assert torch.allclose(mine, other, atol=1e-4)

    anchors = torch.tensor([9, 100, 31])
    states = run_block(ours, draft, features, anchors, ours.write_context)
    assert torch.allclose(states, run_block(theirs, draft, features, anchors, write), atol=1e-4)
    base, seen = theirs.compute_base_logits(states.flatten(0, 1))
    assert torch.allclose(ours.base_logits(states.flatten(0, 1)), base, atol=1e-4)

    tokens = torch.tensor([[17, 4, 250, 3], [4, 4, 9, 1], [250, 0, 2, 300]])
    previous = torch.cat([anchors[:, None], tokens[:, :-1]], 1)
    mine, other = None, theirs.markov_head.init_state(states[:, 0])
    for k in range(draft.block_size):
        my_bias, mine = ours.markov_head.bias(previous[:, k], states[:, k], mine)
        bias, other = theirs.markov_head.step_bias(previous[:, k], hidden_states=states[:, k], state=other)
        assert torch.allclose(my_bias, bias, atol=1e-4), k
    _, logits = theirs.compute_confidence(anchor_tokens=anchors, draft_tokens=tokens, confidence_features=seen)
    assert torch.allclose(ours.confidence_head(states, ours.markov_head.markov_w1(previous)), logits.float(), atol=1e-4)


def test_rows_for_slot_0_are_written_beside_the_others_and_change_none(engine, target, tmp_path):
    """What was not committed is written to slot 0, which is nobody's: no mask, and no count read back."""
    folder = draft_of("qwen3", target, tmp_path / "draft")
    weight = torch.randn(VOCAB_SIZE, 64)
    ours = engine_draft(folder, torch.nn.Embedding.from_pretrained(weight), SimpleNamespace(weight=weight))
    features, positions = torch.randn(12, 128), torch.arange(12)
    committed = torch.arange(12) % 3 != 2
    masked, unmasked = context_pool(ours.draft), context_pool(ours.draft)
    ours.write_context(features[committed], positions[committed], 1 + positions[committed], masked)
    ours.write_context(features, positions, torch.where(committed, 1 + positions, 0), unmasked)
    for i in range(ours.draft.num_hidden_layers):
        for one, other in zip(masked.get_kv_buffer(i), unmasked.get_kv_buffer(i)):
            assert torch.allclose(one[1:], other[1:], atol=1e-6)
            assert one[1:].abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DSparkMiniMaxDraftModel"]}, "MiniMax"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "mtp.*"),
        ({"dspark_block_size": 5, "dspark_target_layer_ids": [40, 41, 42]}, "mtp.*"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"sample_from_anchor": False}, "sample_from_anchor=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "swigluoai"}, "hidden_act='swigluoai'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({"is_causal": True}, "is_causal=True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "rope_dim": 8}}, "rope_dim=8"),
        ({"dflash_config": {"conv_kernel_size": 3}}, "conv_kernel_size=3"),
    ],
)
def test_what_is_not_drafted_here_is_refused_in_one_sentence_that_names_sglangs_own(target, tmp_path, changes, words):
    folder = draft_of("qwen3", target, tmp_path / "draft")
    edit(folder, **changes)
    with pytest.raises(DraftCheckpointError) as error:
        check_draft_folder(folder)
    message = str(error.value)
    assert words in message and "--speculative-algorithm DSPARK" in message and "\n" not in message


def test_a_checkpoint_as_liquid_publishes_it_passes_the_check(target, tmp_path):
    folder = draft_of("lfm2", target, tmp_path / "draft")
    assert "target_layer_ids" not in config_of(folder) and read_draft_config(folder).confidence_head_with_markov
    check_draft_folder(folder)


def test_a_target_with_a_recurrent_state_is_refused_and_a_plain_one_is_not(engine, target, tmp_path):
    from sglang.srt.configs.model_config import ModelConfig
    from transformers import Lfm2Config

    refuse_recurrent_target(ModelConfig(str(target)))
    config = Lfm2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, full_attn_idxs=[1, 3], architectures=["Lfm2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Lfm2ForCausalLM keeps a recurrent .*--speculative-algorithm DSPARK"):
        refuse_recurrent_target(ModelConfig(str(tmp_path)))


def test_what_training_does_not_build_it_does_not_measure_either(target, tmp_path):
    from sglang_dspark.training.model import load_draft

    folder, weight = draft_of("lfm2", target, tmp_path / "draft"), torch.zeros(VOCAB_SIZE, 64)
    with pytest.raises(DraftCheckpointError, match="Lfm2DSparkDraftModel.*Qwen3DSparkModel"):
        load_draft(folder, weight, weight)


def test_a_head_that_is_whole_on_every_rank_is_not_gathered_again(monkeypatch):
    from sglang_dspark.models.draft import support_rows

    def never(*_, **__):
        raise AssertionError("gathered")

    monkeypatch.setattr("sglang.srt.distributed.communication_op.tensor_model_parallel_all_gather", never)
    whole = torch.nn.Embedding(VOCAB_SIZE, 8)
    assert support_rows(whole, VOCAB_SIZE, None).shape == (VOCAB_SIZE, 8)
    with pytest.raises(AssertionError, match="gathered"):
        support_rows(torch.nn.Embedding(VOCAB_SIZE // 2, 8), VOCAB_SIZE, None)
