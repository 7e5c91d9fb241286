"""The engine's layout of verify windows that are known on the device only."""

from __future__ import annotations

import msgspec
import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout


def device_layout(windows: torch.Tensor, rows: int) -> RaggedVerifyLayout:
    """The layout of windows int [R] (anchors not counted) in a batch of `rows` rows, padding included.

    `rows` also stands for the number of live rows, which nobody reads back: FlashInfer sizes its list of slots by it.
    """
    layout = RaggedVerifyLayout.from_verify_lens_device(verify_lens=windows + 1, graph_num_tokens=rows)
    return msgspec.structs.replace(layout, total_verify_tokens=rows)
