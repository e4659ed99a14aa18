"""Zigzag context parallelism: deal a sequence out, put it together, log-probabilities of it.

In one process: ``python examples/losses_context_parallel.py``. On two ranks, each with half of the sequence:
``torchrun --nproc-per-node 2 examples/losses_context_parallel.py``.
"""

import os

import torch
import torch.distributed as dist

from megatron_vocabpar.losses import vocab_logprobs
from megatron_vocabpar.losses.zigzag import (
    context_parallel_logprobs,
    zigzag_gather,
    zigzag_order,
    zigzag_split,
)

LENGTH, VOCAB = 8, 12
torch.manual_seed(0)
logits, targets = torch.randn(1, LENGTH, VOCAB), torch.randint(0, VOCAB, (1, LENGTH))
whole = vocab_logprobs(logits, targets)


def on_a_rank() -> None:
    """Log-probabilities of this rank's half of the sequence, beside those of all of it."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    vocabulary = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]  # no tensor parallelism
    mine = zigzag_split(logits, rank, dist.get_world_size(), dim=1).requires_grad_()
    found = context_parallel_logprobs(mine, targets, cp_group=group, group=vocabulary)
    found.sum().backward()  # the same loss on every rank
    difference = float((found.detach() - whole).abs().max())
    print(f"rank {rank}: {tuple(mine.shape)} of logits, difference {difference:.1e}")
    dist.destroy_process_group()


if "RANK" in os.environ:
    on_a_rank()
else:
    print("positions of each of 2 ranks:", zigzag_order(LENGTH, 2).tolist())
    print("two packed sequences:        ", zigzag_order(LENGTH, 2, cu_seqlens=[0, 4, 8]).tolist())
    parts = [zigzag_split(whole, rank, 2) for rank in range(2)]
    print("together again:", torch.equal(zigzag_gather(parts), whole))
