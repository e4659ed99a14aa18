"""The machine and its environment: the facts that a measurement belongs to, and the checks on them."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megatron_vocabpar.doctor.check_runs import Finding
from megatron_vocabpar.layers.kernels.dispatch import why_not_triton

PACKAGES = (
    "megatron-core",
    "triton",
    "transformer-engine",
    "flash-attn",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
)
FUSED_ACCUMULATION = "fused_weight_gradient_mlp_cuda"
"""apex's extension, told by its module: the package named apex on the public index is another project."""

_DRIVER_TIMEOUT_S = 20
_PREFIXES = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA", "NVTE_", "TRITON_")


def environment(device: torch.device) -> dict[str, str]:
    """The facts that a measurement depends on, by name; packages that are not installed are left out."""
    facts = {
        "device": platform.processor() or "CPU",
        "date": date.today().isoformat(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "compute capability": f"{capability[0]}.{capability[1]}",
            "memory": f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB",
            "devices": str(torch.cuda.device_count()),
            "driver": driver_version(),
            "CUDA": torch.version.cuda or f"HIP {torch.version.hip}",
            "NCCL": nccl_version(),
        }
    facts |= {package: text for package in PACKAGES if (text := _version(package)) is not None}
    if importlib.util.find_spec(FUSED_ACCUMULATION) is not None:
        facts["apex"] = "fused weight gradient"
    return facts


def file_name(facts: Mapping[str, str]) -> str:
    """``<device>_<date>.json``, in letters that every file system takes."""
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    return f"{device}_{facts['date']}.json"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version() -> str:
    """The NVIDIA driver's version from ``nvidia-smi``, or why it is unknown."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown: there is no nvidia-smi"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown: nvidia-smi failed"


def nccl_version() -> str:
    """NCCL's version, or that this build of torch has none."""
    if not torch.distributed.is_nccl_available():
        return "none in this build of torch"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def commit_of(checkout: Path) -> str:
    """The commit that is checked out, or ``unknown``."""
    asked = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return asked.stdout.strip() or "unknown"


def count_gpus() -> int:
    """The number of GPUs that are visible to this process.

    Raises:
        ValueError: if there is none, with the reason and a remedy.
    """
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
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU; unset it"
    return (
        f"torch {torch_version} for CUDA {cuda} finds no GPU; run nvidia-smi: where it fails too, the driver "
        f"(or a container's access to it) is missing, else the driver is older than CUDA {cuda} needs"
    )


def variables(process_environment: Mapping[str, str] = os.environ) -> Finding:
    """The environment variables that change how GPUs work; failed where a variable prevents all overlap."""
    values = {k: v for k, v in sorted(process_environment.items()) if k.startswith(_PREFIXES)}
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
    devices = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    kinds = Counter(
        f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        for gpu in devices
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
    """Whether the Triton kernels are used on this device."""
    reason = why_not_triton(torch.device(device), torch.float32)
    if reason is not None:
        return Finding("not run", reason=reason)
    return Finding("ok", "Triton")
