"""Every loss on a vocabulary in two shards, in one process: ``python examples/losses_logprobs.py``."""

import torch

from megatron_vocabpar.losses import (
    LazyLogits,
    vocab_argmax,
    vocab_cross_entropy,
    vocab_entropy,
    vocab_kl,
    vocab_logprobs,
    vocab_target_rank,
)

logits = torch.tensor([[0.1, -0.2, 1.7, 0.3, 1.2, -0.5]])
target = torch.tensor([4])
shards = list(logits.split(3, dim=-1))  # with a process group: this rank's shard alone, and group=...
print("log-probability", f"{float(vocab_logprobs(shards, target)):.7f}")
print("entropy        ", f"{float(vocab_entropy(shards)):.7f}")
print(
    "cross entropy  ", f"{float(vocab_cross_entropy(shards, target, label_smoothing=0.1, z_loss=1e-4)):.7f}"
)
print(
    "most likely id ",
    int(vocab_argmax(shards)),
    " likelier than the target:",
    int(vocab_target_rank(shards, target)),
)
print("KL to itself   ", f"{float(vocab_kl(shards, shards)):.7f}")

hidden = torch.randn(8, 16, requires_grad=True)
weights = [torch.randn(size, 16, requires_grad=True) for size in (100, 57)]
loss = vocab_cross_entropy(LazyLogits(hidden, weights), torch.randint(0, 157, (8,)), invariant=True)
loss.backward()
print("from hidden states", f"{loss.item():.4f}", "gradient", tuple(hidden.grad.shape))
