"""What a plain CPU cannot serve, each refused before anything is loaded with one sentence: what, why, and the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.cpu import ATTENTION_BACKEND
from sglang_dspark.errors import UserError
from sglang_dspark.settings.flags import ALGORITHM

# Quantised on loading, or moved by kernels, sockets or libraries that a plain CPU's installation does not have.
OTHER_LOAD_FORMATS = (
    "bitsandbytes", "flash_rl", "fastsafetensors", "instanttensor", "expert_pack", "ipc_cache", "rdma",
    "remote_instance", "private",
)  # fmt: skip
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")


class CpuPlatformError(UserError):
    """A setting or a model that the plain-CPU platform cannot serve."""


@dataclass(frozen=True)
class Refusal:
    """`applies` says whether the rule hits; `reason` is the sentence, with the value as ``{}``."""

    field: str
    applies: Callable[[Any], bool]
    reason: str


def _other_backend(value: Any) -> bool:
    return value not in (None, ATTENTION_BACKEND)


ARGUMENTS = (
    Refusal("device", lambda v: v not in (None, "cpu"), "--device {}: torch sees no such device here; drop the flag"),
    Refusal("dtype", lambda v: v not in DTYPES, "--dtype {}: choose auto, bfloat16, float16 or float32"),
    Refusal("quantization", lambda v: v not in (None, "unquant"),
            "--quantization {}: quantised weights need compiled kernels; serve the unquantised checkpoint"),
    Refusal("load_format", lambda v: v in OTHER_LOAD_FORMATS,
            "--load-format {}: it needs an accelerator or a library that is not here; drop the flag"),
    Refusal("kv_cache_dtype", lambda v: v not in ("auto", "bf16", "bfloat16"),
            "--kv-cache-dtype {}: the KV cache has the model's dtype here; drop the flag"),
    Refusal("attention_backend", _other_backend, "--attention-backend {}: only dspark_cpu runs here; drop the flag"),
    Refusal("prefill_attention_backend", _other_backend,
            "--prefill-attention-backend {}: only dspark_cpu runs here; drop the flag"),
    Refusal("decode_attention_backend", _other_backend,
            "--decode-attention-backend {}: only dspark_cpu runs here; drop the flag"),
    Refusal("speculative_draft_attention_backend", _other_backend,
            "--speculative-draft-attention-backend {}: only dspark_cpu runs here; drop the flag"),
    Refusal("sampling_backend", lambda v: v not in (None, "pytorch"),
            "--sampling-backend {}: only pytorch runs here; drop the flag"),
    Refusal("page_size", lambda v: v not in (None, 1), "--page-size {}: pages hold one token here; drop the flag"),
    Refusal("speculative_algorithm", lambda v: v is not None and v.upper() != ALGORITHM,
            f"--speculative-algorithm {{}}: a plain CPU runs {ALGORITHM} or none"),
    Refusal("enable_torch_compile", bool, "--enable-torch-compile: needs a C++ compiler; drop the flag"),
    Refusal("enable_deterministic_inference", bool,
            "--enable-deterministic-inference: its kernels need Triton, and no text depends on the batch here; drop the flag"),
    Refusal("enable_lora", bool, "--enable-lora: adapters need Triton kernels; merge the adapter into the weights"),
    Refusal("lora_paths", bool, "--lora-paths: adapters need Triton kernels; merge the adapter into the weights"),
    Refusal("enable_hierarchical_cache", bool,
            "--enable-hierarchical-cache: the cache is in main memory already; drop the flag"),
    Refusal("disaggregation_mode", lambda v: v not in (None, "null"),
            "--disaggregation-mode {}: prefill and decode run in one server here; drop the flag"),
    Refusal("pp_size", lambda v: v > 1, "--pp-size {}: use --tp-size to spread a model over cores"),
    Refusal("ep_size", lambda v: v > 1, "--ep-size {}: mixture-of-experts models do not run here"),
    Refusal("cpu_offload_gb", bool, "--cpu-offload-gb {}: the weights are in main memory already; drop the flag"),
    Refusal("enable_memory_saver", bool, "--enable-memory-saver: needs CUDA; drop the flag"),
    Refusal("enable_multimodal", bool, "--enable-multimodal: only text is served here; drop the flag"),
    Refusal("cuda_graph_backend_decode", lambda v: v not in (None, "disabled"),
            "--cuda-graph-backend-decode {}: there are no graphs here; drop the flag"),
    Refusal("cuda_graph_backend_prefill", lambda v: v not in (None, "disabled"),
            "--cuda-graph-backend-prefill {}: there are no graphs here; drop the flag"),
)  # fmt: skip


def refuse_arguments(given: dict[str, Any]) -> None:
    """Check what the user gave, before defaults: field name -> value.

    Raises:
        CpuPlatformError: the first setting that cannot be served.
    """
    for rule in ARGUMENTS:
        value = given.get(rule.field)
        if value is not None and rule.applies(value):
            raise CpuPlatformError(rule.reason.format(value))


def refuse_model(config) -> None:
    """Check SGLang's `ModelConfig` of the target.

    Raises:
        CpuPlatformError: quantised, multimodal, windowed, latent-attention, mixture-of-experts or recurrent models.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    text = config.hf_text_config
    experts = max(
        (getattr(text, name, 0) or 0 for name in ("num_experts", "num_local_experts", "n_routed_experts")), default=0
    )
    why = None
    if config.quantization is not None:
        why = f"its weights are quantised ({config.quantization}); serve the unquantised checkpoint"
    elif config.is_multimodal or config.is_encoder_decoder:
        why = "it is not a decoder of text alone"
    elif config.attention_arch != AttentionArch.MHA or mambaish_config(config) is not None:
        why = "it does not keep ordinary keys and values (latent attention or a recurrent state)"
    elif config.is_hybrid_swa or config.sliding_window_size is not None:
        why = "it attends through a sliding window"
    elif experts > 1:
        why = f"it is a mixture of {experts} experts"
    if why is not None:
        raise CpuPlatformError(f"{config.model_path} cannot be served on a plain CPU: {why}")


def refuse_layers(model) -> None:
    """Check the attention layers of a loaded model: what its configuration did not tell.

    Raises:
        CpuPlatformError: a layer with a window, a logit cap, cross attention, or values of another size than its keys.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        if window or layer.logit_cap or layer.is_cross_attention or layer.v_head_dim != layer.qk_head_dim:
            raise CpuPlatformError(f"layer {name} has a sliding window, a logit cap, cross attention or values of another size "
                          "than its keys, which attention on a plain CPU does not do")  # fmt: skip


def refuse_too_little_memory(model_path: str, bytes_per_parameter: int, available: int) -> None:
    """Check a local checkpoint's weights against free memory.

    Args:
        model_path: a folder with safetensors files; anything else is not checked here.
        bytes_per_parameter: of the dtype that the weights will have; available: bytes.

    Raises:
        CpuPlatformError: the weights alone do not fit.
    """
    files = sorted(Path(model_path).glob("*.safetensors")) if Path(model_path).is_dir() else []
    needed = sum(_parameters(file) for file in files) * bytes_per_parameter
    if needed > available:
        raise CpuPlatformError(
            f"{model_path} needs {needed / 2**30:.1f} GiB for its weights and {available / 2**30:.1f} GiB are free: "
            "close other programs or choose a smaller model"
        )


def _parameters(file: Path) -> int:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118  (not a mapping)
    total = 0
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        total += size
    return total
