"""Both vocabulary layers of a shard, as megatron-core modules: their names, checkpoints and initial weights.

Next: ``stage_model.py``, which puts them into a stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

from megatron_vocabpar.layers.embedding import embedding_forward
from megatron_vocabpar.layers.fixed_point import BLOCK
from megatron_vocabpar.layers.partition import FP8_MULTIPLE, VocabRange, even_ranges, padded_vocab_size
from megatron_vocabpar.layers.terms import LossTerms

ShardPass = Callable[[torch.Tensor, torch.Tensor], tuple[Any, torch.Tensor]]
"""Pass S of hidden states [n, H] and a weight [P, H]: what T needs, and the statistics."""


@dataclass(frozen=True)
class VocabShard:
    """Which rows of the vocabulary this rank owns.

    Attributes:
        ranges: rows of every member of the vocabulary group, stage-major (``stage * t + tensor_rank``).
        member: this rank's number among them.
    """

    ranges: tuple[VocabRange, ...]
    member: int

    @property
    def range(self) -> VocabRange:
        """This rank's rows."""
        return self.ranges[self.member]


def vocab_shard(
    vocab_size: int, divisible_by: int = 1, *, invariant: bool = False, fp8: bool = False
) -> VocabShard:
    """The even partition of ``vocab_size`` true ids over this process's PP x TP ranks.

    Args:
        vocab_size: ``V``, the number of true ids; ``padded_vocab_size`` says how much padding is added.
        divisible_by: a further divisor of the padded size (Megatron's ``make_vocab_size_divisible_by``).
        invariant: let shards end between the blocks of ``VocabOptions.invariant``.
        fp8: let shards have a number of rows that 8-bit products take.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    member = (
        parallel_state.get_pipeline_model_parallel_rank() * tensor
        + parallel_state.get_tensor_model_parallel_rank()
    )
    for rows in (BLOCK if invariant else 1, FP8_MULTIPLE if fp8 else 1):
        divisible_by = lcm(divisible_by, rows * pipeline * tensor) if rows > 1 else divisible_by
    padded = padded_vocab_size(vocab_size, pipeline, tensor, divisible_by)
    return VocabShard(even_ranges(padded, pipeline * tensor, vocab_size), member)


def stage_rows(shard: VocabShard, config: Any) -> int:
    """The rows of a stage, which megatron-core's layers divide among its tensor-parallel ranks."""
    return shard.range.rows * config.tensor_model_parallel_size


class _VocabRows(torch.nn.Module):
    """A layer whose weight [P, H] is this rank's rows of a standard [V_pad, H] weight."""

    shard: VocabShard
    weight: torch.nn.Parameter

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The standard key and global shape; empty if the weight is tied to another layer's."""
        if self.weight is None:
            return {}
        key = f"{prefix}weight"
        tensor = ShardedTensor.from_rank_offsets(
            key,
            self.weight,
            (0, self.shard.member, len(self.shard.ranges)),
            replica_id=(0, 0, parallel_state.get_data_parallel_rank(with_context_parallel=True)),
            allow_shape_mismatch=True,
        )
        return {key: tensor}


class VocabShardEmbedding(_VocabRows, VocabParallelEmbedding):
    """This rank's rows of the input embedding. There are three kinds of calls:

    - pass IF, with numbers ``[k]`` of this rank's rows: these rows ``[k, H]``;
    - F of the first stage, with token ids ``[b, s]``: the rows ``[b, s, H]`` that the schedule has put into
      ``rows_to_embed``;
    - from outside the schedule, with ``rows_to_embed`` empty: a look-up as in stock Megatron, or a
      ValueError if other stages hold rows.
    """

    def __init__(self, shard: VocabShard, config: Any, **kwargs: Any) -> None:
        super().__init__(stage_rows(shard, config), config.hidden_size, config=config, **kwargs)
        self.shard = shard
        self.rows_to_embed: deque[torch.Tensor] = deque()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if input_.dim() == 2 and self.rows_to_embed:
            return self.rows_to_embed.popleft()
        if input_.dim() == 2:
            if self.num_embeddings != self.shard.ranges[-1].stop:
                raise ValueError(
                    "the model was called outside a forward-backward function, and other stages hold rows of "
                    "its vocabulary layers; load its checkpoint without vocabulary parallelism (in "
                    "Megatron-LM without --enable-vocab-parallel), or with a pipeline size of 1"
                )
            return super().forward(input_)
        return embedding_forward(input_, self.weight.detach())


class VocabShardOutput(_VocabRows, ColumnParallelLinear):
    """This rank's rows of the output weight, or no weight if it is tied.

    Pass S is a call of this module with ``shard_pass``, which gets hidden states [n, H] and the weight
    [P, H]. It must be a call: DDP with ``overlap_param_gather`` waits for the weight in a hook before it.
    Hidden states are converted to the weight's dtype, which is wider than theirs after ``keep_fp32``.

    Any other call comes from outside the schedule. It is stock Megatron's, with ``outside_terms`` of the
    logits: ``[s, b, P]``, or gathered ``[s, b, V_pad]``, with -inf for ids that are padding.
    """

    def __init__(self, shard: VocabShard, config: Any, outside_terms: LossTerms, **kwargs: Any) -> None:
        super().__init__(config.hidden_size, stage_rows(shard, config), config=config, bias=False, **kwargs)
        self.shard = shard
        self.outside_terms = outside_terms
        self._keeps_dtype = False

    def keep_fp32(self) -> None:
        """Make the weight float32, to which later conversions of the model do nothing."""
        self.weight.data = self.weight.data.float()
        self._keeps_dtype = True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if not self._keeps_dtype:
            return super()._apply(fn, recurse)
        return super()._apply(lambda tensor: tensor.to(fn(tensor[:0]).device), recurse)

    def _logits(
        self, x: torch.Tensor, weight: torch.Tensor | None, runtime_gather_output: bool | None
    ) -> tuple[torch.Tensor, None]:
        logits, _ = super().forward(x, weight, runtime_gather_output)
        logits = self.outside_terms.transform(logits)
        shard = self.shard.range
        true_ids = shard.valid_rows if logits.shape[-1] == shard.rows else shard.vocab_size
        logits[..., true_ids:] = -torch.inf
        return logits, None

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        shard_pass: ShardPass | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        x = x.to((self.weight if weight is None else weight).dtype)
        if shard_pass is None:
            return self._logits(x, weight, runtime_gather_output)
        assert weight is not None
        return shard_pass(x, weight.detach())
