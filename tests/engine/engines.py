"""Plain engines in the test's own process, and the greedy text that transformers gives for the same target.

One engine at a time: SGLang's shutdown kills every child of its process, another engine's too, and that engine's
watchdog then kills the whole process, some seconds later and without a word.
"""

from __future__ import annotations

import contextlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH = 48
_alive = []


@contextlib.contextmanager
def engine_of(path, **arguments):
    """A running `sglang.Engine` in float32; RuntimeError where another one still runs."""
    import sglang

    if _alive:
        raise RuntimeError(f"an engine for {_alive[0]} still runs in this process: keep one at a time")
    settings = {"dtype": "float32", "max_total_tokens": 4096, **arguments}
    engine = sglang.Engine(model_path=str(path), log_level="error", skip_server_warmup=True, **settings)
    _alive.append(path)
    try:
        yield engine
    finally:
        engine.shutdown()
        _alive.clear()


def greedy(engine, prompts, length=LENGTH, **sampling):
    """Answers to prompts that are all texts or all lists of token ids."""
    ids = {"input_ids": prompts} if isinstance(prompts[0], list) else {"prompt": prompts}
    parameters = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True, **sampling}
    return engine.generate(sampling_params=parameters, **ids)


def by_transformers(path, prompts, length=LENGTH, **generation):
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt]) if isinstance(prompt, list) else tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=0, **generation)
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


def long_prompts(count=4, length=150):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(6, 500, (count, length), generator=generator).tolist()
