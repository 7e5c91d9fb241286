"""A draft checkpoint that cannot be served is refused before loading, by the key, its value and what would be right.

Bug class (facts of other engines): drafts accepted with guessed layer ids, missing heads or another target's
vocabulary, which then serve at no acceptance, or crash in the first step.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.models.checkpoint import check_draft_folder, check_draft_weights, read_draft_config
from sglang_dspark.models.draft_config import DraftCheckpointError, DraftConfig
from sglang_dspark.settings.config import ConfigError, DSparkConfig, check_draft
from tests.engine.tiny import VOCAB_SIZE, tiny_target
from tests.engine.tiny_draft import tiny_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture()
def draft(target, tmp_path):
    return tiny_draft(tmp_path / "draft", target)


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is None else config.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 0}, "block_size=0; it must be at least 1"),
        ({"block_size": None}, "block_size is missing"),
        ({"block_size": "7"}, "block_size='7'; it must be a whole number"),
        ({"mask_token_id": VOCAB_SIZE}, f"mask_token_id={VOCAB_SIZE}; it must be a token id below vocab_size"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"target_layer_ids": []}, "target_layer_ids=[]; it must be at least one layer"),
        ({"target_layer_ids": None}, "target_layer_ids is missing"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm'; it must be one of vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_head_with_markov=True; it must be false"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures=['LlamaForCausalLM']; it must be one of Qwen3DSparkModel",
        ),
        ({"draft_vocab_size": 100000}, "draft_vocab_size=100000; it must be between 1 and"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3; it must be a divisor"),
        ({"block_size": 1000000}, "block_size=1000000; it must be at most 64"),
        ({"block_size": True}, "block_size=True; it must be a whole number"),
        ({"head_dim": "16"}, "head_dim='16'; it must be a whole number"),
        ({"markov_rank": [64]}, "markov_rank=[64]; it must be a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'; it must be a number"),
        ({"enable_confidence_head": "false"}, "enable_confidence_head='false'; it must be true or false"),
        ({"target_layer_ids": ["0", "2"]}, "target_layer_ids[0]='0'; it must be a whole number"),
        ({"target_layer_ids": [[0], [2]]}, "target_layer_ids[0]=[0]; it must be a whole number"),
        ({"target_layer_ids": [-1, 2]}, "target_layer_ids[0]=-1; it must be at least 0"),
        ({"target_layer_ids": [2, 0]}, "target_layer_ids=[2, 0]; it must be ascending, each layer once"),
        ({"target_layer_ids": [2, 2]}, "target_layer_ids=[2, 2]; it must be ascending, each layer once"),
        ({"architectures": "Qwen3DSparkModel"}, "architectures='Qwen3DSparkModel'; it must be a list with one of"),
        ({"dspark_config": [4]}, "dspark_config=[4]; it must be an object"),
        ({"dtype": "int3"}, "dtype='int3'; it must be one of bfloat16"),
        ({"model_type": "unheard-of"}, "model_type='unheard-of'; it must be a family that transformers knows"),
        ({"model_type": None}, "model_type is missing"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings=1000000000000; it must be at most"),
        ({"rope_parameters": {"rope_theta": "10"}}, "rope_theta='10'; it must be a number"),
    ],
)
def test_a_wrong_key_is_named_with_its_value_and_what_would_be_right(draft, changes, words):
    edit(draft, **changes)
    with pytest.raises(DraftCheckpointError) as error:
        check_draft_folder(draft)
    assert words in str(error.value)
    assert str(draft / "config.json") in str(error.value)


@pytest.mark.parametrize("key", ["dspark_config", "dflash_config"])
def test_nested_keys_mean_what_flat_ones_do(draft, key):
    flat = read_draft_config(draft)
    config = json.loads((draft / "config.json").read_text())
    config[key] = {
        name: config.pop(name) for name in ("block_size", "target_layer_ids", "mask_token_id", "markov_rank")
    }
    assert DraftConfig.from_dict(config) == flat


def test_a_draft_for_another_target_is_refused_by_width_vocabulary_and_layers(draft):
    config = read_draft_config(draft)
    right = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_hidden_layers": 4}
    config.check_target(**right)
    for change, words in (
        ({"hidden_size": 128}, "hidden_size=64"),
        ({"vocab_size": 1000}, "vocab_size=512"),
        ({"num_hidden_layers": 3}, "layers 0 to 1"),
    ):
        with pytest.raises(DraftCheckpointError, match=words):
            config.check_target(**{**right, **change})


def test_the_last_layer_is_refused_because_its_output_is_never_handed_out(draft):
    edit(draft, target_layer_ids=[0, 3])
    with pytest.raises(DraftCheckpointError, match="last layer is not available"):
        read_draft_config(draft).check_target(hidden_size=64, vocab_size=VOCAB_SIZE, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("markov_head.markov_w2.weight"), "lacks the tensors ['markov_head.markov_w2.weight']"),
        (
            lambda t: t.update({"layers.0.extra.weight": t["norm.weight"].clone()}),
            "has the tensors ['layers.0.extra.weight']",
        ),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].clone()}),
            "fc.weight has shape [64, 64]; [64, 128] would be",
        ),
    ],
)
def test_a_missing_unknown_or_misshapen_tensor_is_named(draft, change, words):
    tensors = load_file(draft / "model.safetensors")
    change(tensors)
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(DraftCheckpointError) as error:
        check_draft_folder(draft)
    assert words in str(error.value)


def test_a_confidence_bias_may_be_absent_as_in_published_drafts(draft):
    tensors = load_file(draft / "model.safetensors")
    del tensors["confidence_head.proj.bias"]
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, draft / "model.safetensors")
    check_draft_folder(draft)


def test_a_damaged_or_absent_file_is_an_error_with_its_path(draft):
    (draft / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(DraftCheckpointError, match="model.safetensors"):
        check_draft_folder(draft)
    (draft / "model.safetensors").unlink()
    with pytest.raises(DraftCheckpointError, match="no .*safetensors"):
        check_draft_folder(draft)


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (
            {"verify_mode": "compact"},
            {"enable_confidence_head": False, "confidence_head_with_markov": False},
            "static or off",
        ),
        ({"verify_mode": "compact", "window_policy": "ahead"}, {}, "hidden_confidence_head"),
        ({"verify_mode": "compact", "max_window": 5}, {}, "block_size is 4"),
        ({"verify_mode": "compact", "min_window": 5}, {}, "block_size is 4"),
    ],
)
def test_a_mode_that_the_draft_cannot_serve_is_refused_with_the_flag(draft, settings, changes, words):
    edit(draft, **changes)
    with pytest.raises(ConfigError, match=words):
        check_draft(DSparkConfig(**settings), read_draft_config(draft))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_found_by_its_name(draft, number):
    check_draft_weights(draft)
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"][5, 7] = number
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(DraftCheckpointError, match="tensor fc.weight holds numbers that are NaN or infinite"):
        check_draft_weights(draft)


@pytest.mark.parametrize(
    ("place", "token", "words"),
    [
        (3, VOCAB_SIZE, f"draft_token_ids[3]={VOCAB_SIZE}; it must be a token id from 0 to {VOCAB_SIZE - 1}"),
        (0, -1, "draft_token_ids[0]=-1; it must be a token id"),
        (1, VOCAB_SIZE - 1, f"draft_token_ids[127]={VOCAB_SIZE - 1} stands there twice"),
    ],
)
def test_a_draft_proposes_each_token_of_its_target_once(target, tmp_path, place, token, words):
    folder = tiny_draft(tmp_path, target, draft_vocab_size=128)
    check_draft_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["draft_token_ids"][place] = token
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DraftCheckpointError) as error:
        check_draft_folder(folder)
    assert words in str(error.value)


def test_a_tensor_that_is_stored_in_whole_numbers_is_refused(draft):
    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.int8)
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(DraftCheckpointError, match="norm.weight is stored as I8; BF16 or F16 or F32 or F64"):
        check_draft_folder(draft)
