"""What a run writes down about its log-probabilities, so that a later run can be compared with it.

A ``Run`` holds the values, where they came from, and (where the logits were at hand) the evidence from which
``drift.py`` tells the cause of a difference: each shard's own log-sum-exp, and what each shard would read
as the target's logit. It is one JSON file. Next: ``drift.py``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.losses.functions import vocab_logprobs


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
        microbatch: [n] the microbatch of each token; empty for one.
        loss: the reduced loss, or None.
        shard_lse: [R][n] log-sum-exp of each shard alone; empty if not recorded.
        shard_logits: [R][n][2] the logit each shard has at the target's position, with the position clamped
            into the shard, and with the position that it has in its owner; empty if not recorded.
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
    loss: float | None = None
    shard_lse: list[list[float]] = dataclasses.field(default_factory=list)
    shard_logits: list[list[list[float]]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for field in ("targets", "mask", "microbatch"):
            given = len(getattr(self, field))
            if given != len(self.logprobs) and (given or field == "targets"):
                raise ValueError(
                    f"run {self.name!r}: {given} {field} for {len(self.logprobs)} log-probabilities"
                )

    def owner(self, target: int) -> int | None:
        """Rank of the shard that holds the id, or None."""
        return next((rank for rank, (start, stop) in enumerate(self.ranges) if start <= target < stop), None)


def evidence(logits: Tensor, targets: Tensor, ranges: Sequence[VocabRange]) -> dict[str, Any]:
    """``ranges``, ``shard_lse`` and ``shard_logits`` of a Run, from all logits [n, V]; in float64."""
    starts = torch.tensor([shard.start for shard in ranges])
    owner = torch.bucketize(targets, starts[1:].contiguous(), right=True)
    within = targets - starts[owner]
    lse, read = [], []
    for shard in ranges:
        part = logits[:, shard.start : shard.start + shard.valid_rows].double()
        if part.shape[1] == 0:
            lse.append([-float("inf")] * len(targets))
            read.append([[0.0, 0.0]] * len(targets))
            continue
        lse.append(torch.logsumexp(part, dim=1).tolist())
        columns = torch.stack((targets - shard.start, within), dim=1).clamp(0, part.shape[1] - 1)
        read.append(part.gather(1, columns).tolist())
    bounds = [[shard.start, shard.start + shard.valid_rows] for shard in ranges]
    return {"ranges": bounds, "shard_lse": lse, "shard_logits": read}


def record(
    name: str,
    logits: Tensor,
    targets: Tensor,
    ranges: Sequence[VocabRange],
    *,
    mask: Tensor | None = None,
    microbatch: Tensor | None = None,
    loss: float | None = None,
    logprobs: Tensor | None = None,
    backend: str = "cpu",
    reduction: str = "token_mean",
) -> Run:
    """A run of the library over simulated shards of ``logits`` [n, V], with its evidence.

    Args:
        name, backend, reduction, loss: as in ``Run``.
        logits: [n, V] true ids only.
        targets: [n] ids.
        ranges: the shards.
        mask, microbatch: [n] or None.
        logprobs: [n] values of another implementation; None computes them here.
    """
    if logprobs is None:
        shards = [logits[:, shard.start : shard.stop] for shard in ranges]
        logprobs = vocab_logprobs(shards, targets, ranges=ranges, inference_only=True)
    return Run(
        name=name,
        logprobs=logprobs.double().tolist(),
        targets=targets.tolist(),
        tp_size=len(ranges),
        dtype=str(logits.dtype).removeprefix("torch."),
        backend=backend,
        reduction=reduction,
        mask=[] if mask is None else mask.double().tolist(),
        microbatch=[] if microbatch is None else microbatch.tolist(),
        loss=loss,
        **evidence(logits, targets, ranges),
    )


def write_run(run: Run, path: Path) -> None:
    """Write the JSON file."""
    path.write_text(json.dumps(dataclasses.asdict(run)))


def read_run(path: Path) -> Run:
    """Read what ``write_run`` wrote.

    Raises:
        ValueError: if the file is missing, no JSON, or has other fields.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; write it with megatron_vocabpar.losses.runs") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    names = {field.name for field in dataclasses.fields(Run)}
    if not isinstance(found, dict) or not {"name", "logprobs", "targets"} <= set(found) <= names:
        raise ValueError(f"{path}: need an object with name, logprobs, targets and any of {sorted(names)}")
    return Run(**found)
