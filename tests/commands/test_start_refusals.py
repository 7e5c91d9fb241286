"""A flag out of its range, a broken --config file or a draft that would end the server is refused by `serve` itself.

Bug class: what SGLang's parser takes and its scheduler finds half a minute later, in a traceback of another process.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_dspark.commands.preflight import plan_start
from tests.commands.test_serve_errors import refused
from tests.engine.tiny import tiny_target
from tests.engine.tiny_draft import tiny_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


LIMITED = {
    ("--context-length", "0"): "--context-length 0: it must be at least 1 token",
    ("--context-length", "-1"): "--context-length -1",
    ("--page-size", "0"): "--page-size 0",
    ("--max-total-tokens", "-5"): "--max-total-tokens -5",
    ("--max-running-requests", "0"): "--max-running-requests 0",
    ("--chunked-prefill-size", "0"): "--chunked-prefill-size 0: it must be at least 1 token, or -1",
    ("--chunked-prefill-size", "-2"): "--chunked-prefill-size -2",
    ("--tp", "0"): "--tp-size 0",
    ("--mem-fraction-static", "2"): "--mem-fraction-static 2.0: it must be a share of memory between 0 and 1",
    ("--mem-fraction-static", "nan"): "--mem-fraction-static nan",
    ("--device", "cuda"): "--device cuda: torch sees no such device here",
    ("--quantization", "fp8"): "--quantization fp8",
    ("--load-format", "bitsandbytes"): "--load-format bitsandbytes",
}


@pytest.mark.parametrize("argv", LIMITED, ids=" ".join)
def test_a_flag_that_no_server_here_survives_is_refused_by_its_name(target, port, argv):
    assert LIMITED[argv] in refused(target, "--verify-mode", "off", "--port", port, *argv)


def test_prompts_in_one_piece_are_no_fault(target, port):
    flags = ["--verify-mode", "off", "--port", str(port), "--chunked-prefill-size", "-1", "--device", "cpu"]
    assert plan_start([str(target), *flags]).args.chunked_prefill_size == -1


@pytest.mark.parametrize(
    ("text", "words"),
    [("port: [1, 2\nx: 1", ", line 2: it is not YAML"), ("- 1\n- 2", "not a list"), ("1: 2", "the key 1 is no flag"),
     ("port:", "port has no value"), ("\x00", "cannot be read")],
)  # fmt: skip
@pytest.mark.parametrize("joined", [False, True], ids=["--config F", "--config=F"])
def test_a_broken_config_file_is_named_with_its_line(target, tmp_path, text, words, joined):
    (tmp_path / "flags.yaml").write_text(text)
    file = str(tmp_path / "flags.yaml")
    message = refused(target, *([f"--config={file}"] if joined else ["--config", file]))
    assert file in message and words in message


def test_a_block_size_that_the_drafts_temperatures_do_not_fit_is_found_at_the_start(target, tmp_path, port):
    draft = tiny_draft(tmp_path, target)
    (draft / "sts.json").write_text(json.dumps({"temperatures": [1.0] * 7}))
    message = refused(target, "--speculative-draft-model-path", draft, "--port", port)
    assert "sts.json: `temperatures` holds 7 numbers and the draft's block_size is 4" in message


def test_a_draft_with_a_weight_that_is_no_number_is_refused_before_it_is_loaded(target, tmp_path, port):
    draft = tiny_draft(tmp_path, target)
    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, draft / "model.safetensors")
    assert "norm.weight holds numbers that are NaN" in refused(
        target, "--speculative-draft-model-path", draft, "--port", port
    )


@pytest.mark.parametrize("flag", ["--cost-model", "--calibration"])
def test_a_named_file_of_measured_numbers_that_is_none_is_refused(target, tmp_path, port, flag):
    draft = tiny_draft(tmp_path / "draft", target)
    (tmp_path / "measured.json").write_text('{"kind": 1}')
    message = refused(target, "--speculative-draft-model-path", draft, "--port", port, flag, tmp_path / "measured.json")
    assert message.startswith(flag) and "measured.json" in message
