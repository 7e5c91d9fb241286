"""A grammar that allows no token at all is refused as one that cannot be compiled: a 400.

`{"$ref": "#"}` compiles, and no text fits it. The engine then draws a token that the grammar forbids, finds that it
forbids it, and answers 500 for a fault of the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_dspark.contract.hooks import AFTER, Hook

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject


def _refuse_empty(grammar: BaseGrammarObject | None, backend: BaseGrammarBackend, *args) -> BaseGrammarObject | None:
    """Runs in a thread of the grammars' own, once for each that is not cached."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    if grammar is None or isinstance(grammar, InvalidGrammarObject):
        return grammar
    mask = grammar.allocate_vocab_mask(vocab_size=getattr(backend, "vocab_size", 1), batch_size=1, device="cpu")
    if mask.dtype != torch.int32:  # one bit a token; other backends' masks are of another kind, and are left alone
        return grammar
    grammar.fill_vocab_mask(mask, 0)
    return grammar if bool(mask.any()) else InvalidGrammarObject("it allows no text at all")


HOOKS = (
    Hook(
        "sglang.srt.constrained.base_grammar_backend:BaseGrammarBackend._init_value_dispatch",
        AFTER,
        _refuse_empty,
        ("key", "require_reasoning"),
    ),
)
