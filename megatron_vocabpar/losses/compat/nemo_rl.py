"""NeMo-RL: ``nemo_rl/distributed/model_utils.py``.

Signatures of NVIDIA-NeMo/RL at 7ea279abf. Top-k and top-p filtering (``sampling_params``) is refused.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.losses import functions
from megatron_vocabpar.losses.sources import LazyLogits
from megatron_vocabpar.losses.tensor_parallel import gather_sequence
from megatron_vocabpar.losses.zigzag import zigzag_gather, zigzag_split


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: object | None = None,
) -> Tensor:
    """[b, s/C, P] logits and [b, s] unshifted ids to [b, s-1] log-probabilities of the next ids.

    ``chunk_size`` has no effect: chunks are chosen by size.
    """
    if sampling_params is not None and (
        getattr(sampling_params, "top_k", None) not in (None, -1)
        or getattr(sampling_params, "top_p", 1.0) != 1.0
    ):
        raise ValueError(
            "sampling_params with top-k or top-p: filter the logits first, or keep NeMo-RL's own"
        )
    length = target.shape[1]
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    shifted = target.roll(shifts=-1, dims=-1)
    shifted = torch.nn.functional.pad(shifted, (0, vocab_parallel_logits.shape[1] * size - length), value=0)
    if cp_group is not None and size > 1:
        shifted = zigzag_split(shifted, dist.get_rank(cp_group), size, dim=1)
    shard = VocabRange(vocab_start_index, vocab_end_index, _vocab_size(vocab_end_index, tp_group, target))
    logprobs = functions.vocab_logprobs(
        vocab_parallel_logits,
        shifted,
        group=tp_group,
        ranges=shard,
        inference_only=inference_only,
        keep_exponentials=True,
    )
    if cp_group is not None and size > 1:
        logprobs = allgather_cp_sharded_tensor(logprobs, cp_group)
    return logprobs[:, : length - 1]


def vocab_parallel_argmax(logits: Tensor, *, tp_group: dist.ProcessGroup | None = None) -> Tensor:
    """[..., P] to [...] global ids."""
    return functions.vocab_argmax(logits, group=tp_group)


def allgather_cp_sharded_tensor(tensor: Tensor, cp_group: dist.ProcessGroup, seq_dim: int = 1) -> Tensor:
    """[..., s/C, ...] zigzag parts to [..., s, ...]; the backward pass sums the ranks' gradients."""
    return zigzag_gather(tensor, cp_group, seq_dim, sum_gradients=True)


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """[s/t, b, H] hidden states, [P, H] and [b, s] unshifted ids to [b, s-1] log-probabilities of next ids.

    ``runtime_gather_output`` has no effect. The logits exist for ``chunk_size`` tokens (of all sequences) at
    a time.
    """
    if cp_group is not None and dist.get_world_size(cp_group) != 1:
        raise ValueError("hidden states over context parallelism: gather them first, and leave cp_group out")
    hidden = gather_sequence(tensor_parallel_hidden_states, tp_group)
    shard = VocabRange(vocab_start_index, vocab_end_index, _vocab_size(vocab_end_index, tp_group, target))
    logprobs = functions.vocab_logprobs(
        LazyLogits(hidden.transpose(0, 1), output_weight_layer),
        target.roll(shifts=-1, dims=-1),
        group=tp_group,
        ranges=shard,
        inference_only=inference_only,
        rows_per_chunk=chunk_size,
    )
    return logprobs[:, :-1]


def _vocab_size(vocab_end_index: int, group: dist.ProcessGroup, like: Tensor) -> int:
    """The last shard's end, which the caller does not pass."""
    end = torch.tensor([vocab_end_index], device=like.device)
    dist.all_reduce(end, op=dist.ReduceOp.MAX, group=group)
    return int(end)
