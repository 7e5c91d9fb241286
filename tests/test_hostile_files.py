"""Whatever stands in a file that we read, it is served or refused in one line by an error of ours, never by another exception.

Bug class: a value of the wrong type that passes the reader and ends a server half a minute later, or the reader itself
ending in a TypeError. Every key of every kind of file is replaced by every kind of wrong value; what is accepted must
then do what the program does with it next. A mutation that fails is named by the key and its value.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import yaml

from dspark_scheduler import (
    AdditiveCostModel,
    Fingerprint,
    OnlineCalibrator,
    OnlineCostModel,
    SequentialTemperatureScaling,
)
from sglang_dspark.commands import preflight
from sglang_dspark.commands.flag_limits import check_flags
from sglang_dspark.learning.confidence import draft_temperatures
from sglang_dspark.models.checkpoint import check_draft_folder, read_draft_config
from sglang_dspark.models.draft_config import DraftConfig
from sglang_dspark.models.engine_keys import check_engine_keys
from sglang_dspark.prompts.prompts import load_prompts
from sglang_dspark.settings.config import DSparkConfig
from sglang_dspark.settings.flags import config_of_namespace
from tests.engine.tiny import tiny_target
from tests.engine.tiny_draft import tiny_draft
from tests.hostile import as_json, bad_bytes, mutations

MINE = Fingerprint("t", "d", 4, "cpu", "bfloat16", 1, "sglang 0.5.23")
OURS = ("sglang_dspark", "dspark_scheduler")


def served_or_one_line(cases: Iterable[tuple[str, object]], serve: Callable[[object], object]) -> int:
    """Serve every case; returns how many were refused. Fails with the list of those that ended otherwise."""
    faults, refused = [], 0
    for name, case in cases:
        try:
            serve(case)
        except Exception as error:  # noqa: BLE001 (any that is not ours is what this test is for)
            ours = type(error) is ValueError or type(error).__module__.split(".")[0] in OURS
            if not (ours and isinstance(error, ValueError)) or "\n" in str(error).replace("two\nlines", ""):
                faults.append(f"{name}: {type(error).__name__}: {error}")
            refused += 1
        except SystemExit as end:
            faults.append(f"{name}: the process ends with status {end.code}")
    assert not faults, f"{len(faults)} ended otherwise:\n" + "\n".join(fault[:300] for fault in faults[:20])
    return refused


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    target = tiny_target(tmp_path_factory.mktemp("target"))
    return tiny_draft(tmp_path_factory.mktemp("draft"), target, draft_vocab_size=128)


def in_file(file: Path, read: Callable[[Path], object]) -> Callable[[object], object]:
    """A reader of `file`, into which each case is written first."""

    def serve(case):
        file.write_bytes(case if isinstance(case, bytes) else case.encode())
        return read(file)

    return serve


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_every_key_of_a_drafts_config(draft, nested):
    config = json.loads((draft / "config.json").read_text())
    if nested:
        config["dspark_config"] = {key: config.pop(key) for key in ("block_size", "target_layer_ids", "markov_rank")}

    def serve(case):
        config = DraftConfig.from_dict(case)
        check_engine_keys(case)
        assert all(type(size) is int for shape in config.expected_tensors().values() for size in shape)
        config.check_target(hidden_size=64, vocab_size=512, num_hidden_layers=4)

    assert served_or_one_line(mutations(config), serve) > 400


def test_the_bytes_of_a_drafts_config(draft, tmp_path):
    text = (draft / "config.json").read_bytes()
    assert served_or_one_line(bad_bytes(text, 1, 300), in_file(tmp_path / "config.json", lambda f: read_draft_config(f.parent))) > 100  # fmt: skip


def test_every_key_of_a_safetensors_header(draft, tmp_path):
    body = (draft / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", body[:8])
    header, data = json.loads(body[8 : 8 + length]), body[8 + length :]
    wanted = ("draft_token_ids", "fc.weight", "confidence_head.proj.bias")
    rest = {name: entry for name, entry in header.items() if name not in wanted}
    (tmp_path / "config.json").write_text((draft / "config.json").read_text())

    def file_of(head: object) -> bytes:
        text = json.dumps(head | rest if isinstance(head, dict) else head).encode()
        return struct.pack("<Q", len(text)) + text + data

    cases = ((name, file_of(head)) for name, head in mutations({name: header[name] for name in wanted}))
    serve = in_file(tmp_path / "model.safetensors", lambda file: check_draft_folder(file.parent))
    assert served_or_one_line(cases, serve) > 300
    assert served_or_one_line(bad_bytes(body[: 8 + length], 2, 300), serve) > 250


def test_every_key_of_a_drafts_temperatures(tmp_path):
    body = {"temperatures": [0.9, 1.0, 1.1, 1.2], "hidden_temperatures": [1.0] * 4, "fitted_at_temperature": 1.0}

    def read(file: Path) -> None:
        for head in ("main", "hidden"):
            temperatures = draft_temperatures(file, head, 4)
            assert temperatures.shape == (4,) and (temperatures > 0).all() and np.isfinite(temperatures).all()

    serve = in_file(tmp_path / "sts.json", read)
    assert served_or_one_line(((name, as_json(case)) for name, case in mutations(body)), serve) > 80
    assert served_or_one_line(bad_bytes(as_json(body).encode(), 3, 200), serve) > 50


def write_cost(file: Path) -> None:
    tables = ([1, 8], [0.0, 0.002]), ([1, 64], [0.01, 0.05])
    AdditiveCostModel(
        0.01, *tables, (8, 16), 1e-7, head=([1, 32], [1e-3, 4e-3]), block=([4, 64], [0.004, 0.02]), whole=4
    ).save(file, MINE)


def read_cost(file: Path) -> None:
    cost = OnlineCostModel(AdditiveCostModel.load(file, None))
    assert np.isfinite(cost.step_seconds(3, np.arange(1, 9))).all() and np.isfinite(cost.draft_seconds(3, 6, 2))


def read_scaling(file: Path) -> None:
    assert np.isfinite(np.asarray(SequentialTemperatureScaling.load(file, None).temperatures, np.float64)).all()


def read_learned(file: Path) -> None:
    calibrator = OnlineCalibrator(4)
    calibrator.restore(file, MINE)
    assert np.isfinite(calibrator.apply(np.zeros((2, 4)))).all()


def write_learned(file: Path) -> None:
    OnlineCalibrator(4).save(file, MINE)


MEASURED = {
    "cost": (write_cost, read_cost),
    "calibration": (
        lambda file: SequentialTemperatureScaling((1.0, 0.9, 1.1, 1.2), (0.1,), (0.05,), (9,)).save(file, MINE),
        read_scaling,
    ),
    "online calibration": (write_learned, read_learned),
}


@pytest.mark.parametrize("kind", MEASURED)
def test_every_key_of_a_file_of_measured_numbers(tmp_path, kind):
    write, read = MEASURED[kind]
    write(tmp_path / "measured.json")
    text = (tmp_path / "measured.json").read_bytes()
    read(tmp_path / "measured.json")
    serve = in_file(tmp_path / "measured.json", read)
    assert served_or_one_line(((name, as_json(case)) for name, case in mutations(json.loads(text))), serve) > 250
    assert served_or_one_line(bad_bytes(text, 4, 200), serve) > 50


def test_every_setting():
    settings = DSparkConfig(max_window=3, window_policy="causal", max_step_ms=20.0, record="/tmp/record").to_dict()

    def serve(case):
        config = DSparkConfig.from_dict(case)
        config.check_files()
        json.dumps(config.to_dict())

    assert served_or_one_line(mutations(settings), serve) > 250


def test_every_key_of_a_prompts_file(tmp_path):
    line = {"class": "chat", "messages": [{"role": "user", "content": "Hello"}], "temperature": 1.0}

    def read(file: Path) -> None:
        for prompt in load_prompts(file):
            assert all(isinstance(text, str) for message in prompt.messages for text in message) and prompt.held_out in (0, 1)  # fmt: skip

    serve = in_file(tmp_path / "prompts.jsonl", read)
    assert served_or_one_line(((name, as_json(case)) for name, case in mutations(line)), serve) > 150
    assert served_or_one_line(bad_bytes(as_json(line).encode(), 5, 200), serve) > 50


@pytest.fixture
def one_parser(monkeypatch):
    """Building SGLang's parser takes longer than reading a file with it a hundred times."""
    parser = preflight.make_parser()
    monkeypatch.setattr(preflight, "make_parser", lambda: parser)


def test_every_key_of_a_yaml_file_of_flags(tmp_path, one_parser):
    flags = {
        "model-path": "m", "port": 30000, "context-length": 512, "tp-size": 1, "mem-fraction-static": 0.5,
        "chunked-prefill-size": 128, "max-running-requests": 4, "max-total-tokens": 4096, "page-size": 1,
        "verify-mode": "compact", "max-window": 3, "max-step-ms": 20.0, "skip-tokenizer-init": True, "load-format": "auto",
        "speculative-algorithm": "DSPARK_LOAD_AWARE", "json-model-override-args": "{}",
    }  # fmt: skip

    def read(file: Path) -> None:
        args = preflight.parse(["--config", str(file)])
        config_of_namespace(args)
        check_flags(args)

    serve = in_file(tmp_path / "flags.yaml", read)
    serve(yaml.safe_dump(flags))
    assert served_or_one_line(((name, yaml.safe_dump(case)) for name, case in mutations(flags)), serve) > 150
    assert served_or_one_line(bad_bytes(yaml.safe_dump(flags).encode(), 6, 200), serve) > 20
