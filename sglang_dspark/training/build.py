"""Make a fresh draft for a target: its config, its initial weights, its vocabulary."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file

from sglang_dspark.models.checkpoint import read_draft_config
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.settings import TrainSettings
from sglang_dspark.training.target import Target

# Keys of every transformers config that say nothing about a draft.
TRANSFORMERS_NOISE = [
    "_name_or_path",
    "transformers_version",
    "quantization_config",
    "auto_map",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "id2label",
    "label2id",
    "problem_type",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "use_cache",
]


def default_feature_layers(target_layers: int, count: int = 3) -> tuple[int, ...]:
    """Layers spread from near the input to near the output: 2, 14, 27 of 30."""
    if target_layers < 3:
        return (0,)
    first, last = min(2, target_layers - 3), max(target_layers - 3, 0)
    return tuple(sorted({round(first + (last - first) * i / max(1, count - 1)) for i in range(count)}))


def choose_mask_token(settings: TrainSettings, target: Target) -> int:
    """A token inside the target's vocabulary that answers never contain; the user's choice wins.

    Tokenizers keep such ids for repositories' names, padding or reserved slots; the first that exists is taken.
    """
    if settings.mask_token is not None:
        return settings.mask_token
    known = target.tokenizer.get_vocab()
    for name in ("<|mask|>", "<mask>", "[MASK]", "<|fim_pad|>", "<reponame>", "<repo_name>", "<unk>", "<pad>", "[PAD]"):
        if name in known and known[name] not in target.stop_ids:
            return known[name]
    raise ValueError("no unused token was found for the mask: give one with --mask-token")


def draft_settings(settings: TrainSettings, target: Target, feature_layers: tuple[int, ...]) -> dict:
    """config.json of the draft to be trained."""
    c, s = target.config, settings
    qwen = s.shape == "qwen3" or c.model_type == "qwen3"
    vocab = s.draft_vocab if 0 < s.draft_vocab < c.vocab_size else c.vocab_size
    head = {"markov_head_type": s.head} if s.rank else {}
    if s.confidence != "none":
        head["confidence_head_with_markov"] = s.confidence in ("markov", "both")
    extra = {"draft_vocab_size": vocab} if vocab < c.vocab_size else {}
    return make_config(
        c.to_dict(),
        architectures=["Qwen3DSparkModel" if qwen else "LlamaDSparkModel"],
        model_type="qwen3" if qwen else c.model_type,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        num_hidden_layers=s.layers,
        block_size=s.gamma,
        mask_token_id=choose_mask_token(s, target),
        target_layer_ids=list(feature_layers),
        num_anchors=s.anchors,
        enable_confidence_head=s.confidence != "none",
        enable_hidden_confidence_head=s.confidence == "both",
        markov_rank=s.rank,
        normalize_features=s.normalize_features,
        dtype="bfloat16",
        **head,
        **extra,
    )


def make_config(target: dict, **draft) -> dict:
    """config.json of a new draft: a copy of the target's settings with the draft's keys over them (flat, DeepSpec's
    way).
    """
    raw = copy.deepcopy(target)
    for key in TRANSFORMERS_NOISE:
        raw.pop(key, None)
    raw["num_target_layers"] = raw["num_hidden_layers"]
    raw.update(tie_word_embeddings=False, **draft)
    raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    return raw


def new_draft(settings: TrainSettings, target: Target, feature_layers: tuple[int, ...]) -> TrainableDraft:
    """A float32 draft ready to train; ``draft_token_ids`` is to be set by the caller where the vocabulary is
    restricted.
    """
    torch.manual_seed(settings.seed)
    draft = TrainableDraft(draft_settings(settings, target, feature_layers), target.embedding, target.lm_head)
    _initialise(draft)
    if settings.init_from_target:
        _start_from_target(draft, target)
    return draft.to(target.device)


def _initialise(draft: TrainableDraft) -> None:
    std = draft.raw.get("initializer_range", 0.02)
    with torch.no_grad():
        for module in draft.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, std)
                if module.bias is not None:
                    module.bias.zero_()
        if draft.markov_head is not None:
            # W2 starts small and W1 at scale 1: the bias starts at zero, and learns fast (+0.05 of accepted length).
            draft.markov_head.markov_w1.weight.normal_(0, 1.0)
            draft.markov_head.markov_w2.weight.normal_(0, 0.001)


def _start_from_target(draft: TrainableDraft, target: Target) -> None:
    """Begin as the target's layers that follow the last captured one: then the context's keys and values are already
    right.

    The fusion passes the last captured layer through, ``hidden_norm`` is that layer's successor's input norm, and with
    features normalised this equals what the successor itself would compute for the context.
    """
    c = draft.config
    first = min(c.target_layer_ids[-1] + 1, len(target.model.model.layers) - c.num_hidden_layers)
    with torch.no_grad():
        for layer, ours in enumerate(draft.layers):
            theirs = target.model.model.layers[max(first, 0) + layer].state_dict()
            mine = ours.state_dict()
            ours.load_state_dict(
                {k: theirs[k] if k in theirs and theirs[k].shape == v.shape else v for k, v in mine.items()}
            )
        draft.norm.weight.copy_(target.model.model.norm.weight)
        source = target.model.model.layers[max(first, 0)].input_layernorm.weight
        draft.hidden_norm.weight.copy_(source)
        eye = torch.eye(c.hidden_size)
        draft.fc.weight.mul_(0.1)
        draft.fc.weight[:, -c.hidden_size :] += eye.to(draft.fc.weight)


def continue_from(draft: TrainableDraft, folder: str) -> None:
    """Take a finished draft's weights where they fit: a second run then starts where the first ended.

    Rows of W2 follow their token ids if the two vocabularies differ. Layers that the finished draft lacks keep their
    own weights but add nothing at first (their output projections start at zero), so the start is as good as what it
    continues.
    """
    old_config = read_draft_config(folder)
    state: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        state.update(load_file(path))
    old_ids = state.pop("draft_token_ids", torch.arange(old_config.vocab_size)).long()
    mine = draft.state_dict()
    with torch.no_grad():
        old_w2 = state.pop("markov_head.markov_w2.weight", None)
        if old_w2 is not None and draft.markov_head is not None and old_w2.shape[1] == draft.config.markov_rank:
            full = torch.zeros(draft.config.vocab_size, draft.config.markov_rank)
            full[old_ids] = old_w2.float()
            ids = draft.token_ids(torch.arange(draft.config.support_size)).cpu()
            draft.markov_head.markov_w2.weight.copy_(full[ids])
        for name, tensor in state.items():
            if name in mine and mine[name].shape == tensor.shape:
                mine[name].copy_(tensor)
        for layer in draft.layers[old_config.num_hidden_layers :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
