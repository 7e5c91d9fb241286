"""What a start on each GPU becomes: SGLang's whole resolution of its arguments runs, over facts of a GPU that is not here.

Bug class: SGLang chooses backends before it asks the algorithm, so on all GPUs but Hopper the default is one that reads
whole blocks, and the start ends in our own refusal; and a choice of the user's that is silently replaced.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from sglang_dspark.accelerator.backends import check_backend, default_backend
from sglang_dspark.accelerator.defaults import reserve_step
from sglang_dspark.accelerator.refusals import STARTS
from sglang_dspark.settings.config import ConfigError, DSparkConfig
from sglang_dspark.settings.flags import ALGORITHM, attach
from tests.engine.tiny import tiny_target
from tests.engine.tiny_draft import tiny_draft

GPUS = {
    "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "Orin": (8, 7), "L4, 4090": (8, 9), "H100": (9, 0), "B200": (10, 0),
    "5090": (12, 0),
}  # fmt: skip
DEFAULTS = {
    "T4": "dspark_triton", "A100": "fa3", "A10": "fa3", "Orin": "dspark_triton", "L4, 4090": "fa3", "H100": "fa3",
    "B200": "trtllm_mha", "5090": "dspark_triton",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_target(folder / "target")
    return str(target), str(tiny_draft(folder / "draft", target))


@pytest.fixture(autouse=True)
def no_cpu_platform(monkeypatch):
    """Our plain-CPU platform steps aside, as it does on a machine with a GPU."""
    load_plugins()
    from sglang_dspark.cpu.platform import DSparkCpuPlatform

    monkeypatch.setattr(DSparkCpuPlatform, "is_out_of_tree", lambda self: False)
    monkeypatch.setattr(DSparkCpuPlatform, "apply_server_args_defaults", lambda self, args: None)


def facts(capability: tuple[int, int]):
    """The platform's predicates as SGLang answers them on such a GPU with FlashInfer installed."""
    major, minor = capability
    others = dict.fromkeys(("is_hip", "is_npu", "is_xpu", "is_mps", "is_musa", "has_amx", "is_sm110"), False)
    return override_platform(
        is_cuda=True, has_flashinfer=True, device_capability=capability, device_sm=10 * major + minor,
        is_sm90=major == 9, is_hopper_with_cuda_12_3=major == 9, is_sm100=major == 10, is_sm100_or_sm110=major == 10,
        is_sm120=major == 12, is_blackwell=major >= 10, **others,
    )  # fmt: skip


def resolved(pair, gpu: str, *, mode: str = "compact", **given):
    """SGLang's view of its arguments after everybody has had a say."""
    from sglang.srt.arg_groups.overrides import resolved_view

    target, draft = pair
    ours = {"speculative_algorithm": ALGORITHM, "speculative_draft_model_path": draft}
    arguments = attach(ServerArgs(model_path=target, device="cuda", **ours, **given), DSparkConfig(verify_mode=mode))
    with facts(GPUS[gpu]):
        arguments.resolve_once()
        return resolved_view(arguments)


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_starts_with_attention_that_reads_windows(pair, gpu):
    view = resolved(pair, gpu)
    assert view.attention_backend == DEFAULTS[gpu]
    assert view.page_size == (64 if gpu == "B200" else 1)
    assert view.speculative_eagle_topk == 1 and view.max_running_requests == 48


@pytest.mark.parametrize("mode", ["compact", "off"])
def test_our_servers_sample_by_torch_with_speculation_and_without(pair, mode):
    """FlashInfer filters in another order where min_p is among the filters: `off` would be another law."""
    assert resolved(pair, "H100", mode=mode).sampling_backend == "pytorch"


def test_a_server_that_is_not_ours_keeps_the_engines_defaults(pair):
    from sglang.srt.arg_groups.overrides import resolved_view

    plain = ServerArgs(model_path=pair[0], device="cuda")
    with facts(GPUS["A100"]):
        plain.resolve_once()
        view = resolved_view(plain)
    assert (view.attention_backend, view.sampling_backend) == ("flashinfer", "flashinfer")


def test_what_the_user_named_wins(pair):
    given = {"attention_backend": "flashinfer", "sampling_backend": "flashinfer", "max_running_requests": 7}
    view = resolved(pair, "H100", **given)
    assert {name: getattr(view, name) for name in given} == given


@pytest.mark.parametrize(
    ("gpu", "backend", "fix"),
    [
        ("H100", "trtllm_mha", "use --attention-backend fa3"),
        ("5090", "trtllm_mha", "use --attention-backend dspark_triton"),
        ("A100", "triton", "use --attention-backend fa3 .or dspark_triton"),
        ("B200", "triton", "use --attention-backend trtllm_mha"),
    ],
)
def test_a_backend_of_the_users_that_reads_whole_blocks_only_is_refused_before_anything_is_loaded(
    pair, gpu, backend, fix
):
    with pytest.raises(ConfigError, match=f"--attention-backend: {backend} .*{fix}.*--verify-mode off"):
        resolved(pair, gpu, attention_backend=backend)


def test_an_xqa_backend_is_refused_when_it_is_there():
    """It reports ragged graphs like its sibling, and raises when the first one is captured."""
    xqa = SimpleNamespace(supports_ragged_verify_graph=True, is_xqa_impl=True)
    with pytest.raises(ConfigError, match="XQA.*--attention-backend fa3"):
        check_backend(xqa, (9, 0))
    check_backend(SimpleNamespace(supports_ragged_verify_graph=True, is_xqa_impl=False), (10, 0))


def test_heads_beyond_fa3_and_sinks_on_ampere_take_our_triton():
    assert default_backend((9, 0), 512, False, "fa3") == "dspark_triton"
    assert default_backend((10, 0), 512, False, "trtllm_mha") == "dspark_triton"
    assert default_backend((8, 0), 64, True, "triton") == "dspark_triton"
    assert default_backend((9, 0), 64, True, "fa3") == "fa3"
    assert default_backend((10, 0), 192, False, "fa4") == "fa4"  # the engine's, for values of another size than keys


GIB = 2**30


@pytest.fixture
def memory(monkeypatch):
    """A GPU of so many GiB."""
    from sglang.srt.utils import common

    def of(gib: int) -> None:
        monkeypatch.setattr(common, "get_device_memory_capacity", lambda device=None: gib * 1024)

    return of


def arguments(requests=None, fraction=None):
    return SimpleNamespace(
        max_running_requests=requests, mem_fraction_static=0.8, _raw_input={"mem_fraction_static": fraction}
    )


@pytest.mark.parametrize(("gib", "vocab", "requests"), [(80, 151_936, 48), (6, 262_144, 24), (2, 262_144, 6)])
def test_the_default_number_of_requests_is_one_whose_step_fits(memory, gib, vocab, requests):
    memory(gib)
    given = arguments()
    reserve_step(given, SimpleNamespace(block_size=7, vocab_size=vocab, support_size=vocab))
    assert given.max_running_requests == requests


def test_the_users_number_of_requests_gets_its_room_and_a_pool_of_the_users_stays(memory):
    """256 requests of gamma 7 keep gigabytes of logits and laws: without the reserve the pool has taken them."""
    memory(80)
    draft = SimpleNamespace(block_size=7, vocab_size=151_936, support_size=151_936)
    few, many, sized = arguments(16), arguments(256), arguments(256, fraction=0.8)
    for given in (few, many, sized):
        reserve_step(given, draft)
    reserved = [(0.8 - given.mem_fraction_static) * 80 * GIB for given in (few, many)]
    assert 0 < reserved[0] < reserved[1] / 5 and GIB < reserved[1] < 4 * GIB
    assert sized.mem_fraction_static == 0.8 and sized.max_running_requests == many.max_running_requests == 256


REFUSED = {
    "pp_size": 2, "enable_dp_attention": True, "attn_dp_size": 2, "attn_cp_size": 2, "enable_prefill_cp": True,
    "dcp_size": 2, "disaggregation_mode": "decode", "enable_pdmux": True, "enable_two_batch_overlap": True,
    "enable_lora": True, "lora_paths": ["a"],
}  # fmt: skip


@pytest.mark.parametrize("row", STARTS, ids=lambda row: row.field)
def test_a_start_that_cannot_be_served_is_refused_with_flag_and_fix(pair, row):
    from sglang_dspark.accelerator.refusals import refuse_start

    served = {name: getattr(ServerArgs(model_path="none"), name) for name in REFUSED}
    refuse_start(SimpleNamespace(**served))
    with pytest.raises(ConfigError, match=rf"^--{row.field.replace('_', '-')}.*(use|merge|leave).*--verify-mode off"):
        refuse_start(SimpleNamespace(**served | {row.field: REFUSED[row.field]}))


@pytest.mark.parametrize("given", [{"pp_size": 2}, {"enable_two_batch_overlap": True}])
def test_the_table_is_asked_when_the_engine_resolves_its_arguments(pair, given):
    with pytest.raises(ConfigError, match="--verify-mode off"):
        resolved(pair, "H100", **given)
