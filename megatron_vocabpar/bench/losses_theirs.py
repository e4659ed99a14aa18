"""The loss functions of ROLL, verl, NeMo-RL and slime, out of checkouts of their repositories, beside ours.

None of their code is in this package. A checkout is read in place: the one module that holds the functions
is imported, and the packages around it, which need a whole training stack, are not. What such a module takes
from its own package is replaced by the few names in ``STAND_INS``. Next: ``losses.py``, which measures.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.losses.compat import nemo_rl, roll, slime, verl

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


def _divide(numerator: int, denominator: int) -> int:
    return numerator // denominator


STAND_INS: Mapping[str, Mapping[str, object]] = {
    "mcore_adapter.utils": {"divide": _divide, "get_logger": logging.getLogger},
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


Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One function of theirs beside ours.

    Attributes:
        framework, function: whose, and its name.
        inputs: which of ``Data``'s tensors the functions take; those that are floating require gradients.
        theirs, ours: functions of those inputs to what is compared.
        ring: ``tensor`` if the ranks share the vocabulary, ``context`` if they share the sequence.
        without_gradient: the results are indices.
    """

    framework: str
    function: str
    inputs: tuple[str, ...]
    theirs: Function
    ours: Function
    ring: str = "tensor"
    without_gradient: bool = False


@dataclass(frozen=True)
class Data:
    """One rank's inputs: s tokens of one sequence, P ids of this rank's shard, R ranks.

    Attributes:
        logits: [1, s, P].
        hidden: [s, 1, H], the same on every rank.
        weight: [P, H].
        targets: [1, s] ids.
        keep: [s, P] boolean.
        start, stop: this rank's ids.
        group: the ranks.
        part: [1, s / R] values of this rank's positions (context ring).
    """

    logits: Tensor
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    keep: Tensor
    start: int
    stop: int
    group: dist.ProcessGroup
    part: Tensor


def cases(framework: str, modules: Mapping[str, ModuleType], data: Data) -> list[Case]:
    """What is compared of one framework."""
    return _CASES[framework](modules, data)


def _roll(modules: Mapping[str, Any], data: Data) -> list[Case]:
    vocab, entropy, context = modules["vocab"], modules["entropy"], modules["context"]
    targets = data.targets
    return [
        Case(
            "ROLL",
            "vocab_parallel_logprobs",
            ("logits",),
            lambda y: (vocab.vocab_parallel_logprobs(y, targets, False),),
            lambda y: (roll.vocab_parallel_logprobs(y, targets, False),),
        ),
        Case(
            "ROLL",
            "vocab_parallel_entropy",
            ("logits",),
            lambda y: (entropy.vocab_parallel_entropy(y.squeeze(0), True, False),),
            lambda y: (roll.vocab_parallel_entropy(y.squeeze(0), True, False),),
        ),
        Case(
            "ROLL",
            "vocab_parallel_target_rank",
            ("logits",),
            lambda y: (vocab.vocab_parallel_target_rank(y, targets),),
            lambda y: (roll.vocab_parallel_target_rank(y, targets),),
            without_gradient=True,
        ),
        Case(
            "ROLL",
            "context_parallel_gather",
            ("part",),
            lambda x: (context.context_parallel_gather(x, 1),),
            lambda x: (roll.context_parallel_gather(x, 1),),
            ring="context",
        ),
    ]


def _verl(modules: Mapping[str, Any], data: Data) -> list[Case]:
    vocab = modules["vocab"]
    return [
        Case(
            "verl",
            "vocab_parallel_entropy",
            ("logits",),
            lambda y: (vocab.vocab_parallel_entropy(y.squeeze(0)),),
            lambda y: (verl.vocab_parallel_entropy(y.squeeze(0)),),
        ),
        Case(
            "verl",
            "vocab_parallel_log_probs_from_logits",
            ("logits",),
            lambda y: (vocab.vocab_parallel_log_probs_from_logits(y, data.targets),),
            lambda y: (verl.vocab_parallel_log_probs_from_logits(y, data.targets),),
        ),
    ]


def _nemo_rl(modules: Mapping[str, Any], data: Data) -> list[Case]:
    utils = modules["model_utils"]
    shard = (data.start, data.stop, data.group)

    def hidden_part(x: Tensor) -> Tensor:
        return x.chunk(dist.get_world_size(data.group))[dist.get_rank(data.group)].contiguous()

    found = [
        Case(
            "NeMo-RL",
            f"from_parallel_logits_to_logprobs, {name}",
            ("logits",),
            lambda y, size=size: (
                utils.from_parallel_logits_to_logprobs(y, data.targets, *shard, chunk_size=size),
            ),
            lambda y, size=size: (
                nemo_rl.from_parallel_logits_to_logprobs(y, data.targets, *shard, chunk_size=size),
            ),
        )
        for name, size in (("whole", None), ("chunks of 128", 128))
    ]
    found.append(
        Case(
            "NeMo-RL",
            "from_parallel_hidden_states_to_logprobs",
            ("hidden", "weight"),
            lambda x, w: (
                utils.from_parallel_hidden_states_to_logprobs(
                    hidden_part(x), w, True, data.targets, *shard, chunk_size=128
                ),
            ),
            lambda x, w: (
                nemo_rl.from_parallel_hidden_states_to_logprobs(
                    hidden_part(x), w, True, data.targets, *shard, chunk_size=128
                ),
            ),
        )
    )
    found.append(
        Case(
            "NeMo-RL",
            "vocab_parallel_argmax",
            ("logits",),
            lambda y: (utils.vocab_parallel_argmax(y, tp_group=data.group),),
            lambda y: (nemo_rl.vocab_parallel_argmax(y, tp_group=data.group),),
            without_gradient=True,
        )
    )
    found.append(
        Case(
            "NeMo-RL",
            "allgather_cp_sharded_tensor",
            ("part",),
            lambda x: (utils.allgather_cp_sharded_tensor(x, data.group, seq_dim=1),),
            lambda x: (nemo_rl.allgather_cp_sharded_tensor(x, data.group, 1),),
            ring="context",
        )
    )
    return found


def _slime(modules: Mapping[str, Any], data: Data) -> list[Case]:
    theirs, ours = modules["ppo"].calculate_log_probs_and_entropy, slime.calculate_log_probs_and_entropy
    flat = data.targets[0]

    def call(function: Callable[..., Any], *options: object) -> Function:
        def run(y: Tensor) -> tuple[Tensor, ...]:
            return tuple(x for x in function(y.squeeze(0), flat, data.group, *options) if x is not None)

        return run

    options = {
        "log-probabilities": (False,),
        "with entropy": (True,),
        "with entropy, chunks of 128": (True, 128),
        "with entropy, keep mask": (True, -1, data.keep),
    }
    return [
        Case(
            "slime",
            f"calculate_log_probs_and_entropy, {name}",
            ("logits",),
            call(theirs, *chosen),
            call(ours, *chosen),
        )
        for name, chosen in options.items()
    ]


_CASES = {"ROLL": _roll, "verl": _verl, "NeMo-RL": _nemo_rl, "slime": _slime}


def pretend_cuda() -> None:
    """In a process of its own on a machine without a GPU: what asks for pinned memory and ``.cuda()`` by name
    stays on the CPU (NeMo-RL's backward over context parallelism)."""
    tensor = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **options: tensor(*args, **options)
    torch.Tensor.cuda = lambda self, **options: self  # type: ignore[method-assign]
