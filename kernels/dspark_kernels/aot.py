"""Every Triton kernel of the package with the types it is launched with, and a compiler for them that needs no GPU.

`python -m dspark_kernels.aot 90` compiles all of them to cubins for sm_90. A kernel that is missing here is an error
of the test that walks the package.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import (
    accept_triton,
    gumbel_triton,
    mixed_triton,
    ragged_triton,
    random_triton,
    rows_triton,
    sampling_triton,
    windows_triton,
)

POINTERS = {
    "f32": "*fp32", "f64": "*fp64", "bf16": "*bf16", "i32": "*i32", "i64": "*i64", "u8": "*u8",
    "int": "i32", "long": "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """One specialisation: argument types as words of POINTERS in order, then the compile-time constants."""

    kernel: Any
    types: str
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def signature(self) -> dict[str, str]:
        """Argument name -> type, constants last; raises ValueError if they do not match the kernel's parameters."""
        names = [name for name in self.kernel.arg_names if name not in self.constants]
        types = self.types.split()
        if len(names) != len(types):
            raise ValueError(f"{self.name} takes {names}, the catalogue lists {types}")
        listed = {name: POINTERS[word] for name, word in zip(names, types, strict=True)}
        return {name: listed.get(name, "constexpr") for name in self.kernel.arg_names}


LAW = "f32 f32 i64 f32 f32 u8 i64 i64 i32 int int int"  # after the logits
ROW = "i32 i64 i64 i64 i64 i64 i32 i64 f32 int int int int"  # after logits and p
JUDGED = "i64 i64 i32 i64 i32 i64 f32"  # tokens, columns, rule, windows, indptr, own, scaled
BUILDS = (
    Build(sampling_triton.law_kernel, f"f32 {LAW}", {"BLOCK": 4096}, 8),
    Build(sampling_triton.law_kernel, f"bf16 {LAW}", {"BLOCK": 4096}, 8),
    Build(sampling_triton.argmax_kernel, "bf16 i64 int int", {"BLOCK": 4096}, 8),
    Build(sampling_triton.draw_kernel, "f32 f64 i64 int int", {"BLOCK": 4096}, 8),
    Build(random_triton.coins_kernel, "i64 i64 f64 f64 f64 int", {"BLOCK": 8}),
    Build(gumbel_triton.race_kernel, "f32 i64 i64 i64 i64 int int", {"HAS_IDS": True, "BLOCK": 1024}, 8),
    Build(gumbel_triton.race_kernel, "f32 f32 i64 i64 i64 int int", {"HAS_IDS": False, "BLOCK": 1024}, 8),
    Build(
        mixed_triton.mixed_kernel,
        "f32 f32 i64 i32 f64 i64 i64 i64 int int int int int",
        {"HAS_IDS": True, "BLOCK": 4096, "RACE_BLOCK": 1024},
        8,
    ),
    Build(
        mixed_triton.mixed_kernel,
        "bf16 f32 i64 i32 f64 i64 i64 i64 int int int int int",
        {"HAS_IDS": False, "BLOCK": 4096, "RACE_BLOCK": 1024},
        8,
    ),
    Build(windows_triton.windows_kernel, "f32 i64 i64 i64 i32 int int int int", {"R2": 256, "G2": 8}, 8),
    Build(windows_triton.windows_kernel, "f32 i64 i64 i64 i32 int int int int", {"R2": 1024, "G2": 16}, 8),
    Build(
        ragged_triton.pack_kernel,
        "i64 i64 i64 i64 i64 i64 i64 i64 i64 i64 i32 int int int int int int",
        {"HAS_SLOTS": True, "R2": 256, "K2": 8, "BLOCK": 256},
    ),
    Build(
        rows_triton.row_kernel,
        f"bf16 f32 {ROW}",
        {"HAS_P": True, "ARGMAX_BLOCK": 4096, "RACE_BLOCK": 1024},
        8,
    ),
    Build(
        rows_triton.overlap_kernel,
        "f32 f32 i64 f32 i64 i32 i64 i64 i64 i32 i32 f32 f32 int int int int",
        {"HAS_SUPPORT": True, "BLOCK": 1024},
    ),
    Build(
        accept_triton.judge_kernel,
        f"f32 f32 {JUDGED} f64 i64 i64 f32 i64 f32 int int int",
        {"HAS_Q": True, "K2": 8},
    ),
    Build(
        accept_triton.judge_kernel,
        f"f32 f32 {JUDGED} f32 i64 i64 f32 i64 f32 int int int",
        {"HAS_Q": False, "K2": 8},
    ),
    Build(
        accept_triton.final_kernel,
        "f32 f32 i64 i64 f32 f64 i64 i64 int int int int int",
        {"BY_ROW": False, "HAS_SUPPORT": True, "BLOCK": 1024},
        8,
    ),
)


@dataclass(frozen=True)
class Compiled:
    """A cubin and what one program of it takes: shared memory in bytes, registers and spilled bytes per thread."""

    cubin: bytes
    shared: int
    registers: int
    spilled: int


def compile_build(build: Build, capability: int) -> Compiled:
    """One build for sm_<capability>. Needs triton (its wheel carries the assembler), no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=build.kernel, signature=build.signature(), constexprs=build.constants)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": build.num_warps})
    registers, spilled = resource_usage(compiled.asm["cubin"])
    return Compiled(compiled.asm["cubin"], compiled.metadata.shared, registers, spilled)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes per thread, as the tool that triton's wheel carries reads them off a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", listing))
    return int(used["REG"]), int(used["STACK"]) + int(used["LOCAL"])


def main() -> None:
    for capability in [int(word) for word in sys.argv[1:]] or [80, 90, 100]:
        for build in BUILDS:
            made = compile_build(build, capability)
            print(
                f"sm_{capability} {build.name:16} {len(made.cubin):7d} bytes, shared {made.shared:6d} bytes, "
                f"{made.registers:3d} registers of {32 * build.num_warps} threads, spilled {made.spilled} bytes"
            )


if __name__ == "__main__":
    main()
