"""Checks the machine and its environment: GPUs, versions, and the variables on which overlap depends."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import torch

from megatron_vocabpar.doctor.environment import FUSED_ACCUMULATION, PACKAGES, environment
from megatron_vocabpar.doctor.result import Finding
from megatron_vocabpar.layers.kernels.dispatch import why_not_triton

_PREFIXES = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA", "NVTE_", "TRITON_")


def count_gpus() -> int:
    """GPUs that this process sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return count
    built_for = torch.version.cuda or torch.version.hip
    reason = why_no_gpu(torch.__version__, built_for, os.environ.get("CUDA_VISIBLE_DEVICES"))
    raise ValueError(f"--gpu: this machine shows no GPU: {reason}")


def why_no_gpu(torch_version: str, cuda: str | None, visible: str | None) -> str:
    """Why there is no GPU to check, and the remedy.

    Args:
        cuda: the version of CUDA or HIP that torch was built for; None for a build without.
        visible: ``CUDA_VISIBLE_DEVICES``, if it is set.
    """
    if cuda is None:
        return f"torch {torch_version} is built without CUDA; install a build of the same version with CUDA"
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU or names none; unset it"
    return (
        f"torch {torch_version} for CUDA {cuda} finds no GPU; run nvidia-smi: where it fails too, the driver "
        f"(or a container's access to it) is missing, else the driver is older than CUDA {cuda} needs"
    )


def variables(environment: Mapping[str, str] = os.environ) -> Finding:
    """Variables that are set and matter; failed where one takes every overlap away."""
    values = {name: value for name, value in sorted(environment.items()) if name.startswith(_PREFIXES)}
    figure = ", ".join(f"{name}={value}" for name, value in values.items()) or "none is set"
    if values.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        reason = "CUDA_LAUNCH_BLOCKING makes the host wait for every kernel; unset it"
        return Finding("failed", figure, reason)
    if values.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        figure += (
            "; with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue: 8, unless Megatron asks for 1"
        )
    return Finding("ok", figure)


def gpus(device: str) -> Finding:
    """Names, compute capabilities and memory of the GPUs."""
    if device == "cpu":
        return Finding("not run", reason="the device is a CPU")
    every = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    kinds = Counter(
        f"{each.name}, compute capability {each.major}.{each.minor}, {each.total_memory / 2**30:.0f} GiB"
        for each in every
    )
    return Finding("ok", "; ".join(f"{count} x {kind}" for kind, count in kinds.items()))


def versions(device: str) -> Finding:
    """Versions of the libraries, and those that are not installed."""
    facts = environment(torch.device(device))
    missing = [name for name in PACKAGES if name not in facts]
    if "apex" not in facts:
        missing.append(f"apex's {FUSED_ACCUMULATION}")
    names = ("python", "torch", "CUDA", "NCCL", "driver", *PACKAGES, "apex")
    shown = [f"{name} {facts[name]}" for name in names if name in facts]
    return Finding("ok", ", ".join(shown) + (f"; not installed: {', '.join(missing)}" if missing else ""))


def row_kernels(device: str) -> Finding:
    """Whether the Triton kernels serve this device."""
    reason = why_not_triton(torch.device(device), torch.float32)
    if reason is not None:
        return Finding("not run", reason=reason)
    return Finding("ok", "Triton")
