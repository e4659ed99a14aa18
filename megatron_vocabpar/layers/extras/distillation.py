"""The divergence of a student from a teacher as one more number of every token, and its gradient.

Pass S has stored the student's exponentials. When the statistics of all shards have met, log q_j is known on
every shard without another product, and a second, small exchange gives the divergence:

    a teacher with all logits     log-sum-exps of the teacher; then one sum of terms per token, two for js
    a stored top k                k + 1 bins per token (``bins.py``), of which every rank makes it

Both are made of chunks of tokens, and again for the gradient: no [n, P] tensor is kept. Logits are relative
to the softmax's offset K: with E = exp(Y - k ln 2), ``Y_j - K ln 2 = ln E_j + (k - K) ln 2``.
An E that is stored as 0 counts as the smallest normal number, 2^-126 of the likeliest id in bf16 and fp32.
In fp16 it would be 2^-38, which 131,072 ids and a temperature make visible: ``check_storage`` refuses that.

Next: ``../output/plain.py``, which adds the gradient to the rows of E.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_vocabpar.layers.bins import BinSlopes, TopLogprobs, shard_bins
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
    """Compares a student with its teacher on one shard. The number is [w, n], the divergence first.

    Args:
        how: which divergence.
        counted: [n] the student's tokens among the teacher's; None for all.
    """

    name = "divergence"
    has_curve = True
    reports = MappingProxyType({"divergence": "divergence", "cross_entropy": "cross-entropy"})

    def __init__(self, how: Distillation, counted: Tensor | None) -> None:
        self.how = how
        self.divergence = Divergence(_mixture(how))
        self._counted = counted

    @property
    @abstractmethod
    def width(self) -> int:
        """How many numbers a token has: the divergence, the student's log-sum-exp, and what follows."""

    @abstractmethod
    def _fill(self, student: StoredExponentials, softmax: Softmax, exchange: Exchange, out: Tensor) -> None:
        """Write the numbers [w, n] but for the second, which is there."""

    @abstractmethod
    def slopes(self, student: StoredExponentials, softmax: Softmax, rows: slice) -> Tensor:
        """[c, P'] the gradient of a chunk's divergences by the student's logits."""

    def place(self, like: Tensor) -> Tensor:
        return like.new_empty((self.width, *like.shape))

    def check_storage(self, dtype: torch.dtype) -> None:
        if torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny:
            raise ValueError(
                f"distillation with exponentials in {dtype}, which has no small numbers for unlikely ids: "
                "use bfloat16, or keep the output layer in float32 (fp32_head)"
            )

    def after_join(
        self, stored: StoredExponentials, softmax: Softmax, exchange: Exchange, out: Tensor
    ) -> None:
        temperature = self.how.temperature
        out[1] = softmax.total.log()
        if temperature != 1:
            local = [stored.logits(softmax, rows, temperature).logsumexp(1) for rows in stored.chunks()]
            out[1] = exchange.gather(torch.cat(local)).logsumexp(0)
        self._fill(stored, softmax, exchange, out)

    def value(self, softmax: Softmax) -> Tensor:
        return super().value(softmax)[0]

    def deliver(self, softmax: Softmax) -> dict[str, Tensor]:
        divergence = torch.where(softmax.valid, self.value(softmax), 0)
        return {"divergence": divergence, "cross_entropy": softmax.nll}

    def curve(self, stored: StoredExponentials, softmax: Softmax, slope: Tensor, rows: slice) -> Tensor:
        """Where the slope is 0 the gradient is left out: a teacher may have NaN at masked tokens."""
        factor = slope[rows].unsqueeze(1)
        return self.slopes(stored, softmax, rows).mul_(factor).masked_fill_(factor == 0, 0)

    def of(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """Both in the order of the divergence's p and q."""
        return (student, teacher) if self.how.kind == "reverse" else (teacher, student)

    def _log_q(self, student: StoredExponentials, softmax: Softmax, numbers: Tensor, rows: slice) -> Tensor:
        return student.logits(softmax, rows, self.how.temperature).sub_(numbers[1, rows].unsqueeze(1))

    def _taken(self, values: Tensor, rows: slice) -> Tensor:
        """A chunk of the student's tokens, of the teacher's [s, b, ...]."""
        flat = values.flatten(0, 1)
        return flat[rows] if self._counted is None else flat.index_select(0, self._counted[rows])


class WithAllLogits(Comparison):
    """Compares with a teacher's logits, or with states that they are made of.

    Rows of the number: D, the log-sum-exp of the student, that of the teacher, the sums that make up D.
    """

    def __init__(self, how: Distillation, given: Tensor | TeacherStates, counted: Tensor | None) -> None:
        super().__init__(how, counted)
        self._given = given

    @property
    def width(self) -> int:
        return 3 + len(self.divergence.weights)

    def _teacher(self, student: StoredExponentials, rows: slice, dtype: torch.dtype) -> Tensor:
        """[c, P'] the teacher's logits over the temperature, a copy."""
        valid = student.shard.valid_rows
        if isinstance(self._given, TeacherStates):
            hidden, weight = self._taken(self._given.hidden, rows), self._given.weight[:valid]
            return product(hidden, weight.t()).to(dtype).div_(self.how.temperature)
        return self._taken(self._given, rows)[:, :valid].to(dtype, copy=True).div_(self.how.temperature)

    def _logs(
        self, student: StoredExponentials, softmax: Softmax, numbers: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor]:
        log_p = self._teacher(student, rows, numbers.dtype).sub_(numbers[2, rows].unsqueeze(1))
        return self.of(log_p, self._log_q(student, softmax, numbers, rows))

    def _fill(self, student: StoredExponentials, softmax: Softmax, exchange: Exchange, out: Tensor) -> None:
        chunks = student.chunks()
        local = [self._teacher(student, rows, out.dtype).logsumexp(1) for rows in chunks]
        out[2] = exchange.gather(torch.cat(local)).logsumexp(0)
        for rows in chunks:
            terms = self.divergence.terms(*self._logs(student, softmax, out, rows))
            for sums, term in zip(out[3:], terms, strict=True):
                sums[rows] = term.sum(1)
        out[3:] = exchange.total(out[3:].contiguous())
        out[0] = self.divergence.value(out[3:])

    def slopes(self, student: StoredExponentials, softmax: Softmax, rows: slice) -> Tensor:
        numbers = softmax.extras[self.name]
        of = (False, True) if self.how.kind != "reverse" else (True, False)
        pair = self.divergence.slopes(*self._logs(student, softmax, numbers, rows), numbers[3:, rows], of)
        slope = pair[of.index(True)]
        assert slope is not None
        return slope.div_(self.how.temperature)


class WithTop(Comparison):
    """Compares with a stored top k. Rows: D, the student's log-sum-exp, log R, log q of each id."""

    def __init__(self, how: Distillation, stored: TopLogprobs, counted: Tensor | None) -> None:
        super().__init__(how, counted)
        whole = slice(None)
        self._stored = TopLogprobs(self._taken(stored.logprobs, whole), self._taken(stored.ids, whole))
        self._ids = self._stored.known_ids

    @property
    def width(self) -> int:
        return 3 + self._ids.shape[1]

    def _value(self, rest: Tensor, top: Tensor, rows: slice) -> Tensor:
        stored = TopLogprobs(self._stored.logprobs[rows], self._stored.ids[rows])
        bins = stored.bins_of(top, rest)
        return self.divergence.of_bins(*self.of(stored.bins(bins.dtype), bins))

    def _fill(self, student: StoredExponentials, softmax: Softmax, exchange: Exchange, out: Tensor) -> None:
        parts = [
            shard_bins(self._log_q(student, softmax, out, rows), self._ids[rows], student.shard)
            for rows in student.chunks()
        ]
        bins = exchange.total(torch.cat(parts))
        out[2], out[3:] = bins[:, -1].log(), bins[:, :-1].t()
        out[0] = self._value(out[2], out[3:].t(), slice(None))

    def _bin_slopes(self, numbers: Tensor, rows: slice) -> BinSlopes:
        with torch.enable_grad():
            rest, top = (each.clone().requires_grad_() for each in (numbers[2, rows], numbers[3:, rows].t()))
            by_rest, by_top = torch.autograd.grad(self._value(rest, top, rows).sum(), (rest, top))
        temperature = self.how.temperature
        return BinSlopes.of(by_top / temperature, by_rest / temperature, rest.detach())

    def slopes(self, student: StoredExponentials, softmax: Softmax, rows: slice) -> Tensor:
        numbers = softmax.extras[self.name]
        q = self._log_q(student, softmax, numbers, rows).exp_()
        return self._bin_slopes(numbers, rows).apply_(q, self._ids[rows], student.shard)


def comparison(how: Distillation, given: Teacher, counted: Tensor | None, vocab_size: int) -> Comparison:
    """A microbatch's comparison with what its teacher gives; ``counted`` are the tokens, None for all."""
    if isinstance(given, TopLogprobs):
        return WithTop(how, given.within(vocab_size), counted)
    return WithAllLogits(how, given, counted)


def _mixture(how: Distillation) -> float | None:
    return how.mixture if how.kind == "js" else None


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
