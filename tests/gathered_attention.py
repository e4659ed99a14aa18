"""An attention that takes context-parallel slices and packed sequences: it gathers keys and values.

Without Transformer Engine megatron-core's own takes neither, so stock and ours are compared with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule


def positions(lengths: Sequence[int], rank: int = 0, size: int = 1) -> torch.Tensor:
    """Where the tokens of context-parallel rank ``rank`` lie in a row of sequences of these lengths.

    Each sequence is cut into ``2 * size`` parts; a rank has one from the front and one from the back.
    """
    row = torch.arange(sum(lengths))
    if size == 1:
        return row
    parts = [sequence.chunk(2 * size) for sequence in row.split(list(lengths))]
    return torch.cat([part[end] for part in parts for end in (rank, 2 * size - 1 - rank)])


class GatheredAttention(MegatronModule):
    """Causal within each sequence; ``[s, b, heads, d]``, or ``[t, heads, d]`` where sequences are packed."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        rank, size = group.rank(), group.size()
        lengths = [len(query) * size]
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q.flatten().diff().tolist()
        mine = positions(lengths, rank, size)
        theirs = torch.cat([positions(lengths, other, size) for other in range(size)])
        sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        hidden = (sequence[mine, None] != sequence[theirs]) | (mine[:, None] < theirs)
        key, value = (gather_from_sequence_parallel_region(x, group=group) for x in (key, value))
        scores = torch.einsum("q...d,k...d->...qk", query, key) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("...qk,k...d->q...d", weights, value).flatten(-2)
