"""A target whose rows do not depend on the batch: its linear layers and its vocabulary product run by `row_counts`.

The rest of a forward needs nothing: attention, norms, rotation and activations compute row by row (`attention`). The
draft is left alone, since neither greedy nor seeded text depends on what it proposes.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch.nn.functional import linear

from sglang_dspark.cpu import EXACTNESS
from sglang_dspark.cpu.row_counts import RowCounts, row_counts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exactness:
    """What was found for one model: by product ("1536 to 576 bfloat16") the padded counts, and those beyond mending."""

    padded: dict[str, tuple[int, ...]]
    inexact: tuple[str, ...]


class ExactLinear(UnquantizedLinearMethod):
    """SGLang's plain linear method, run in numbers of rows that agree with each other."""

    def __init__(self, counts: RowCounts) -> None:
        super().__init__()
        self.counts = counts

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """SGLang's product, cut in numbers of rows whose results agree bit for bit; leading dimensions are flattened."""
        weight = layer.weight
        if x.dim() == 2:
            return self.counts.apply(lambda some: linear(some, weight, bias), x)
        return self.apply(layer, x.flatten(0, -2), bias).unflatten(0, x.shape[:-1])


def make_exact(model: torch.nn.Module) -> None:
    """Try the products of a loaded target and mend those that need it; what was found stays at the model."""
    found: dict[str, RowCounts] = {}
    for layer in model.modules():
        if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod:
            counts = _try(found, layer.weight, layer.weight.dtype, layer.bias is not None)
            if not counts.changes_nothing:
                layer.quant_method = ExactLinear(counts)
    processor, head = getattr(model, "logits_processor", None), getattr(model, "lm_head", None)
    if processor is not None and head is not None:
        counts = _try(found, head.weight, torch.float32 if processor.use_fp32_lm_head else head.weight.dtype)
        if not counts.changes_nothing:
            processor._compute_lm_head = functools.partial(_logits, counts, processor._compute_lm_head)
    report = Exactness(
        {name: counts.padded for name, counts in found.items() if counts.padded},
        tuple(name for name, counts in found.items() if not counts.exact),
    )
    setattr(model, EXACTNESS, report)
    if report.inexact:
        logger.warning("texts may depend on the batch: a row of %s differs by its place", ", ".join(report.inexact))


def _try(found: dict[str, RowCounts], weight: torch.Tensor, dtype: torch.dtype, bias: bool = False) -> RowCounts:
    outputs, inputs = weight.shape
    name = f"{inputs} to {outputs} {str(dtype).removeprefix('torch.')}" + " with bias" * bias
    return found.setdefault(name, row_counts(inputs, outputs, dtype, bias))


def _logits(counts: RowCounts, compute, hidden_states, lm_head, embedding_bias=None, *, out=None) -> torch.Tensor:
    """`LogitsProcessor._compute_lm_head`; nobody on a CPU hands it a buffer for the logits."""
    return counts.apply(lambda some: compute(some, lm_head, embedding_bias), hidden_states)
