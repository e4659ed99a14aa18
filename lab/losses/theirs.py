"""The loss functions of ROLL, verl, NeMo-RL and slime, out of checkouts of their repositories, beside ours.

None of their code is in this repository. A checkout is read in place: the one module that holds the
functions is imported, and the packages around it, which need a whole training stack, are not. What such a
module takes from its own package is replaced by the few names in ``STAND_INS``.
Next: ``compared.py``, which measures.
"""

from __future__ import annotations

import importlib
import logging
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import floordiv
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.losses.compat import roll

MODULES = {
    "ROLL": {
        "vocab": "mcore_adapter/src/mcore_adapter/parallel_functions/vocab_parallel.py",
        "context": "mcore_adapter/src/mcore_adapter/parallel_functions/context_parallel.py",
        "entropy": "roll/third_party/megatron/tensor_parallel.py",
    },
    "verl": {"vocab": "verl/utils/megatron/tensor_parallel.py"},
    "NeMo-RL": {"model_utils": "nemo_rl/distributed/model_utils.py"},
    "slime": {"ppo": "slime/utils/ppo_utils.py"},
}
"""Framework -> the files in its repository that hold the functions."""

_EXAMPLE = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples/losses_compat.py")))
OURS = {"ROLL": roll, "verl": _EXAMPLE, "NeMo-RL": _EXAMPLE, "slime": _EXAMPLE}
"""Framework -> our functions of the same names."""

STAND_INS: Mapping[str, Mapping[str, object]] = {
    "mcore_adapter.utils": {"divide": floordiv, "get_logger": logging.getLogger},
    "roll.utils.logging": {"get_logger": lambda: logging.getLogger("roll")},
}
"""Modules of theirs that are not read, and the names that take their place."""


def check(framework: str, checkout: Path) -> None:
    """Whether a checkout holds the framework's files.

    Raises:
        ValueError: if one is missing.
    """
    for file in MODULES[framework].values():
        if not (checkout / file).is_file():
            raise ValueError(f"{checkout} has no {file}: give the root of a checkout of {framework}")


def load(framework: str, checkout: Path) -> dict[str, ModuleType]:
    """Import the framework's modules from a checkout of its repository that ``check`` passed."""
    found = {}
    for name, file in MODULES[framework].items():
        parts = file.removesuffix(".py").split("/")
        root = checkout
        if "src" in parts:  # the package starts behind a src folder
            root = checkout.joinpath(*parts[: parts.index("src") + 1])
            parts = parts[parts.index("src") + 1 :]
        for depth in range(1, len(parts)):
            _bare_package(".".join(parts[:depth]), root.joinpath(*parts[:depth]))
        found[name] = importlib.import_module(".".join(parts))
    return found


def _bare_package(name: str, folder: Path) -> None:
    """A package whose own ``__init__`` is not run."""
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    for stand_in, names in STAND_INS.items():
        if stand_in.startswith(f"{name}.") and stand_in not in sys.modules:
            module = ModuleType(stand_in)
            module.__dict__.update(names)
            sys.modules[stand_in] = module


Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One function of theirs beside ours of the same name, both called alike.

    Attributes:
        framework, module, function: where theirs is; ``module`` is a key of ``MODULES``.
        inputs: which of ``Data``'s tensors it takes; those that are floating require gradients.
        call: calls a function with this rank's data and those inputs.
        variant: what is added to the function's name where several cases have it.
        ring: ``tensor`` if the ranks share the vocabulary, ``context`` if they share the sequence.
        without_gradient: the results are indices.
    """

    framework: str
    module: str
    function: str
    inputs: tuple[str, ...]
    call: Callable[..., Tensor | tuple[Tensor | None, ...]]
    variant: str = ""
    ring: str = "tensor"
    without_gradient: bool = False

    @property
    def name(self) -> str:
        """The function, and which of its cases."""
        return f"{self.function}, {self.variant}" if self.variant else self.function


@dataclass(frozen=True)
class Data:
    """One rank's inputs: s tokens of one sequence, P ids of this rank's shard, R ranks.

    Attributes:
        logits: [1, s, P].
        hidden: [s, 1, H], the same on every rank.
        weight: [P, H].
        targets: [1, s] ids.
        start, stop: this rank's ids.
        group: the ranks.
        part: [1, s / R] values of this rank's positions (context ring).
    """

    logits: Tensor
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    start: int
    stop: int
    group: dist.ProcessGroup
    part: Tensor


_LOGITS = ("logits",)


def _from_hidden(function: Function, data: Data, x: Tensor, weight: Tensor) -> Tensor:
    """NeMo-RL takes this rank's part of the sequence."""
    part = x.chunk(dist.get_world_size(data.group))[dist.get_rank(data.group)].contiguous()
    shard = (data.start, data.stop, data.group)
    found: Tensor = function(part, weight, True, data.targets, *shard, chunk_size=128)
    return found


CASES = (
    Case(
        "ROLL", "vocab", "vocab_parallel_logprobs", _LOGITS,
        lambda f, data, y: f(y, data.targets, False),
    ),
    Case(
        "ROLL", "entropy", "vocab_parallel_entropy", _LOGITS,
        lambda f, data, y: f(y.squeeze(0), True, False),
    ),
    Case(
        "ROLL", "vocab", "vocab_parallel_target_rank", _LOGITS,
        lambda f, data, y: f(y, data.targets), without_gradient=True,
    ),
    Case(
        "ROLL", "context", "context_parallel_gather", ("part",),
        lambda f, data, x: f(x, 1), ring="context",
    ),
    Case(
        "verl", "vocab", "vocab_parallel_entropy", _LOGITS,
        lambda f, data, y: f(y.squeeze(0)),
    ),
    Case(
        "verl", "vocab", "vocab_parallel_log_probs_from_logits", _LOGITS,
        lambda f, data, y: f(y, data.targets),
    ),
    *(
        Case(
            "NeMo-RL", "model_utils", "from_parallel_logits_to_logprobs", _LOGITS,
            lambda f, data, y, size=size: f(
                y, data.targets, data.start, data.stop, data.group, chunk_size=size
            ),
            variant,
        )
        for variant, size in (("whole", None), ("chunks of 128", 128))
    ),
    Case(
        "NeMo-RL", "model_utils", "from_parallel_hidden_states_to_logprobs", ("hidden", "weight"),
        _from_hidden,
    ),
    Case(
        "NeMo-RL", "model_utils", "vocab_parallel_argmax", _LOGITS,
        lambda f, data, y: f(y, tp_group=data.group), without_gradient=True,
    ),
    *(
        Case(
            "slime", "ppo", "calculate_log_probs_and_entropy", _LOGITS,
            lambda f, data, y, options=options: f(y.squeeze(0), data.targets[0], data.group, *options),
            variant,
        )
        for variant, options in (
            ("log-probabilities", (False,)),
            ("with entropy", (True,)),
            ("with entropy, chunks of 128", (True, 128)),
        )
    ),
)  # fmt: skip


def pretend_cuda() -> None:
    """In a process of its own on a machine without a GPU: what asks for pinned memory and ``.cuda()`` by name
    stays on the CPU (NeMo-RL's backward over context parallelism)."""
    tensor = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **options: tensor(*args, **options)
    torch.Tensor.cuda = lambda self, **options: self  # type: ignore[method-assign]
