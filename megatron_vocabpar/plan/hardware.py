"""GPUs: the figures of their data sheets, and the shares of them that training reaches.

Next: ``stage_memory.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from megatron_vocabpar.names import nearest


@dataclass(frozen=True)
class Rates:
    """Shares of a data sheet's peak that layers reach, by ``data/rates.json``.

    Attributes:
        layers, output: products in layers, and the output layer, in bfloat16.
        busy: the share of the iteration in which the GPUs ran passes where layers reached this; see
            ``price.py``.
        fp8_layers, fp4_layers: layers' products in 8 bits and in 4, of experts in 4 bits as in 8.
        experts, fp8_experts: experts' products, in bfloat16 and in 8 bits.
        attention: scores and their use with heads of 128 or wider, over the operations without a mask, of
            which kernels leave out half; in bfloat16. Narrower heads take as long: exponentials limit them.
        scans: what stands in place of attention, in bfloat16.
        traffic: how often norms, activation functions, casts and the like move what a layer keeps, at
            the memory's bandwidth, in F, and as often in B. It is what makes narrow experts slow.
        moved, moved_flex: how often sorting and gathering move an expert's tokens, [tokens, H] in 16 bits,
            at the memory's bandwidth, in F, and as often in B. The dispatcher ``flex`` sorts within its
            exchange, ``alltoall`` before and after it.
        launch_ms: the least ms of a layer with experts, F and B with W, as the host starts its kernels.
        sources: the source of each share.
    """

    layers: float
    busy: float
    output: float
    fp8_layers: float
    fp4_layers: float
    experts: float
    fp8_experts: float
    attention: float
    scans: float
    traffic: float
    moved: float
    moved_flex: float
    launch_ms: float
    sources: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Hardware:
    """One GPU and what connects it.

    Attributes:
        name: the GPU's name.
        rates: the shares of its peaks that training reaches.
        tflops, fp8_tflops, fp4_tflops: the peaks of dense products in bfloat16, in 8 bits and in 4, 10^12
            operations a second; 0: it has none.
        memory_gib: the device's memory, as PyTorch sees it.
        memory_gb_s: the memory's bandwidth, 10^9 bytes a second.
        link_gb_s: one direction of NVLink or its like, 10^9 bytes a second.
        network_gb_s: a GPU's share of its node's network, one direction, 10^9 bytes a second.
        host_gb_s: one direction between the device and the host, 10^9 bytes a second.
        per_node, per_host: the GPUs that the link connects, and the GPUs of one host.
        multiprocessors: of the GPU; AMD's compute units.
        transfer_share: of the link's rate, what transfers between stages reach.
        flex_backend: the backend of Megatron's dispatcher ``flex`` on this GPU; empty without one.
        userbuffers: Transformer Engine overlaps tensor parallelism with products (``--tp-comm-overlap``),
            which it does over NVLink.
        sources: the source of each number.
    """

    name: str
    rates: Rates
    tflops: float
    fp8_tflops: float
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float
    network_gb_s: float
    host_gb_s: float
    multiprocessors: int
    transfer_share: float = 36.4 / 300
    per_node: int = 8
    per_host: int = 8
    fp4_tflops: float = 0.0
    flex_backend: str = ""
    userbuffers: bool = False
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    def connected(self, **figures: float | None) -> Hardware:
        """This GPU with another interconnect: the figures that are not None replace its own."""
        changed = {name: value for name, value in figures.items() if value is not None}
        return replace(self, **changed, sources=self.sources | dict.fromkeys(changed, "as given"))  # type: ignore[arg-type]


def hardware_named(name: str) -> Hardware:
    """The preset with this name, in any case."""
    presets = hardware_presets()
    if name.upper() not in presets:
        raise ValueError(
            f"unknown hardware {name!r}; choose one of {', '.join(presets)}{nearest(name, presets)}"
        )
    return presets[name.upper()]


_USUAL = {
    "transfer_share": "NVLink: 12.6 MB in 0.35 ms, the artifact's passes on A100",
    "fp4_tflops": "none that Megatron trains with",
    "flex_backend": "none that Megatron core 0.19 has for this GPU",
    "userbuffers": "none without NVLink, and not tried on AMD's",
}


@cache
def hardware_presets() -> dict[str, Hardware]:
    """Every preset by name, from ``data/hardware.json``."""
    rates = {
        name: Rates(
            **{key: share["value"] for key, share in entry.items()},
            sources={key: share["source"] for key, share in entry.items()},
        )
        for name, entry in _data("rates").items()
    }
    return {
        name: Hardware(name, rates[entry["rates"]], **entry["figures"], sources=_USUAL | entry["sources"])
        for name, entry in _data("hardware").items()
    }


def _data(name: str) -> dict[str, Any]:
    return json.loads((resources.files(__package__) / "data" / f"{name}.json").read_text("utf-8"))
