"""What can be known before a model is loaded: flags, paths, the port, memory. Each fault is one line that says the fix.

Loading takes half a minute; a mistake should not. Nothing here starts a process or holds a port.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_dspark.commands.draft_files import check_draft, check_measured_files
from sglang_dspark.commands.flag_limits import check_config_file, check_flags
from sglang_dspark.engine.unsupported import check_start
from sglang_dspark.errors import UserError
from sglang_dspark.settings.config import DSparkConfig
from sglang_dspark.settings.flags import ALGORITHM, add_flags, config_of_namespace, speculates

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_TOOL_CALL_PARSER = "qwen25"  # ChatML's: <tool_call> with a JSON object
# A server without its model: four Python processes with torch, most pages shared (measured 2026-11-29: README).
BASE_BYTES = 5 << 29
# KV that a useful server has at least: one request of this many tokens.
LEAST_KV_TOKENS = 4096
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_BYTES = {"float32": 4, "float": 4}


class PreflightError(UserError):
    """Something that would fail later, found before anything was loaded; the message says what to do."""


@dataclass(frozen=True)
class StartPlan:
    """A checked start: the arguments for SGLang's parser, and what they mean."""

    argv: tuple[str, ...]
    args: argparse.Namespace
    config: DSparkConfig


class OneLineParser(argparse.ArgumentParser):
    """SGLang's flags and ours; a wrong one is an error of one line instead of five hundred lines of usage."""

    def error(self, message: str):
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            wrong = (message.removeprefix(prefix).split() or ["''"])[0]
            close = difflib.get_close_matches(wrong.partition("=")[0], self._option_string_actions, n=1)
            hint = f"did you mean {close[0]}?" if close else "`sglang-dspark serve --help-all` lists every flag"
            raise PreflightError(f"unknown flag {wrong}: {hint}")
        raise PreflightError(" ".join(message.split()))


def make_parser() -> OneLineParser:
    """A parser of all of SGLang's server flags and ours, in which --model-path may be left out."""
    from sglang.srt.server_args import ServerArgs

    parser = OneLineParser(prog="sglang-dspark serve", usage="sglang-dspark serve [flags]")
    ServerArgs.add_cli_args(parser)
    add_flags(parser)
    for action in parser._actions:
        if action.dest == "model_path":
            action.required = False
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, its --config file merged in.

    Raises:
        PreflightError or ConfigError: an unknown flag, a value of the wrong kind, or a bad config file.
    """
    parser = make_parser()
    if "--config" in argv:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        check_config_file(argv)
        try:
            argv = ConfigArgumentMerger(parser).merge_config_with_args(list(argv))
        except (ValueError, OSError) as error:
            raise PreflightError(f"--config: {error}") from error
    return parser.parse_args(list(argv))


def plan_start(argv: Sequence[str]) -> StartPlan:
    """Check a command line and complete it: the demo pair where no model is given, our algorithm where none is.

    Args:
        argv: what stands after `sglang-dspark serve`.

    Raises:
        UserError: one line that says what to do.
    """
    # SGLang finds the file behind --config only where the two are two words.
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if argv and not argv[0].startswith("-"):
        argv.insert(0, "--model-path")
    args = parse(argv)
    if args.speculative_algorithm is None and args.dspark_verify_mode != "off":
        argv += ["--speculative-algorithm", ALGORITHM]
        args.speculative_algorithm = ALGORITHM
    config = config_of_namespace(args)
    check_flags(args)
    if args.speculative_algorithm is None or speculates(args):
        check_start(args)
    check_port(args.host, args.port)
    drafting = config.verify_mode != "off" and speculates(args)
    if args.model_path is None:
        argv += demo_arguments(args, drafting)
    elif drafting and args.speculative_draft_model_path is None:
        local_model(args.model_path, "--model-path", args.revision)  # the first mistake first
        raise PreflightError(
            f"{args.model_path} needs a draft: pass --speculative-draft-model-path FOLDER_OR_REPOSITORY, or --verify-mode "
            "off to serve it without one, or make a draft with `sglang-dspark train-draft`"
        )
    plan = StartPlan(tuple(argv), parse(argv), config)
    check_models(plan, drafting)
    return plan


def demo_arguments(args: argparse.Namespace, drafting: bool) -> list[str]:
    """The flags that serve the demo pair, which is fetched first where it is missing."""
    from sglang_dspark.demo.target import demo_draft_path, ensure_demo_target

    extra = [] if args.served_model_name else ["--served-model-name", DEMO_NAME]
    extra += [] if args.tool_call_parser else ["--tool-call-parser", DEMO_TOOL_CALL_PARSER]
    if drafting and args.speculative_draft_model_path is None:
        extra += ["--speculative-draft-model-path", str(demo_draft_path())]
    return [*extra, "--model-path", str(ensure_demo_target())]


def check_port(host: str, port: int) -> None:
    """Raise PreflightError where nobody could listen on `host`:`port` now."""
    if not 1 <= port <= 65535:
        raise PreflightError(f"--port {port}: a port is a number from 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no obstacle
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PreflightError(
                f"port {port} on {host} is in use: stop what listens there, or pass --port N"
            ) from error
        raise PreflightError(f"cannot listen on {host}:{port} ({error}): change --host or --port") from error


def check_models(plan: StartPlan, speculates: bool) -> None:
    """Check target and draft on disk, that they fit each other, and that memory holds them.

    Raises: PreflightError, DraftCheckpointError or ConfigError.
    """
    target = local_model(plan.args.model_path, "--model-path", plan.args.revision)
    if target is None:
        return
    shape = read_config(target, "--model-path")
    folders = [target]
    if speculates:
        from sglang_dspark.models.checkpoint import local_folder

        path = plan.args.speculative_draft_model_path
        if local_model(path, "--speculative-draft-model-path", None) is not None:
            read_config(Path(path), "--speculative-draft-model-path")
        folders.append(Path(local_folder(path)))
        check_draft(folders[-1], shape, target / "config.json")
        check_measured_files(plan.config)
    check_memory(plan.args, folders, shape)


def local_model(path: str, flag: str, revision: str | None) -> Path | None:
    """The local folder (or GGUF file) behind `path`; None where it is a repository or a remote URL to be fetched.

    Raises:
        PreflightError: neither a folder nor the name of a repository that can be reached.
    """
    if Path(path).exists():
        return Path(path) if Path(path).is_dir() else None
    if "://" in path:
        return None
    if not _REPOSITORY.fullmatch(path):
        raise PreflightError(f"{flag} {path}: no such folder, and not the name of a repository (owner/name)")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str) and (why := unreachable()):
        raise PreflightError(f"{flag} {path}: no such folder, and {why}")
    try:
        file = hf_hub_download(path, "config.json", revision=revision, etag_timeout=10)
    except Exception as error:  # many kinds: not found, gated, offline, no such file; each says so in its first line
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PreflightError(f"{flag} {path}: no such folder, and not fetched from Hugging Face ({reason})") from error
    return Path(file).parent if any(Path(file).parent.glob("*.safetensors")) else None


def unreachable() -> str | None:
    """Why Hugging Face cannot be asked, or None: its own client would retry for half a minute before saying so."""
    from huggingface_hub import constants

    host = urllib.parse.urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return None  # the client answers offline at once; a proxy resolves names for us
    try:
        socket.create_connection(
            (host.hostname, host.port or (443 if host.scheme == "https" else 80)), timeout=10
        ).close()
    except OSError as error:
        return f"{host.hostname} cannot be reached to fetch it ({error})"
    return None


def read_config(folder: Path, flag: str) -> dict:
    """A model folder's config.json; raises PreflightError where there is none or it names no architecture."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise PreflightError(f"{flag} {folder}: there is no config.json in it, so it is no model folder") from error
    except (ValueError, RecursionError) as error:
        raise PreflightError(f"{flag} {folder}: its config.json is not JSON ({error})") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise PreflightError(f"{flag} {folder}: its config.json names no `architectures`")
    if not isinstance(config.get("text_config", {}), dict):
        raise PreflightError(f"{flag} {folder}: `text_config` of its config.json is no object")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise PreflightError(f"{flag} {folder}: it has no weights ({', '.join(_WEIGHTS)})")
    check_weight_files(folder, flag)
    return config


def check_weight_files(folder: Path, flag: str) -> None:
    """Raise PreflightError for a safetensors file that is cut short or damaged (reads the headers only)."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise PreflightError(f"{flag} {folder}: {file.name} is damaged ({error}): fetch it again") from error


def check_memory(args: argparse.Namespace, folders: Sequence[Path], config: dict) -> None:
    """Raise PreflightError where a server on the CPU would not fit into the memory that is free now."""
    from sglang_dspark.cpu import accelerator_present, default_dtype

    if accelerator_present():
        return  # SGLang sizes its pools by the device's own free memory, and says so
    dtype = default_dtype() if args.dtype == "auto" else args.dtype
    needed = estimate_bytes(folders, config, _BYTES.get(dtype, 2), args.max_total_tokens or LEAST_KV_TOKENS)
    free = free_memory()
    if needed > free:
        raise PreflightError(
            f"too little memory: about {needed / 2**30:.1f} GiB are needed ({dtype} weights, KV for "
            f"{args.max_total_tokens or LEAST_KV_TOKENS} tokens, the server itself) and {free / 2**30:.1f} GiB are free: "
            "stop other programs, serve a smaller model, or lower --max-total-tokens"
        )


def estimate_bytes(folders: Sequence[Path], config: dict, item_bytes: int, kv_tokens: int) -> int:
    """Memory of a server, in bytes: weights in `item_bytes` each, KV of `kv_tokens`, and the processes."""
    weights = sum(file.stat().st_size for folder in folders for pattern in _WEIGHTS for file in folder.glob(pattern))
    text = config.get("text_config", config)
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads", 0)
    width = text.get("head_dim") or text.get("hidden_size", 0) // max(text.get("num_attention_heads", 1), 1)
    kv = 2 * text.get("num_hidden_layers", 0) * heads * width * item_bytes * kv_tokens
    stored = _BYTES.get(config.get("dtype") or config.get("torch_dtype"), 2)
    return weights * item_bytes // stored + kv + BASE_BYTES


def free_memory() -> int:
    """Bytes that this process may still use: the machine's, or its control group's where that is less."""
    import psutil

    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        free = free if limit == "max" else min(free, max(int(limit) - used, 0))
    except (OSError, ValueError):
        pass  # no control group of version 2: the machine's figure stands
    return free
