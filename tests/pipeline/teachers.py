"""A teacher with random logits, in each way in which the pipeline takes one, and the loss by definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.extras.distillation import Teacher, TeacherStates
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.terms import Distillation

if TYPE_CHECKING:
    from tests.pipeline.gpt import Case

TOP = 5
WIDTH = 12


def states_and_weight(case: Case, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Hidden states [s, b, WIDTH] of a microbatch, by its number in the global order; weight [V, WIDTH]."""
    shape = (case.seq_length, case.micro_batch_size, WIDTH)
    weight = torch.randn(case.vocab_size, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.randn(shape, generator=torch.Generator().manual_seed(5000 * step + number + 2)), weight


def teacher_of(case: Case, step: int, replica: int, shard: VocabRange) -> Callable[[int], Teacher]:
    """What the teacher gives the rank that holds ``shard``; NaN at its padding ids."""
    how = case.output_options.distillation
    assert how is not None

    def give(i: int) -> Teacher:
        hidden, weight = states_and_weight(case, step, replica * case.m + i)
        if case.teacher == "stored":
            found = (hidden @ weight.t() / how.temperature).log_softmax(2).topk(TOP)
            return TopLogprobs(found.values, found.indices)
        rows = torch.full((shard.rows, WIDTH), torch.nan)
        rows[: shard.valid_rows] = weight[shard.start : shard.start + shard.valid_rows]
        return TeacherStates(hidden, rows) if case.teacher == "states" else hidden @ rows.t()

    return give


def unsharded_loss(case: Case, how: Distillation) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """``compute_language_model_loss`` of stock, in float64; an evaluation has the cross-entropy alone."""
    numbers: Iterator[int] = count()
    whole = case.unsharded().m

    def loss(_: Any, labels: Tensor, logits: Tensor) -> Tensor:
        logits = logits.double()
        nll = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
        if not torch.is_grad_enabled():
            return nll.float()
        step, number = divmod(next(numbers), whole)
        hidden, weight = states_and_weight(case, step, number)
        logs = [(each / how.temperature).log_softmax(2) for each in ((hidden @ weight.t()).double(), logits)]
        if case.teacher == "stored":
            ids = logs[0].topk(TOP).indices
            logs = [_binned(each, ids) for each in logs]
        return ((1 - how.weight) * nll + how.weight * _divergence(how, *logs).t()).float()

    return loss


def _binned(logs: Tensor, ids: Tensor) -> Tensor:
    others = logs.exp() * torch.ones_like(logs).scatter(2, ids, 0)
    return torch.cat([logs.gather(2, ids), others.sum(2, keepdim=True).log()], 2)


def _divergence(how: Distillation, teacher: Tensor, student: Tensor) -> Tensor:
    if how.kind == "forward":
        return (teacher.exp() * (teacher - student)).sum(2)
    if how.kind == "reverse":
        return (student.exp() * (student - teacher)).sum(2)
    b = how.mixture
    m = (b * teacher.exp() + (1 - b) * student.exp()).log()
    return b * (teacher.exp() * (teacher - m)).sum(2) + (1 - b) * (student.exp() * (student - m)).sum(2)
