"""A distillation takes the memory of the plain loss, chunks of tokens and a few numbers of every token."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from lab.memory import peak_mib
from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.extras.distillation import Comparison, Teacher, TeacherStates
from megatron_vocabpar.layers.extras.extra import Exchange, after_join, join, place_of
from megatron_vocabpar.layers.operands import ShardOptions
from megatron_vocabpar.layers.output.plain import output_forward
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.terms import Distillation, LossTerms
from megatron_vocabpar.layers.token_loss import loss_slopes
from tests.layers.shards import both_gradients

TOKENS, WIDTH, VOCAB, TOP = 512, 32, 65536, 16
CHUNKS_MIB = 88
"""Room for fp32 chunks of 8 MiB: both sides' logarithms, the mixture, terms and slopes."""


def teacher_of(given: str, shard: VocabRange) -> Teacher:
    if given == "stored":
        ids = torch.randint(0, VOCAB // TOP, (TOKENS, 1, TOP)) * TOP + torch.arange(TOP)
        return TopLogprobs(torch.randn(TOKENS, 1, TOP).log_softmax(2) - 0.1, ids)
    if given == "states":
        return TeacherStates(torch.randn(TOKENS, 1, WIDTH), torch.randn(shard.rows, WIDTH))
    return torch.randn(TOKENS, 1, shard.rows)


def _peak(kind: str | None, given: str) -> tuple[float | None, int]:
    """MiB of a microbatch's S, C1 and T, and the numbers that stay of a token; the teacher exists before."""
    how = None if kind is None else Distillation(kind, weight=0.5)
    shard = VocabRange(0, VOCAB, VOCAB)
    x, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCAB, WIDTH)
    targets, main_grad = torch.randint(0, VOCAB, (TOKENS,)), torch.zeros(VOCAB, WIDTH)
    teacher = None if how is None else Comparison(how, teacher_of(given, shard), None, VOCAB)
    terms = LossTerms(distillation=how)
    kept = []

    def microbatch() -> None:
        extras = [] if teacher is None else [teacher]
        state, statistics = output_forward(
            x, weight, targets, shard, ShardOptions(terms=terms), extras=extras
        )
        assert state is not None
        softmax = join(statistics[None], extras, place_of(statistics, extras))
        after_join(state.stored, softmax, extras, Exchange(lambda part: part[None], lambda part: part))
        kept.extend(len(number) for number in softmax.extras.values())
        slopes = loss_slopes(softmax, terms, torch.ones(TOKENS))
        both_gradients(state, softmax, slopes, weight, main_grad)

    return peak_mib(microbatch, torch.device("cpu")), kept[-1] if kept else 0


def measured(kind: str | None, given: str) -> tuple[float, int]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        peak, kept = pool.submit(_peak, kind, given).result()
    assert peak is not None
    return peak, kept


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given", "numbers"),
    [
        ("js", "states", 5),
        ("forward", "logits", 4),
        ("reverse", "logits", 4),
        ("js", "stored", 3 + TOP),
    ],
)
def test_memory_as_of_the_plain_loss(kind: str, given: str, numbers: int) -> None:
    plain, _ = measured(None, given)
    peak, kept = measured(kind, given)
    assert (
        plain >= TOKENS * VOCAB * 4 / 2**20 - 1
    )  # the measurement sees the exponentials, but for some pages
    assert peak < plain + CHUNKS_MIB
    assert kept == numbers
