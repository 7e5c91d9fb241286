"""The Triton kernels without a GPU: equal to the torch path under Triton's interpreter, and compiled to cubins.

Separates a kernel that computes something else from one that only the interpreter accepts. The interpreter runs in one
child process (it must be chosen before triton is imported), on 315 random shapes, or
1260 with --long; see `dspark_kernels.selfcheck`. What neither sees: races between threads of a block, which
`benchmarks/gpu_check.py` runs for on a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dspark_kernels
from dspark_kernels.backend import HAS_TRITON
from dspark_kernels.selfcheck import CHECKS

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed on this machine")


HALF, DOUBLE = 0.5, 2.0  # of the shapes that the catalogue of checks names


def interpreted(scale: float) -> dict:
    """What the child found: {check: {cases, error}}."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "dspark_kernels.selfcheck", "--device", "cpu", "--json"]
    child = subprocess.run(
        [*command, "--scale", str(scale)], env=environment, check=False, capture_output=True, text=True, timeout=800
    )
    assert child.stdout, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def check(found: dict, name: str, scale: float) -> None:
    assert found[name]["error"] is None, found[name]["error"]
    assert found[name]["cases"] == max(1, int(CHECKS[name][1] * scale))


@pytest.fixture(scope="module")
def half() -> dict:
    return interpreted(HALF)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_kernel_equals_the_torch_path_on_every_random_shape(half, name):
    check(half, name, HALF)


@pytest.mark.long
def test_every_kernel_equals_the_torch_path_on_many_more_shapes():
    found = interpreted(DOUBLE)
    for name in CHECKS:
        check(found, name, DOUBLE)


def kernels_of_the_package() -> set[str]:
    """Every launched Triton function: its name ends in `_kernel`."""
    names = set()
    for module in pkgutil.iter_modules(dspark_kernels.__path__):
        for name, value in vars(importlib.import_module(f"dspark_kernels.{module.name}")).items():
            if name.endswith("_kernel") and hasattr(value, "arg_names"):
                names.add(name)
    return names


def test_the_catalogue_lists_every_kernel():
    from dspark_kernels.aot import BUILDS

    assert kernels_of_the_package() == {build.name for build in BUILDS} and len(BUILDS) >= 10


# Ampere and Blackwell with --long: a build of all kernels costs ten seconds and more.
@pytest.mark.parametrize(
    "capability", [pytest.param(c, marks=pytest.mark.long if c != 90 else ()) for c in (80, 90, 100)]
)
def test_every_kernel_compiles_ahead_of_time_and_fits(capability, tmp_path):
    """In a child, with an empty cache, so that nothing compiled before (or under the interpreter) stands in for it.

    A program fits if it spills nothing, if its threads' registers are within a multiprocessor's 65 536, and if its shared
    memory is within the 48 KiB that every GPU gives without asking.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "dspark_kernels.aot", str(capability)]
    child = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    from dspark_kernels.aot import BUILDS

    listed = re.findall(
        r"^sm_\d+ (\w+) +(\d+) bytes, shared +(\d+) bytes, +(\d+) registers of (\d+) threads, spilled (\d+)",
        child.stdout, re.MULTILINE,
    )  # fmt: skip
    assert len(listed) == len(BUILDS), child.stdout
    for name, *numbers in listed:
        size, shared, registers, threads, spilled = map(int, numbers)
        assert size > 1000 and spilled == 0 and shared <= 48 << 10 and registers * threads <= 1 << 16, (name, numbers)
    print(child.stdout)


def test_the_torch_path_imports_without_triton():
    """A CPU-only torch has none: everything but the Triton modules must import and serve."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, dspark_kernels as k\n"
        "assert not k.backend.HAS_TRITON\n"
        "print(k.probabilities(torch.zeros(1, 4), k.SamplingRows.of([1.0])).tolist(), 'dspark_kernels.aot' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    assert child.stdout.strip() == "[[0.25, 0.25, 0.25, 0.25]] False", child.stderr


@pytest.mark.long
def test_the_check_for_a_gpu_machine_runs_to_its_end_without_one():
    """A script that nobody can run here would be found broken on the machine that was lent for fifteen minutes."""
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
    child = subprocess.run([sys.executable, "-W", "ignore", str(script), "--device", "cpu", "--scale", "0.02"], check=False,
                           env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True,
                           text=True, timeout=800)  # fmt: skip
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
    assert "RaggedGraph" in child.stdout and "captured head" in child.stdout and "DIFFERS" not in child.stdout
