"""Entropy from the stored exponentials of all shards, beside that of the whole softmax."""

from __future__ import annotations

import pytest
import torch

from megatron_vocabpar.layers.entropy import entropy_part, merged_entropy
from megatron_vocabpar.layers.output import OutputState, output_forward
from megatron_vocabpar.layers.partition import even_ranges
from megatron_vocabpar.layers.softmax_stats import merge_stats
from megatron_vocabpar.layers.terms import LossTerms

N, H, V, SHARDS = 9, 16, 61, 4


@pytest.mark.parametrize(
    ("dtype", "terms", "size", "tolerance"),
    [
        (torch.float32, LossTerms(), 1.0, 2e-6),
        (torch.float32, LossTerms(logit_scale=0.7), 10.0, 2e-6),
        (torch.float32, LossTerms(), 200.0, 2e-4),
        (torch.bfloat16, LossTerms(label_smoothing=0.1), 1.0, 1e-2),
    ],
)
def test_entropy(dtype: torch.dtype, terms: LossTerms, size: float, tolerance: float) -> None:
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, H, generator=random).to(dtype) for rows in (N, 64))
    x *= size
    targets = torch.randint(V, (N,), generator=random)
    targets[3] = -100
    targets[4] = (x[4].double() @ w[:V].double().T).argmax()  # a target that has nearly all
    gathered, parts = [], []
    for shard in even_ranges(64, SHARDS, V):
        rows = w[shard.start : shard.stop]
        state, statistics = output_forward(x, rows, targets, shard, with_input_gradient=False, terms=terms)
        assert isinstance(state, OutputState)
        packed = entropy_part(state, statistics)
        gathered.append(packed[:, :-1])
        parts.append(packed[:, -1])
    stack = torch.stack(gathered)
    merged = merge_stats(stack, terms)
    found = merged_entropy(stack, torch.stack(parts), merged)
    logits = terms.transform(x.double() @ w[:V].double().T)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
