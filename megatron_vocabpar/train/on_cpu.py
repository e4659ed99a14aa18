"""Run an unchanged Megatron-LM script on CPU processes.

    torchrun --nproc-per-node 4 -m megatron_vocabpar.train.on_cpu pretrain_gpt.py arguments

Megatron's training loop asks CUDA for devices, memory figures, streams and random states, and passes
torch.distributed options that gloo does not take. One table answers in CUDA's place; ``core_on_cpu.py`` has
what megatron-core itself needs. The script starts through our launcher, or by itself where it imports our
adaptor. Peaks of memory are those of the whole process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing.context
import os
import resource
import runpy
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import typing_extensions

_CPU = torch.device("cpu")
_GIB = 1 << 30


def _peak_rss(*_: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _answer(value: Any = None) -> Callable[..., Any]:
    return lambda *_, **__: value


class _Stream:
    """A stream whose work is always complete."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _answer(True)


_PROPERTIES = types.SimpleNamespace(
    name="cpu", major=9, minor=0, total_memory=16 * _GIB, multi_processor_count=1, warp_size=32
)


def _cuda_names() -> dict[str, Any]:
    nothing = "init _lazy_init set_device empty_cache ipc_collect reset_peak_memory_stats set_stream"
    return {
        # Distinct functions: torch._dynamo keeps a rule per function, and refuses one under two names.
        **{name: _answer() for name in nothing.split()},
        **{name: _answer(True) for name in ("is_available", "is_initialized")},
        **{name: _answer(0) for name in ("memory_allocated", "memory_reserved", "device_memory_used")},
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak_rss),
        **dict.fromkeys(("Stream", "Event"), _Stream),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_: _Stream()),
        "device_count": _answer(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        "get_device_name": _answer("cpu"),
        "get_device_capability": _answer((9, 0)),
        "get_device_properties": _answer(_PROPERTIES),
        "memory_stats": lambda *_: defaultdict(int),
        "mem_get_info": _answer((16 * _GIB, 16 * _GIB)),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "stream": lambda *_: contextlib.nullcontext(),
        "is_current_stream_capturing": _answer(False),
        "FloatTensor": torch.FloatTensor,
        "LongTensor": torch.LongTensor,
        "IntTensor": torch.IntTensor,
    }


def _without(function: Callable[..., Any], *options: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    return call


def stand_in_for_cuda() -> None:
    """Replace the names for the rest of this process."""
    for name, value in _cuda_names().items():
        setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _answer())
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = _answer()  # type: ignore[method-assign]
    torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    vars(torch)["compile"] = lambda model=None, **_: model if model is not None else lambda f: f
    owners: tuple[Any, ...] = (dist, dist.distributed_c10d)
    for owner in owners:
        owner.init_process_group = _without(dist.init_process_group, "device_id", "pg_options")
        owner.new_group = _without(dist.new_group, "pg_options", "device_id")
        owner.barrier = _without(dist.barrier, "device_ids")
    if not hasattr(typing, "override"):  # Megatron 0.18 and later import it; Python has it from 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]


def skip_compilation() -> None:
    """Versions before 0.18 compile CUDA kernels when training starts; all run make for the data helpers."""
    with contextlib.suppress(ModuleNotFoundError):
        vars(importlib.import_module("megatron.legacy.fused_kernels"))["load"] = _answer()
    vars(importlib.import_module("megatron.core.datasets.utils"))["compile_helpers"] = _answer()


def make_up_fewer_documents() -> None:
    """Shrink Megatron's mock data of 100,000 documents: every rank would shuffle millions of samples."""
    importlib.import_module("megatron.core.datasets.gpt_dataset").MockGPTLowLevelDataset.size = 1000


def name_what_is_missing() -> None:
    """Add names that some versions use although NumPy 2 or a missing Transformer Engine has none."""
    vars(numpy).setdefault("product", numpy.prod)
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    vars(module).setdefault("te_general_gemm", None)
    with contextlib.suppress(ImportError):
        layers = vars(importlib.import_module("megatron.core.tensor_parallel.inference_layers"))
        for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
            if not isinstance(layers.get(name), type):  # but a mock, with which main's isinstance fails
                layers[name] = type(name, (), {})


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stands in for Megatron's function, which would leave experts' sizes on the CPU as tensors."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def exchange_tokens_by_sizes() -> None:
    """Expert parallelism: gloo's ``all_to_all_single`` takes sizes as lists and arrays, not as tensors."""
    for name in ("moe_utils", "token_dispatcher"):
        module = vars(importlib.import_module(f"megatron.core.transformer.moe.{name}"))
        if "maybe_move_tensor_to_cpu" in module:
            module["maybe_move_tensor_to_cpu"] = _to_cpu


def fork_instead_of_spawn() -> None:
    """Let the helper processes of a checkpoint start without importing the script and Megatron again."""
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["forkserver"] = contexts["fork"]


class _ScalarWriter:
    """Stands in for tensorboard's SummaryWriter: appends every scalar to a file, with all its digits."""

    def __init__(self, log_dir: str, **_: Any) -> None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self._path = Path(log_dir) / "scalars.jsonl"

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([tag, int(step), float(value)]) + "\n")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _answer()


def stand_in_for_tensorboard() -> None:
    """Let ``--tensorboard-dir`` write what tests compare."""
    for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        module = types.ModuleType(name)
        module.SummaryWriter = _ScalarWriter  # type: ignore[attr-defined]
        sys.modules[name] = module


def stand_in() -> None:
    """Replace the names that must be replaced before Megatron is imported; a second call changes nothing."""
    if torch.cuda.Stream is not _Stream:
        stand_in_for_cuda()
        stand_in_for_tensorboard()
        fork_instead_of_spawn()


def main(argv: list[str]) -> None:
    stand_in()
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    from megatron_vocabpar.train.core_on_cpu import megatron_on_cpu

    skip_compilation()
    make_up_fewer_documents()
    name_what_is_missing()
    exchange_tokens_by_sizes()
    with megatron_on_cpu():
        from megatron_vocabpar import launch

        if "megatron_vocabpar.adaptor" in Path(argv[0]).read_text():
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
        else:
            launch.main(argv)
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early closes connections that others still use
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
