"""Backward for logits that exist takes one tensor like the shard, in its dtype, and small chunks."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from lab.memory import peak_mib
from megatron_vocabpar.losses import vocab_cross_entropy, vocab_entropy, vocab_kl, vocab_logprobs

TOKENS, VOCAB = 512, 65536
CHUNKS_MIB = 16
"""Room for the fp32 chunks of 4 MiB: logits, exponentials, and what the entropy adds."""

DIVERGENCE_CHUNKS_MIB = 36

LOSSES = {
    "log-probabilities": lambda y, t: vocab_logprobs(y, t).sum(),
    "cross entropy": lambda y, t: vocab_cross_entropy(y, t, label_smoothing=0.1, z_loss=1e-4),
    "entropy": lambda y, t: vocab_entropy(y).sum(),
    "divergence": lambda y, t: vocab_kl(y, y.detach()).sum(),
    "invariant": lambda y, t: vocab_logprobs(y, t, invariant=True, rows_per_chunk=8).sum(),
}


def _peaks(name: str, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """MiB of forward and of backward, in a process of its own: measuring changes how it allocates."""
    logits = torch.randn(TOKENS, VOCAB, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCAB, (TOKENS,))
    losses: list[Tensor] = []
    forward = peak_mib(lambda: losses.append(LOSSES[name](logits, targets)), torch.device("cpu"))
    backward = peak_mib(
        lambda: torch.autograd.grad(losses[-1], logits, retain_graph=True), torch.device("cpu")
    )
    return forward, backward


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in LOSSES), ("log-probabilities", torch.float32)],
)
def test_backward_takes_one_shard(name: str, dtype: torch.dtype) -> None:
    shard = TOKENS * VOCAB * dtype.itemsize / 2**20
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # a fork inherits free blocks
        forward, backward = pool.submit(_peaks, name, dtype).result()
    chunks = DIVERGENCE_CHUNKS_MIB if name == "divergence" else CHUNKS_MIB
    assert forward < chunks
    assert shard <= backward + 1  # the gradient itself: the measurement sees it
    assert backward < shard + chunks
