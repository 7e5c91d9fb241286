"""The platform class that SGLang asks for everything that depends on the device, answered for a plain CPU."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_dspark.cpu import ATTENTION_BACKEND
from sglang_dspark.cpu.defaults import apply_defaults
from sglang_dspark.cpu.processes.process import prepare_process, prepare_worker
from sglang_dspark.cpu.refusals import refuse_layers
from sglang_dspark.settings.flags import ALGORITHM


class DSparkCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Any x86-64 or arm64 Linux machine: torch's own kernels, gloo, no Triton, no graphs, no compiler."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        prepare_process()

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # a string: SGLang splits it at the colon

    def apply_server_args_defaults(self, server_args) -> None:
        apply_defaults(server_args)

    def init_backend(self) -> None:
        prepare_worker()

    def post_load_model(self, model) -> None:
        """Refuse layers that a CPU cannot run; make a target's sums the same in batches of any size."""
        refuse_layers(model)
        if hasattr(model, "logits_processor"):  # a draft has none, and no text depends on its bits
            from sglang_dspark.cpu.exact import make_exact

            make_exact(model)

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Ours and no other."""
        return algorithm == ALGORITHM

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Our pool for multi-head attention, None for every other kind."""
        if kind != "mha":
            return None  # asked for every kind at start; a model that needs another kind was refused before
        from sglang_dspark.cpu.pool import CpuKVPool

        return CpuKVPool

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"  # the base class raises, and a `/start_profile` would end the scheduler

    def get_torch_profiler_activity(self):
        from torch.profiler import ProfilerActivity

        return ProfilerActivity.CPU

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"
