"""A small tensor-parallel GPT trained on the library's loss: ``torchrun --nproc-per-node 2`` this file.

Heads, feed-forward and vocabulary are split over the ranks; no rank ever holds the logits of all ids.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vocabpar.layers.partition import even_ranges
from megatron_vocabpar.losses import LazyLogits, vocab_cross_entropy
from megatron_vocabpar.losses.tensor_parallel import all_reduce, copy_to_shards

VOCAB, HIDDEN, HEADS, LENGTH = 64, 64, 4, 32


class Block(nn.Module):
    """One layer: this rank's heads and feed-forward columns, summed over the ranks twice."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, size = group, dist.get_world_size(group)
        self.heads = HEADS // size
        width = HIDDEN // size
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * width, bias=False), nn.Linear(width, HIDDEN, bias=False)
        self.up, self.down = (
            nn.Linear(HIDDEN, 4 * width, bias=False),
            nn.Linear(4 * width, HIDDEN, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(copy_to_shards(self.norm1(x), self.group)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + all_reduce(self.out(mixed.transpose(1, 2).flatten(2)), self.group)
        inner = nn.functional.gelu(self.up(copy_to_shards(self.norm2(x), self.group)))
        return x + all_reduce(self.down(inner), self.group)


def main() -> None:
    dist.init_process_group("gloo")
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shard = even_ranges(VOCAB, size, VOCAB)[rank]
    torch.manual_seed(0)  # replicated parameters are equal on every rank
    embedding, position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
    torch.manual_seed(1 + rank)
    blocks = nn.Sequential(*(Block(group) for _ in range(2)))
    weight = nn.Parameter(0.02 * torch.randn(shard.rows, HIDDEN))
    parameters = [*embedding.parameters(), *position.parameters(), *blocks.parameters(), weight]
    optimiser = torch.optim.AdamW(parameters, lr=3e-3)
    draw = torch.Generator().manual_seed(2)
    for step in range(1, 61):
        first = torch.randint(0, VOCAB, (8, 1), generator=draw)
        tokens = (first + 3 * torch.arange(LENGTH + 1)) % VOCAB  # each id is the last plus 3
        hidden = blocks(embedding(tokens[:, :-1]) + position.weight)
        loss = vocab_cross_entropy(LazyLogits(hidden, weight), tokens[:, 1:], group=group, ranges=shard)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
