"""GPUs: what a data sheet says, and which part of it training reaches.

Next: ``times.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Hardware:
    """One GPU and what connects it.

    Attributes:
        name, source: the GPU, and where its numbers are from.
        tflops: peak of dense products in bfloat16, 10^12 operations a second.
        memory_gib: of the device, as PyTorch sees it.
        memory_gb_s: bandwidth of the memory, 10^9 bytes a second.
        link_gb_s: one direction of NVLink, 10^9 bytes a second.
        network_gb_s: a GPU's share of its node's network, one direction, 10^9 bytes a second.
        per_node: GPUs of a node, which NVLink connects.
    """

    name: str
    source: str
    tflops: float
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    per_node: int = 8


def hardware_named(name: str) -> Hardware:
    """The preset with this name, in any case."""
    known = hardware_presets()
    if name.upper() not in known:
        raise ValueError(f"unknown hardware {name!r}; choose one of {', '.join(known)}")
    return known[name.upper()]


def hardware_presets() -> dict[str, Hardware]:
    """Every preset by name, from ``data/hardware.json``."""
    file = resources.files(__package__) / "data" / "hardware.json"
    return {name: Hardware(name, **entry) for name, entry in json.loads(file.read_text("utf-8")).items()}
