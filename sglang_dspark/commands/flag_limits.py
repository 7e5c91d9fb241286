"""Values that SGLang's parser takes and its scheduler does not survive: flags out of their range, a broken --config file.

SGLang finds these half a minute after the start, in a traceback of one of its processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.settings.config import ConfigError


@dataclass(frozen=True)
class Limit:
    """`right` says whether a given value can be served; `expected` is what would be."""

    flag: str
    right: Callable[[Any], bool]
    expected: str


def _at_least_one(value: int) -> bool:
    return value >= 1


LIMITS = {
    "context_length": Limit("--context-length", _at_least_one, "at least 1 token, or leave it out: the model's own"),
    "page_size": Limit("--page-size", _at_least_one, "at least 1 token, or leave it out"),
    "max_total_tokens": Limit("--max-total-tokens", _at_least_one, "at least 1 token, or leave it out"),
    "max_running_requests": Limit("--max-running-requests", _at_least_one, "at least 1 request, or leave it out"),
    "max_prefill_tokens": Limit("--max-prefill-tokens", _at_least_one, "at least 1 token, or leave it out"),
    "chunked_prefill_size": Limit(
        "--chunked-prefill-size", lambda v: v == -1 or v >= 1, "at least 1 token, or -1 for prompts in one piece"
    ),
    "mem_fraction_static": Limit("--mem-fraction-static", lambda v: 0 < v < 1, "a share of memory between 0 and 1"),
    "tp_size": Limit("--tp-size", _at_least_one, "at least 1"),
    "dp_size": Limit("--dp-size", _at_least_one, "at least 1"),
    "pp_size": Limit("--pp-size", _at_least_one, "at least 1"),
    "ep_size": Limit("--ep-size", _at_least_one, "at least 1"),
}


def check_flags(args: argparse.Namespace) -> None:
    """Refuse a value that no server could run with, and on a plain CPU what that platform cannot do.

    Raises:
        ConfigError: naming the flag, its value and what would be right.
    """
    for name, limit in LIMITS.items():
        value = getattr(args, name)
        if value is not None and not limit.right(value):
            raise ConfigError(f"{limit.flag} {value}: it must be {limit.expected}")
    _check_platform(args)


def _check_platform(args: argparse.Namespace) -> None:
    import torch

    from sglang_dspark import cpu
    from sglang_dspark.cpu.refusals import CpuPlatformError, refuse_arguments

    if cpu.activate() is not None:
        try:
            # Another algorithm is not ours to judge here: SGLang itself asks the platform for it.
            refuse_arguments(vars(args) | {"speculative_algorithm": None})
        except CpuPlatformError as error:
            raise ConfigError(str(error)) from error
    elif args.device is not None and args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {args.device}: torch sees no CUDA device here; drop the flag")


def check_config_file(argv: Sequence[str]) -> None:
    """Check the YAML file behind --config as far as SGLang's own reader would end in a traceback.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping of flags to values; the line is named where there is one.
    """
    import yaml

    file = Path(argv[argv.index("--config") + 1]) if argv[-1] != "--config" else None
    if file is None:
        raise ConfigError("--config: name the YAML file with the flags")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"--config {file}{line}: it is not YAML ({error.problem})") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: it cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {file}: it must be a mapping of flags to values, not a {type(content).__name__}")
    for key, value in (content or {}).items():
        if not isinstance(key, str) or key in ("help", "config"):
            raise ConfigError(f"--config {file}: the key {key!r} is no flag of a server")
        if value is None:
            raise ConfigError(f"--config {file}: {key} has no value: give one, or leave the key out")
