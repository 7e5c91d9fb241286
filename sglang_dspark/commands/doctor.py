"""`sglang-dspark doctor`: everything a server depends on, checked and shown in one table; status 1 where it would fail."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
LEAST_FREE_BYTES = 4 << 30
# Inputs and outputs of the demo target's products: attention's two, the MLP's two, the vocabulary's.
DEMO_PRODUCTS = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
VERSIONS = ("torch", "transformers", "triton", "numpy", "sglang-kernel")


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and whether a server would fail on it (`fix` then says what to do)."""

    item: str
    found: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return not self.fix


def doctor() -> None:
    """Check device, versions, SGLang's interface, plugins, demo files and cache; exits with 1 on a problem."""
    from rich.console import Console
    from rich.table import Table

    logging.disable(logging.WARNING)  # the table says it all; errors of SGLang's plugin loader stay visible
    warnings.simplefilter("ignore")
    table = Table("", "Item", "Found", title="sglang-dspark doctor", title_justify="left")
    findings = list(findings_of(CHECKS))
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]no[/]"
        table.add_row(mark, finding.item, finding.found + (f"\n[red]{finding.fix}[/]" if finding.fix else ""))
    Console().print(table)
    if problems := sum(not finding.ok for finding in findings):
        print(f"{problems} problem{'s' * (problems > 1)}")
        raise typer.Exit(1)
    print("no problems")


def findings_of(checks: tuple[Callable[[], Iterator[Finding]], ...]) -> Iterator[Finding]:
    """Run every check; one that raises becomes a problem of its own instead of hiding the others."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - whatever is broken is what the reader wants to see
            yield Finding(check.__name__.replace("_", " "), f"{type(error).__name__}: {error}", "see the message")


def machine() -> Iterator[Finding]:
    from sglang_dspark.commands.preflight import free_memory

    version = platform.python_version()
    too_old = tuple(map(int, version.split(".")[:2])) < (3, 11)
    yield Finding("Python", f"{version}, {platform.system()} {platform.machine()}", "use 3.11 or newer" * too_old)
    cores = len(os.sched_getaffinity(0))
    yield Finding("processor", f"{cores} cores, {' '.join(cpu_features()) or 'no vector features known'}")
    free = free_memory()
    short = f"a small model needs about {LEAST_FREE_BYTES >> 30} GiB" * (free < LEAST_FREE_BYTES)
    yield Finding("memory", f"{free / 2**30:.1f} GiB free", short)


def cpu_features() -> list[str]:
    """The vector features of this processor that matter to us, from /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return []
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    present = set(next(lines, "").split())
    return [flag for flag in CPU_FLAGS if flag in present]


def device() -> Iterator[Finding]:
    import torch

    from sglang_dspark.cpu import accelerator_present, default_dtype

    if accelerator_present():
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "an accelerator that torch sees"
        yield Finding("device", f"{name} (our CPU platform stays out of the way)")
    else:
        yield Finding("device", f"CPU, dtype {default_dtype()}, {torch.get_num_threads()} threads")


def exactness() -> Iterator[Finding]:
    """Whether the demo target's texts can be equal to the bit in any batch on this processor."""
    from sglang_dspark.cpu import accelerator_present, default_dtype

    if accelerator_present():
        yield Finding("exact texts", "SGLang's kernels: see docs/compatibility.md, Equality")
        return
    import torch

    from sglang_dspark.cpu.row_counts import row_counts

    found = {shape: row_counts(*shape, getattr(torch, default_dtype())) for shape in DEMO_PRODUCTS}
    lost = [f"{i} to {o}" for (i, o), counts in found.items() if not counts.exact]
    if lost:
        yield Finding("exact texts", f"not on this machine: texts may depend on the batch (products {', '.join(lost)})")
        return
    padded = [f"{i} to {o} at {', '.join(map(str, c.padded))} rows" for (i, o), c in found.items() if c.padded]
    yield Finding("exact texts", f"yes, {default_dtype()}, padding {'; '.join(padded) or 'nothing'}")


def versions() -> Iterator[Finding]:
    from sglang_dspark import __version__
    from sglang_dspark.engine.compatibility import EXPECTED_VERSION, installed_version

    found = installed_version()
    fix = f"made for {EXPECTED_VERSION}: pip install sglang=={EXPECTED_VERSION}" * (found != EXPECTED_VERSION)
    yield Finding("SGLang", found, fix)
    others = ", ".join(f"{name} {_version(name)}" for name in VERSIONS)
    yield Finding("versions", f"sglang-dspark {__version__}, {others}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def interface() -> Iterator[Finding]:
    """Every row of the compatibility table."""
    from sglang_dspark.engine.compatibility import EXPECTED_VERSION, check
    from sglang_dspark.engine.compatibility_table import TABLE

    problems = check()
    yield Finding(
        "SGLang's interface",
        f"{len(TABLE) - len(problems)} of {len(TABLE)} names as expected",
        f"pip install sglang=={EXPECTED_VERSION}" * bool(problems),
    )
    for problem in problems:
        yield Finding("mismatch", problem, "the file named would break")


def plugins() -> Iterator[Finding]:
    """Whether SGLang really took our platform, our flags and our algorithm."""
    import argparse

    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dspark.cpu import accelerator_present
    from sglang_dspark.settings.flags import ALGORITHM, FLAGS

    load_plugins()
    ours = type(current_platform).__module__.startswith("sglang_dspark")
    wrong = not ours and not accelerator_present()
    yield Finding(
        "platform",
        type(current_platform).__name__,
        "SGLang did not take our CPU platform: SGLANG_PLATFORM or SGLANG_PLUGINS leaves it out" * wrong,
    )
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    missing = [flag.option for flag in FLAGS if flag.option not in parser._option_string_actions]
    yield Finding(
        "flags",
        f"{len(FLAGS) - len(missing)} of {len(FLAGS)} in SGLang's parser",
        "reinstall sglang-dspark (pip install -e .), see the errors above" * bool(missing),
    )
    try:
        SpeculativeAlgorithm.from_string(ALGORITHM)
        yield Finding("algorithm", f"{ALGORITHM} is registered")
    except ValueError:
        yield Finding("algorithm", f"{ALGORITHM} is unknown to SGLang", "reinstall sglang-dspark, see the errors above")


def demo() -> Iterator[Finding]:
    from sglang_dspark.demo.target import FOLDER, GGUF_SHA256, default_cache_dir, demo_draft_path, is_complete
    from sglang_dspark.models.checkpoint import check_draft_folder

    cache = default_cache_dir()
    nearest = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    unwritable = not os.access(nearest, os.W_OK)
    yield Finding("cache", f"{cache}, {free / 2**30:.0f} GiB free", f"{nearest} is not writable" * unwritable)
    if is_complete(cache / FOLDER):
        yield Finding("demo target", f"{FOLDER}, from GGUF sha256 {GGUF_SHA256[:12]}…, every file complete")
    else:
        yield Finding("demo target", "not fetched yet; `./run serve` fetches it (93 MB)")
    draft = demo_draft_path()
    config = check_draft_folder(draft)
    yield Finding("demo draft", f"{draft}, block size {config.block_size}, sha256 {digest(draft)[:12]}…")


def digest(folder: Path) -> str:
    """One SHA-256 over a folder's safetensors, in the order of their names."""
    import hashlib

    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as handle:
            total.update(hashlib.file_digest(handle, "sha256").digest())
    return total.hexdigest()


CHECKS = (machine, device, exactness, versions, interface, plugins, demo)
