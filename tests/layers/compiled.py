"""The Triton kernels as they would run on a device, compiled without one: their code, and what it needs.

The dispatcher's own functions are called with tensors on the CPU, so the variants are those that they launch.
A pretended driver names the architecture, and the launch ends after the compilation.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class _Driver:
    """What the compilation asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are remembered by device

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """One variant of a kernel for one architecture."""

    name: str
    ir: str
    cubin: bytes
    fuses: bool

    @cached_property
    def machine_code(self) -> str:
        return _tool(self.cubin, "nvdisasm")

    @cached_property
    def resources(self) -> str:
        return _tool(self.cubin, "cuobjdump", "-res-usage")

    def count(self, instruction: str) -> int:
        """How often an instruction, such as LDG.E.128, stands in the machine code."""
        return len(re.findall(rf"\b{re.escape(instruction)}\b", self.machine_code))

    def loops(self) -> list[int]:
        """Of each loop, in their order, the fewest instructions that a turn of it takes.

        A branch forward, such as one around what only a row's last ids need, is taken if that is shorter.
        """
        lines = re.findall(r"^(\.L_x_\d+):|^\s+/\*[\da-f]{4,}\*/\s+([^;]+);", self.machine_code, re.MULTILINE)
        starts = {label: at for at, (label, _) in enumerate(lines) if label}
        jumps = {
            at: starts[found[1]] for at, (_, code) in enumerate(lines) if (found := _BRANCH.search(code))
        }
        return [
            _fewest(lines, jumps, first, last)
            for last, first in sorted(jumps.items(), key=lambda jump: jump[1])
            if first < last
        ]

    def resource(self, name: str) -> int:
        """REG, STACK, LOCAL or SHARED, per thread or block, as the assembler counted them."""
        return int(re.findall(rf"\b{name}:(\d+)", self.resources)[0])

    def short_products(self) -> list[str]:
        """Products of two variables in 32 bits, such as a row times a stride: large tensors overflow them."""
        found = re.findall(r"arith\.muli %(\w+), %(\w+)[^:]*: (?:tensor<[\dx]*x)?i32", self.ir)
        return [f"{a} * {b}" for a, b in found if not a.startswith("c") and not b.startswith("c")]


_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")


def _fewest(lines: list[tuple[str, str]], jumps: dict[int, int], first: int, last: int) -> int:
    """The fewest instructions from one line to a later one, both with their own."""
    counts = dict.fromkeys(range(first, last + 2), len(lines))
    counts[first] = 0
    for at in range(first, last + 1):
        through = counts[at] + bool(lines[at][1])
        target = jumps.get(at)
        if target is not None and at < target <= last:
            counts[target] = min(counts[target], through)
        if target is None or "@" in lines[at][1] or at == last:
            counts[at + 1] = min(counts[at + 1], through)
    return counts[last + 1]


def _tool(cubin: bytes, name: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@contextmanager
def _pretended_driver(capability: int, launched: list[Any]) -> Iterator[None]:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool = False, **options: Any) -> None:
        launched.append((self.__name__, run(self, *args, warmup=True, **options)))

    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
        with suppress(RuntimeError):  # where there is no device to go back to
            driver.reset_active()


def compile_launches(capability: int, launch: Callable[[], object]) -> list[Compiled]:
    """Compile what ``launch`` launches for this compute capability, such as 80."""
    launched: list[Any] = []
    with _pretended_driver(capability, launched):
        launch()
    return [
        Compiled(name, kernel.asm["ttir"], kernel.asm["cubin"], kernel.metadata.enable_fp_fusion)
        for name, kernel in launched
    ]
