"""Tiny random targets with a working tokenizer: real checkpoints in Hugging Face's format, made in about a second.

The weights are random but large enough that every layer matters and the logits are sharp (their standard deviation is
`LOGIT_STD`), so greedy text neither depends on the last bit of a product nor falls into a loop of one token at once.
Everything is seeded: the same arguments give the same files on every machine with the same torch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 512
LOGIT_STD = 4.0
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<mask>"]
PAD_ID, BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID, MASK_ID = range(6)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<assistant>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CORPUS = """
The river ran past the mill, and every morning the miller counted the sacks that stood along the wall. When the count
was wrong he began again from the left, because the clerk in the town had once told him that an error found early costs
little. Numbers such as 12, 37, 144 and 2026 were written in chalk; sums like 7 + 5 = 12 or 9 * 4 = 36 were done aloud.
A program is a promise to a machine: def add(a, b): return a + b; for i in range(10): print(i). The children asked why
the water turned the wheel, what the wheel turned, where the flour went, who ate the bread, and how long it would last.
Please write a short letter to a friend about the weather, the harvest, the new bridge and the old road to the north.
Speculative decoding drafts several words and checks them together; what agrees is kept and the rest is drawn again.
Snow fell on the hills in winter, rain in spring, and in summer the grass grew high around the broken gate.
"""

PROMPTS = [
    "The river ran", "When the count was", "Numbers such as 12", "def add(a, b):", "The children asked why",
    "Please write a short letter", "Snow fell on the hills", "A program is a promise", "An error found early",
    "what the wheel turned", "Who ate the bread?", "7 + 5 = ", "for i in range(10):", "and in summer the grass",
    "the clerk in the town", "drafts several words", "the rest is drawn again", "the old road to the north",
    "Where did the flour go", "along the wall he counted",
]  # fmt: skip


def tiny_target(
    directory: str | Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    tie_embeddings: bool = False,
    words: int | None = None,
) -> Path:
    """Write a tiny random target (config, float32 safetensors, tokenizer with a chat template) and return its folder.

    Args:
        directory: an empty or missing folder.
        architecture: ``"llama"`` or ``"qwen3"`` (the latter has q/k norms and a head size that is not hidden/heads).
        seed: of the weights; layers, hidden, heads, kv_heads, context: the shape.
        words: a vocabulary of that many whole words, for tests that enumerate it; None is byte-level BPE of `VOCAB_SIZE`.

    Raises:
        ValueError: an unknown architecture.
    """
    shape = {
        "vocab_size": words or VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32))
    else:
        raise ValueError(f"architecture must be 'llama' or 'qwen3', not {architecture!r}")
    randomize_(model, seed)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if words is None:
        save_tokenizer(folder, context)
    else:
        save_word_tokenizer(folder, words)
    return folder


def randomize_(model: PreTrainedModel, seed: int) -> None:
    """Redraw every weight of `model` from a seeded generator, scaled so that each layer moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:  # a norm's gain: near one, but never equal, so that a forgotten gain is seen
                weight.copy_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
                continue
            scale = LOGIT_STD if name.startswith("lm_head") else 1.0
            fan_in = 1 if "embed_tokens" in name else weight.shape[1]
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale / math.sqrt(fan_in))


def save_tokenizer(folder: Path, context: int) -> None:
    """Write a byte-level BPE tokenizer of exactly `VOCAB_SIZE` tokens, trained on the corpus in this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def save_word_tokenizer(folder: Path, words: int) -> None:
    """Write a tokenizer of whole words w0, w1, ...; anything else is <unk>. Token 1 is the mask and token 2 the end."""
    names = ["<unk>", "<mask>", "<end>"] + [f"w{i}" for i in range(words - 3)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>").save_pretrained(folder)
