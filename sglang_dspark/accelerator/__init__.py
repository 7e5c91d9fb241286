"""What only a GPU needs: attention that reads verify windows, defaults by capability, and the starts that are refused.

`backends` chooses and judges attention backends, `triton` is our own one, `defaults` fills in what the user left open,
`refusals` is the table of starts. Nothing of SGLang is imported at the top of this file.
"""

from __future__ import annotations

RAGGED_TRITON = "dspark_triton"


def offer_attention() -> None:
    """Offer our attention backend for target and draft; call it while plugins load."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES):
        if RAGGED_TRITON not in names:
            names.append(RAGGED_TRITON)
    register_attention_backend(RAGGED_TRITON)(_ragged_triton)


def _ragged_triton(runner):
    from sglang_dspark.accelerator.triton import RaggedTritonBackend

    return RaggedTritonBackend(runner)
