"""What a run writes down about its log-probabilities, so that a later run can be compared with it.

A ``Run`` holds the values, where they came from, and (where the logits were at hand) the evidence from which
``drift.py`` tells the cause of a difference: each shard's own log-sum-exp, and what each shard would read
as the target's logit. It is one JSON file. Next: ``drift.py``.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.losses.arguments import Layout, prepare
from megatron_vocabpar.losses.functions import vocab_logprobs
from megatron_vocabpar.losses.sources import LazyLogits, Logits
from megatron_vocabpar.losses.summary import of_chunks

_SHAPES = {
    "logprobs": "n",
    "targets": "n",
    "mask": "n",
    "microbatch": "n",
    "sentence": "n",
    "prompt": "n",
} | {"ranges": "R2", "shard_lse": "Rn", "shard_max": "Rn", "shard_logits": "Rn2"}
"""The shape of each list; all but the first two may be empty."""


@dataclass(frozen=True)
class Run:
    """Log-probabilities of n tokens and how they were computed; lists, so that it is its own JSON.

    Attributes:
        name: what to call the run.
        logprobs: [n] log-probability of each target.
        targets: [n] ids.
        tp_size: number of vocabulary shards, R.
        dtype: of the logits.
        backend: such as ``cpu``, ``gloo``, ``nccl``.
        reduction: such as ``token_mean``; describes ``loss``.
        ranges: [R][2] first and last-plus-one id of each shard; empty if not known.
        mask: [n] weights in the loss; empty for all 1.
        microbatch, sentence, prompt: [n] the microbatch of each token, its sentence, and the prompt whose
            group of answers that sentence is in; empty if not known.
        loss: the reduced loss, or None.
        shard_lse, shard_max: [R][n] log-sum-exp and largest logit of each shard alone; empty if not recorded.
        shard_logits: [R][n][2] the logit each shard has at the target's position, with the position clamped
            into the shard, and with the position that it has in its owner; empty if not recorded.

    Raises:
        ValueError: naming a list of another shape.
    """

    name: str
    logprobs: list[float]
    targets: list[int]
    tp_size: int = 1
    dtype: str = "float32"
    backend: str = "cpu"
    reduction: str = "token_mean"
    ranges: list[list[int]] = dataclasses.field(default_factory=list)
    mask: list[float] = dataclasses.field(default_factory=list)
    microbatch: list[int] = dataclasses.field(default_factory=list)
    sentence: list[int] = dataclasses.field(default_factory=list)
    prompt: list[int] = dataclasses.field(default_factory=list)
    loss: float | None = None
    shard_lse: list[list[float]] = dataclasses.field(default_factory=list)
    shard_max: list[list[float]] = dataclasses.field(default_factory=list)
    shard_logits: list[list[list[float]]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for field in ("name", "dtype", "backend", "reduction"):
            if not isinstance(getattr(self, field), str):
                raise ValueError(f"run {self.name!r}: {field} {getattr(self, field)!r} is no text")
        if not isinstance(self.tp_size, int) or not isinstance(self.loss, int | float | None):
            raise ValueError(f"run {self.name!r}: tp_size {self.tp_size!r}, loss {self.loss!r}: give numbers")
        sizes = {"n": len(numbers(self.logprobs)), "R": self.tp_size, "2": 2}
        for field, letters in _SHAPES.items():
            found, shape = numbers(getattr(self, field)).shape, tuple(sizes[letter] for letter in letters)
            if found != shape and (len(getattr(self, field)) or field == "targets"):
                raise ValueError(
                    f"run {self.name!r}: {field} of shape {tuple(found)}, where {shape} is needed"
                )
        if bool(self.shard_lse) != bool(self.shard_logits) or (self.shard_lse and not self.ranges):
            raise ValueError(f"run {self.name!r}: shard_lse, shard_logits and ranges are needed together")

    def owner(self, target: int) -> int | None:
        """Rank of the shard that holds the id, or None."""
        return next((rank for rank, (start, stop) in enumerate(self.ranges) if start <= target < stop), None)


def numbers(values: list) -> Tensor:
    """A list of a run as fp64.

    Raises:
        ValueError: if it is none, or not of numbers, or ragged.
    """
    try:
        return torch.tensor([*values], dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{str(values)[:40]} is no list of numbers ({str(error).splitlines()[0]})"
        ) from error


def _evidence(logits: Logits, targets: Tensor, layout: Layout) -> dict[str, Any]:
    """``ranges``, ``shard_lse``, ``shard_max`` and ``shard_logits`` of a Run; float64, by chunks."""
    call, tensors = prepare(logits, layout)
    source = call.source(tensors)
    mine = [targets.new_tensor([shard.start, shard.start + shard.valid_rows]) for shard in call.ranges]
    ranges = call.exchange.gather(mine)
    first, end = ranges.unsqueeze(2).unbind(1)  # [R, 1]
    owner = ((targets >= first) & (targets < end)).int().argmax(dim=0)
    within = targets - first[owner, 0]

    def read(y: Tensor, shard: VocabRange, rows: slice) -> Tensor:
        if y.shape[1] == 0:
            return y.new_tensor([-torch.inf, -torch.inf, 0, 0]).double().expand(len(y), 4)
        columns = torch.stack((targets[rows] - shard.start, within[rows]), dim=1).clamp(0, y.shape[1] - 1)
        y = y.double()
        return torch.cat((y.logsumexp(1, keepdim=True), y.amax(1, keepdim=True), y.gather(1, columns)), dim=1)

    found = call.exchange.gather(of_chunks(call, source, read))
    parts = {"shard_lse": found[..., 0], "shard_max": found[..., 1], "shard_logits": found[..., 2:]}
    return {"ranges": ranges.tolist()} | {name: part.tolist() for name, part in parts.items()}


def record(
    name: str,
    logits: Logits,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    microbatch: Tensor | None = None,
    sentence: Tensor | None = None,
    prompt: Tensor | None = None,
    loss: float | None = None,
    logprobs: Tensor | None = None,
    reduction: str = "token_mean",
    **layout: Unpack[Layout],
) -> Run:
    """A run with its evidence, from shards in this process or on the ranks of a group, which all get it.

    Args:
        name, reduction, loss: as in ``Run``.
        logits: [n, P] as in ``vocab_logprobs``: this rank's shard, all shards, or ``LazyLogits``.
        targets: [n] ids.
        mask, microbatch, sentence, prompt: [n] or None.
        logprobs: [n] values of another implementation; None computes them here.
        layout: see ``arguments.Layout``.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    layout = layout | Layout(inference_only=True)
    if logprobs is None:
        logprobs = vocab_logprobs(logits, targets, **layout)
    first = logits.hidden if isinstance(logits, LazyLogits) else logits
    group = layout.get("group")
    found = _evidence(logits, targets, layout)
    lists = {"mask": mask, "microbatch": microbatch, "sentence": sentence, "prompt": prompt}
    return Run(
        name=name,
        logprobs=logprobs.double().tolist(),
        targets=targets.tolist(),
        tp_size=len(found["ranges"]),
        dtype=str((first if isinstance(first, Tensor) else first[0]).dtype).removeprefix("torch."),
        backend=targets.device.type if group is None else dist.get_backend(group),
        reduction=reduction,
        loss=loss,
        **{name: [] if values is None else values.tolist() for name, values in lists.items()},
        **found,
    )


def write_run(run: Run, path: Path) -> None:
    """Write the JSON file."""
    path.write_text(json.dumps(dataclasses.asdict(run)))


def read_run(path: Path) -> Run:
    """Read what ``write_run`` wrote.

    Raises:
        ValueError: if the file is missing, no JSON, or has other fields or values.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; write it with lab.runs") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    names = {field.name for field in dataclasses.fields(Run)}
    if not isinstance(found, dict) or not {"name", "logprobs", "targets"} <= set(found) <= names:
        raise ValueError(f"{path}: need an object with name, logprobs, targets and any of {sorted(names)}")
    try:
        return Run(**found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
