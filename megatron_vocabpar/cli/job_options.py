"""The options of ``vocabpar plan`` and ``vocabpar layout``, with their limits.

Sizes that are not given come from Megatron's arguments, see ``plan/read_arguments.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_vocabpar.cli.files import check_options
from megatron_vocabpar.option import option
from megatron_vocabpar.plan.hardware import hardware_presets
from megatron_vocabpar.plan.job import RECOMPUTE
from megatron_vocabpar.plan.read_config import model_presets

_MODELS, _GPUS = tuple(model_presets()), tuple(hardware_presets())


@dataclass(frozen=True)
class JobOptions:
    """The model, the GPUs, and how the model is spread over them."""

    preset: str | None = option(None, f"A model: {', '.join(_MODELS)}.", choices=_MODELS, metavar="NAME")
    config_file: str | None = option(None, "A Hugging Face config.json.", flag="--config", metavar="FILE")
    script: str | None = option(None, "A launch script: Megatron's arguments in its text.", metavar="FILE")
    run: bool = option(
        False, "Run the script: what starts a training only records its arguments, all else is run."
    )
    hardware: str = option("H100", f"One of {', '.join(_GPUS)}, in any case.", choices=_GPUS, metavar="NAME")
    tflops: float | None = option(None, "10^12 operations a second of dense products in 16 bits.", above=0)
    link_gb_s: float | None = option(None, "GB/s of a GPU's link within a node, one direction.", above=0)
    network_gb_s: float | None = option(None, "GB/s of a GPU's share of the network, one direction.", above=0)
    gpus_per_node: int | None = option(None, "GPUs that the link connects.", least=1)
    pp: int | None = option(None, "Pipeline size; by default the arguments', or 8.", least=1)
    tp: int | None = option(None, "Tensor parallel size; by default the arguments', or 1.", least=1)
    dp: int | None = option(
        None, "Data parallel size; by default what the script's processes leave, or 1.", least=1
    )
    cp: int | None = option(None, "Context parallel size; by default the arguments', or 1.", least=1)
    ep: int | None = option(None, "Expert parallel size; by default the arguments', or 1.", least=1)
    microbatches: int | None = option(None, "Of an iteration and replica; by default 128.", least=1)
    micro_batch_size: int | None = option(None, "Sequences of a microbatch.", least=1)
    global_batch_size: int | None = option(None, "Sequences of an iteration.", least=1)
    seq_length: int | None = option(None, "Tokens of a sequence.", least=1)
    mtp_depths: int | None = option(
        None, "Heads of multi-token prediction, whatever the model has.", least=0, most=64
    )
    gpus: int | None = option(None, "Search how to spread the model over so many; sizes given stay.", least=1)
    memory_gib: float | None = option(None, "What a GPU may hold; by default all that it has.", above=0)
    distributed_optimizer: bool = option(False, "Divide optimizer states over the replicas.")
    offload: bool = option(False, "Keep optimizer states on the host.")
    fp8: bool = option(False, "Products of layers in 8 bits.")
    fp4: bool = option(False, "Products of layers in 4 bits (NVFP4).")
    recompute: str | None = option(
        None,
        f"Recomputation of activations: {', '.join(RECOMPUTE)}; full where nothing follows.",
        choices=RECOMPUTE,
        alone="full",
    )


@dataclass(frozen=True)
class PlanOptions(JobOptions):
    """The options of ``vocabpar plan``."""

    costs_file: str | None = option(None, "Measured times of passes.", flag="--costs", metavar="FILE")
    sources: bool = option(False, "Also say where each number about the GPU is from.")


@dataclass(frozen=True)
class LayoutOptions(JobOptions):
    """The options of ``vocabpar layout``."""

    chunks: int | None = option(
        None, "Model chunks on each rank; by default the fastest number that fits.", least=1
    )
    given_layout: str | None = option(
        None, "Say how far this layout is from the best.", flag="--check", metavar="LAYOUT"
    )


def checked_options(record: type[JobOptions], options: dict[str, Any]) -> dict[str, Any]:
    """The parsed options with the hardware's name in capitals.

    Raises:
        ValueError: for the first value beyond the limits of ``record``; the message has a remedy.
    """
    options = {**options, "hardware": options["hardware"].upper()}
    check_options(record(**options))
    return options
