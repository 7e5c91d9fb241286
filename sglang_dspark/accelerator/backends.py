"""Which attention backend verifies windows of different lengths on which GPU: the default, and what is refused.

docs/accelerators.md has the same table with what was proved how.
"""

from __future__ import annotations

from sglang_dspark.accelerator import RAGGED_TRITON
from sglang_dspark.settings.config import ConfigError

FA3_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0))  # what its kernels are built for
TRTLLM_MAJOR = 10  # its kernels for other GPUs (XQA) read whole blocks only
LARGEST_HEAD = 256  # of FA3 and TRT-LLM
WITHOUT_GRAPHS = "flashinfer"  # reads windows, but plans them on the host: three waits per step, and no graph
READS_WINDOWS = ("fa3", "fa4", "trtllm_mha", RAGGED_TRITON, WITHOUT_GRAPHS)


def default_backend(capability: tuple[int, int], head_size: int, sinks: bool, engines_choice: str) -> str:
    """The attention backend of a model with ordinary keys and values, where the user named none.

    Args:
        capability: of the GPU, as CUDA tells it. head_size: the largest of keys and values over all layers.
        sinks: whether the model has attention sinks. engines_choice: what SGLang would take; on the GPUs of TRT-LLM it
            knows which models need another one.
    """
    if head_size > LARGEST_HEAD:
        return RAGGED_TRITON
    if capability in FA3_CAPABILITIES and not (sinks and capability[0] == 8):
        return "fa3"
    return engines_choice if capability[0] == TRTLLM_MAJOR else RAGGED_TRITON


def check_choice(decode_backend: str, capability: tuple[int, int]) -> None:
    """Refuse the name of a backend that would read every request as a whole block.

    Every mode meets shorter ones: at a token limit, under a request's own bounds, while drafting rests. A name that is
    not judged here (latent attention, other makers) is judged by `check_backend` once the object is there.

    Raises:
        ConfigError: naming the flag and the fix.
    """
    if decode_backend == "trtllm_mha" and capability[0] != TRTLLM_MAJOR:
        raise _refused("trtllm_mha", capability, "reads whole blocks only on this GPU (its XQA kernels)")
    if decode_backend in ("triton", "torch_native", "flex_attention"):
        raise _refused(decode_backend, capability, "does not read verify windows of different lengths")


def check_backend(backend: object, capability: tuple[int, int]) -> None:
    """`check_choice` on the engine's attention backend itself.

    Raises:
        ConfigError: naming the backend and the fix.
    """
    name = type(backend).__name__
    if getattr(backend, "is_xqa_impl", False):
        raise _refused(name, capability, "reads whole blocks only on this GPU (its XQA kernels)")
    if not (backend.supports_ragged_verify_graph or plans_on_host(backend)):
        raise _refused(name, capability, "does not read verify windows of different lengths")


def plans_on_host(backend: object) -> bool:
    """Whether it reads windows only while it may wait for them: FlashInfer, whose plan is made on the host."""
    return type(backend).__name__ == "FlashInferAttnBackend"


def _refused(name: str, capability: tuple[int, int], why: str) -> ConfigError:
    known = capability in FA3_CAPABILITIES or capability[0] == TRTLLM_MAJOR
    best = default_backend(capability, 0, False, "trtllm_mha") if known else RAGGED_TRITON
    others = "" if best == RAGGED_TRITON else f" (or {RAGGED_TRITON})"
    return ConfigError(
        f"--attention-backend: {name} {why}; use --attention-backend {best}{others}, or --verify-mode off for plain "
        "decoding"
    )
