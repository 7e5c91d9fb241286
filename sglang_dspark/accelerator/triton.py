"""`dspark_triton`: SGLang's Triton attention over windows of different lengths, eagerly and under token tiers.

The kernel itself reads any lengths; only the row offsets that its backend prepares are those of whole blocks. Nothing is
read back from the device, so it needs no lengths on the host.
"""

from __future__ import annotations

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout


class RaggedTritonBackend(TritonAttnBackend):
    """Rows of request i are `qo_indptr[i] : qo_indptr[i + 1]`; rows behind the last one are padding and stay unwritten."""

    supports_ragged_verify_graph = True

    def init_forward_metadata(self, forward_batch) -> None:
        """SGLang's metadata, with the rows of a ragged verification taken from its own `qo_indptr`."""
        super().init_forward_metadata(forward_batch)
        layout = resolve_ragged_verify_layout(forward_batch)
        if layout is not None and forward_batch.forward_mode.is_target_verify():
            self.forward_metadata.qo_indptr = layout.qo_indptr_device

    def _update_target_verify_buffers(self, plan, bs, seq_lens, spec_info, req_pool_indices):
        """The static buffers of a captured tier: its padding requests take rows as well, at most a block's each, because
        the kernel's grid ends at the longest window of the capture."""
        buffers = super()._update_target_verify_buffers(plan, bs, seq_lens, spec_info, req_pool_indices)
        layout = getattr(spec_info, "ragged_verify_layout", None)
        if layout is not None:
            padded = layout.padded_to_bucket(padded_bs=bs, cap=self.target_verify_num_tokens_per_req)
            self.qo_indptr[: bs + 1].copy_(padded.qo_indptr_device)
        return buffers


# The engine captures a verification with a custom mask for classes that it does not know, and nobody would write it.
dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS |= {RaggedTritonBackend.__name__}
