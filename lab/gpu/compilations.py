"""What Triton compiles while microbatches come: one compilation on one rank stalls all of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_vocabpar.layers.embedding import embedding_backward
from megatron_vocabpar.layers.kernels.dispatch import why_not_triton
from megatron_vocabpar.layers.numbers import Slopes
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.partition import even_ranges
from megatron_vocabpar.layers.softmax_stats import merge_stats
from megatron_vocabpar.pipeline.microbatches import IGNORED, Microbatches


def compiled(
    device: torch.device, n: int, hidden: int, vocab_size: int, p: int, microbatches: int, ignored: float
) -> dict[str, Any]:
    """Variants that rank 0 of ``p`` compiles, their seconds, and in which microbatches.

    Args:
        n: tokens of a microbatch, drawn as in text: small ids are frequent.
        ignored: the share of them without a loss.
    """
    if why := why_not_triton(device, torch.float32):
        return {"not_run": why}
    draw = torch.Generator().manual_seed(0)
    ranges = even_ranges(vocab_size, p, vocab_size)
    weight = torch.randn(ranges[0].rows, hidden, device=device).to(torch.bfloat16)
    main_grad = torch.zeros(ranges[0].rows, hidden, device=device)
    counts = []
    with _counted() as names:
        start = time.monotonic()
        for _ in range(microbatches):
            tokens, labels = (torch.rand(2, n, generator=draw) ** 2 * vocab_size).long()
            labels[torch.rand(n, generator=draw) < ignored] = IGNORED
            known = Microbatches(
                shapes=[(1, 1, n)],
                tokens=tokens,
                labels=labels,
                device=device,
                ranges=ranges,
                member=0,
            )[0]
            x = torch.randn(known.tokens, hidden, device=device).to(torch.bfloat16)
            state, stats = output_forward(x, weight, known.targets, ranges[0], ShardOptions())
            softmax = merge_stats(torch.stack([stats] * p))
            slopes = Slopes(torch.ones(len(x), device=device))
            assert state is not None
            state.input_gradient(softmax, slopes)
            state.add_weight_gradient(softmax, slopes, main_grad)
            rows = known.owned_rows
            embedding_backward(x.new_zeros(len(rows), hidden), rows, main_grad, order=known.by_row)
            counts.append(len(names))
    first = counts[0]
    return {
        "variants": counts[-1],
        "after_the_first_microbatch": counts[-1] - first,
        "last_at": max((i for i in range(1, len(counts)) if counts[i] > counts[i - 1]), default=0),
        "seconds": time.monotonic() - start,
    }


@contextmanager
def _counted() -> Iterator[list[str]]:
    """The names of kernels as Triton compiles them, with an empty cache."""
    import triton

    names: list[str] = []
    knobs = triton.knobs
    before = knobs.runtime.jit_post_compile_hook, knobs.cache.dir

    def hook(**facts: Any) -> None:
        names.append(facts["fn"].name)

    with tempfile.TemporaryDirectory() as folder:
        knobs.runtime.jit_post_compile_hook, knobs.cache.dir = hook, folder
        try:
            yield names
        finally:
            knobs.runtime.jit_post_compile_hook, knobs.cache.dir = before
