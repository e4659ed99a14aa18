"""Date, hardware and versions that a measurement belongs to."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

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


def environment(device: torch.device) -> dict[str, str]:
    """By name, the facts that a measurement depends on; packages that are not installed are left out."""
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
    """The NVIDIA driver's version, as ``nvidia-smi`` says."""
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
