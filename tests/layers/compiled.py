"""The Triton kernels as they would run on a device, compiled without one.

The dispatcher's own functions are called with tensors on the CPU, so the variants are those that they launch.
A pretended driver names the architecture, and the launch ends after the compilation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


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
    ptx: str
    fuses: bool

    def short_products(self) -> list[str]:
        """Products of two variables in 32 bits, such as a row times a stride: large tensors overflow them."""
        found = re.findall(r"arith\.muli %(\w+), %(\w+)[^:]*: (?:tensor<[\dx]*x)?i32", self.ir)
        return [f"{a} * {b}" for a, b in found if not a.startswith("c") and not b.startswith("c")]


@contextmanager
def pretended_driver(capability: int, launched: list[Any]) -> Iterator[None]:
    """Launches compile for this compute capability, such as 80, and are listed: name and compiled kernel."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool = False, **options: Any) -> None:
        launched.append((self.__name__, run(self, *args, warmup=True, **options)))

    before = dict(vars(driver))  # its own reset asks for a device
    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
        vars(driver).update(before)


def compile_launches(capability: int, launch: Callable[[], object]) -> list[Compiled]:
    """Compile what ``launch`` launches for this compute capability, such as 80."""
    launched: list[Any] = []
    with pretended_driver(capability, launched):
        launch()
    return [
        Compiled(name, kernel.asm["ttir"], kernel.asm["ptx"], kernel.metadata.enable_fp_fusion)
        for name, kernel in launched
    ]
