"""Vocabulary weights as stock Megatron draws them: a stage draws a whole one, every rank gets its rows.

megatron-core seeds each stage by its own number and draws the embedding before the layers of the first stage,
the output weight after those of the last, every tensor-parallel rank its own part. What a stage has drawn is
scattered over the vocabulary group here, so that a run starts from the weights that it would have without us.

Next: ``model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_vocabpar.layers.partition import VocabRange


@torch.no_grad()
def scatter_rows(
    drawn: torch.Tensor | None,
    weight: torch.Tensor,
    ranges: Sequence[VocabRange],
    member: int,
    stage: int,
    stock_vocab_size: int,
) -> None:
    """Hand out a weight that the tensor-parallel ranks of one stage have drawn; all members call it.

    Args:
        drawn: ``[stock_vocab_size / t, H]`` this rank's part of it; None on other stages.
        weight: ``[P, H]`` of this member, written to; rows that stock does not have stay as they are.
        ranges: rows of every member of the vocabulary group, stage-major.
        member: this rank's place among them.
        stage: the one that has drawn.
        stock_vocab_size: rows of the whole drawn weight, its padding included.

    Raises:
        ValueError: if megatron-core's model-parallel group has its ranks in another order.
    """
    group = parallel_state.get_model_parallel_group()
    if (dist.get_rank(group), dist.get_world_size(group)) != (member, len(ranges)):
        raise ValueError(
            "the model-parallel group is not in the order stage, tensor-parallel rank; draw the vocabulary "
            "weights on each rank (in Megatron-LM with --vocab-parallel-independent-init)"
        )
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    part = stock_vocab_size // tensor
    sources = {stage * tensor + rank: (rank * part, (rank + 1) * part) for rank in range(tensor)}

    def rows(source: int, target: int) -> int:
        start, stop = sources.get(source, (0, 0))
        return max(0, min(stop, ranges[target].stop) - max(start, ranges[target].start))

    members = range(len(ranges))
    sent = [rows(member, target) for target in members]
    received = [rows(source, member) for source in members]
    # Of the communicators' device, where the weights are drawn on the CPU.
    device = torch.cuda.current_device()
    outgoing = weight[:0] if drawn is None else drawn[: sum(sent)]
    incoming = torch.empty_like(weight[: sum(received)], device=device)
    dist.all_to_all_single(incoming, outgoing.to(device), received, sent, group=group)
    weight[: sum(received)] = incoming.to(weight.device)
