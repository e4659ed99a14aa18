"""The divergence of a student from a teacher as one more number of every token, and its gradient.

Pass S has stored the student's exponentials. When the statistics of all shards have met, log q_j is known on
every shard without another product, and a second, small exchange gives the divergence:

    a teacher with all logits     log-sum-exps of the teacher; then one sum per token, two for js
    a stored top k                k + 1 sums per token (``../bins.py``)

Both are made of chunks of tokens, and again for the gradient: no [n, P] tensor is kept. Logits are relative
to the softmax's offset K: with E = exp(Y - k ln 2), ``Y_j - K ln 2 = ln E_j + (k - K) ln 2``.
An E that is stored as 0 counts as the smallest normal number, 2^-126 of the likeliest id in bf16 and fp32.
In fp16 it would be 2^-38, which 131,072 ids and a temperature make visible: ``check_storage`` refuses that.

Next: ``../output/plain.py``, which adds the gradient to the rows of E.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_vocabpar.layers.bins import BinnedDivergence, TopLogprobs
from megatron_vocabpar.layers.divergence import Divergence
from megatron_vocabpar.layers.extras.extra import Exchange, Extra
from megatron_vocabpar.layers.gemm import product
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.stored import StoredExponentials
from megatron_vocabpar.layers.terms import Distillation


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """A teacher whose logits on this shard are ``hidden @ weight.T``, made a few tokens at a time.

    Attributes:
        hidden: [s, b, H'] of its last layer, the same on every rank.
        weight: [P, H'] its output weight's rows of this shard.
    """

    hidden: Tensor
    weight: Tensor


Teacher = Tensor | TeacherStates | TopLogprobs
"""What a teacher gives for a microbatch: this shard's logits [s, b, P], states, or a stored [s, b, k]."""


class Comparison(Extra):
    """Compares a student with its teacher on one shard.

    The number is [w, n]: the divergence, the log-sum-exps of the student and of a teacher that has them, and
    the sums that the divergence is made of.

    Args:
        how: which divergence.
        given: what the teacher gives for the microbatch.
        counted: [n] the student's tokens among the teacher's; None for all.
        vocab_size: of both.
    """

    name = "divergence"
    has_curve = True
    reports = MappingProxyType({"divergence": "divergence", "cross_entropy": "cross-entropy"})

    def __init__(self, how: Distillation, given: Teacher, counted: Tensor | None, vocab_size: int) -> None:
        self._how, self._counted = how, counted
        self._student_first = how.kind == "reverse"
        divergence = Divergence(how.mixture if how.kind == "js" else None)
        self._divergence: Divergence | BinnedDivergence = divergence
        self._teacher: Tensor | TeacherStates | None = None
        if isinstance(given, TopLogprobs):
            whole = slice(None)
            stored = TopLogprobs(self._taken(given.logprobs, whole), self._taken(given.ids, whole))
            self._divergence = BinnedDivergence.of(
                divergence, stored, vocab_size, stored_first=not self._student_first
            )
        else:
            self._teacher = given
        self._sums = slice(2 if self._teacher is None else 3, None)

    def place(self, like: Tensor) -> Tensor:
        return like.new_empty((self._sums.start + self._divergence.width, *like.shape))

    def check_storage(self, dtype: torch.dtype) -> None:
        if torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny:
            raise ValueError(
                f"distillation with exponentials in {dtype}, which has no small numbers for unlikely ids: "
                "use bfloat16, or keep the output layer in float32 (fp32_head)"
            )

    def after_join(
        self, stored: StoredExponentials, softmax: Softmax, exchange: Exchange, out: Tensor
    ) -> None:
        temperature, chunks = self._how.temperature, stored.chunks()
        out[1] = softmax.total.log()
        if temperature != 1:
            local = [stored.logits(softmax, rows, temperature).logsumexp(1) for rows in chunks]
            out[1] = exchange.gather(torch.cat(local)).logsumexp(0)
        if self._teacher is not None:
            local = [self._teacher_logits(stored, rows).logsumexp(1) for rows in chunks]
            out[2] = exchange.gather(torch.cat(local)).logsumexp(0)
        shares = [
            self._divergence.part(rows).shares(self._logs(stored, softmax, out, rows), stored.shard)
            for rows in chunks
        ]
        sums = exchange.total(torch.cat(shares))
        out[self._sums] = sums.t()
        out[0] = self._divergence.value(sums)

    def value(self, softmax: Softmax) -> Tensor:
        return super().value(softmax)[0]

    def deliver(self, softmax: Softmax) -> dict[str, Tensor]:
        divergence = torch.where(softmax.valid, self.value(softmax), 0)
        return {"divergence": divergence, "cross_entropy": softmax.nll}

    def curve(self, stored: StoredExponentials, softmax: Softmax, slope: Tensor, rows: slice) -> Tensor:
        """Where the slope is 0 the gradient is left out: a teacher may have NaN at masked tokens."""
        numbers, slope = softmax.extras[self.name], slope[rows] / self._how.temperature
        logs = self._logs(stored, softmax, numbers, rows)
        of = [self._student_first, not self._student_first] if len(logs) > 1 else [True]
        gradient = self._divergence.part(rows).gradient(numbers[self._sums, rows].t(), slope)
        by_student = gradient.apply_(logs, stored.shard, of)[of.index(True)]
        assert by_student is not None
        return by_student.masked_fill_(slope.unsqueeze(1) == 0, 0)

    def _logs(
        self, student: StoredExponentials, softmax: Softmax, numbers: Tensor, rows: slice
    ) -> list[Tensor]:
        """[c, P'] each: the log-probabilities of a chunk, in the order of the divergence's p and q."""
        of_student = student.logits(softmax, rows, self._how.temperature).sub_(numbers[1, rows].unsqueeze(1))
        if self._teacher is None:
            return [of_student]
        of_teacher = self._teacher_logits(student, rows).sub_(numbers[2, rows].unsqueeze(1))
        return [of_student, of_teacher] if self._student_first else [of_teacher, of_student]

    def _teacher_logits(self, student: StoredExponentials, rows: slice) -> Tensor:
        """[c, P'] the teacher's logits over the temperature, a copy in the statistics' dtype."""
        dtype, valid = student.k.dtype, student.shard.valid_rows
        if isinstance(self._teacher, TeacherStates):
            hidden, weight = self._taken(self._teacher.hidden, rows), self._teacher.weight[:valid]
            return product(hidden, weight.t()).to(dtype).div_(self._how.temperature)
        assert self._teacher is not None
        return self._taken(self._teacher, rows)[:, :valid].to(dtype, copy=True).div_(self._how.temperature)

    def _taken(self, values: Tensor, rows: slice) -> Tensor:
        """A chunk of the student's tokens, of the teacher's [s, b, ...]."""
        flat = values.flatten(0, 1)
        return flat[rows] if self._counted is None else flat.index_select(0, self._counted[rows])


def check_teacher(given: Teacher, tokens: tuple[int, int], shard: VocabRange) -> None:
    """Refuse what a teacher gives if it is not for ``tokens`` (s, b) and the shard's ids.

    Raises:
        ValueError: naming both shapes.
    """
    first = given.ids if isinstance(given, TopLogprobs) else given
    tensor = first.hidden if isinstance(first, TeacherStates) else first
    if tuple(tensor.shape[:-1]) != tokens:
        raise ValueError(
            f"the teacher has tokens {tuple(tensor.shape[:-1])}, the microbatch (s, b) = {tokens}"
        )
    if isinstance(given, TopLogprobs):
        return
    rows = given.weight.shape[0] if isinstance(given, TeacherStates) else given.shape[-1]
    if rows != shard.rows:
        raise ValueError(
            f"the teacher has {rows} ids on this rank, the student's shard {shard.rows}, from {shard.start} "
            f"to {shard.stop}: shard them alike"
        )
