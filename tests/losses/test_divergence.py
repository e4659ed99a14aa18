"""Divergences for distillation on simulated shards and real ranks, against unsharded float64 definitions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vocabpar.layers.partition import ranges_from_sizes
from megatron_vocabpar.losses import LazyLogits, TopLogprobs, vocab_kl, vocab_top
from tests.losses import reference
from tests.losses.reference import UNEVEN, VOCAB, error
from tests.spawn import run_ranks

KINDS = ("forward", "reverse", "js")
MIXTURE = 0.3
K = 7


def example() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [2, 4, 16] and weight [V, 16] of a student, and logits [2, 4, V] of a teacher near it."""
    draw = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 4, 16, generator=draw), torch.randn(VOCAB, 16, generator=draw)
    return hidden, weight, hidden @ weight.t() + torch.randn(2, 4, VOCAB, generator=draw)


def ordered(kind: str, teacher: object, student: object) -> tuple[object, object]:
    return (student, teacher) if kind == "reverse" else (teacher, student)


def divergence(kind: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """From its definition; in the order of ``ordered``."""
    if kind != "js":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    m = (MIXTURE * log_p.exp() + (1 - MIXTURE) * log_q.exp()).log()
    sides = [(logs.exp() * (logs - m)).sum(-1) for logs in (log_p, log_q)]
    return MIXTURE * sides[0] + (1 - MIXTURE) * sides[1]


def binned(logs: Tensor, ids: Tensor) -> Tensor:
    """[..., k + 1] the logarithms of the ids' probabilities and of the others' sum."""
    others = torch.ones_like(logs).scatter(-1, ids, 0)
    rest = (logs.exp() * others).sum(-1, keepdim=True)
    return torch.cat([logs.gather(-1, ids), rest.log()], -1)


def expected_of(
    kind: str, top: bool, hidden: Tensor, weight: Tensor, teacher: Tensor, temperature: float
) -> tuple[Tensor, list[Tensor]]:
    """The divergences, and the gradients of a sum of them by logits, hidden states and weight."""
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    logits = leaves[0] @ leaves[1].t()
    logs = [reference.log_softmax(each, temperature) for each in (teacher.double(), logits)]
    if top:
        ids = teacher.topk(K).indices
        logs = [binned(each, ids) for each in logs]
    value = divergence(kind, *ordered(kind, *logs))
    ramp = torch.linspace(-1, 2, 8, dtype=torch.float64).view(2, 4)
    return value, list(torch.autograd.grad((value * ramp).sum(), [logits, *leaves]))


def _furthest(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max())


@pytest.mark.parametrize("sizes", [UNEVEN[p] for p in (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("given", ["logits", "hidden states", "stored"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_teacher_for_logits_and_hidden_states(kind: str, given: str, sizes: tuple[int, ...]) -> None:
    hidden, weight, logits = example()
    mixture, temperature = MIXTURE if kind == "js" else None, 1.3
    teacher: object = list(logits.split(sizes, dim=-1))
    if given == "hidden states":  # [logits | 0] = [[hidden, logits]] [weight of a unit matrix]
        teacher = LazyLogits(logits, list(torch.eye(VOCAB).split(sizes)))
    if given == "stored":
        teacher = vocab_top(teacher, K, temperature=temperature)
        assert torch.equal(teacher.ids, logits.topk(K).indices)
    value, gradients = expected_of(kind, given == "stored", hidden, weight, logits, temperature)
    options = {"mixture": mixture, "temperature": temperature, "rows_per_chunk": 3}
    ramp = torch.linspace(-1, 2, 8).view(2, 4)

    shards = [part.requires_grad_() for part in (hidden @ weight.t()).split(sizes, dim=-1)]
    found = vocab_kl(*ordered(kind, teacher, shards), **options)
    assert _furthest(found, value) < 1e-5
    parts = torch.autograd.grad((found * ramp).sum(), shards)
    assert error(torch.cat(parts, -1), gradients[0]) < 1e-5

    x, rows = hidden.clone().requires_grad_(), [part.clone().requires_grad_() for part in weight.split(sizes)]
    lazy = vocab_kl(*ordered(kind, teacher, LazyLogits(x, rows)), **options)
    assert _furthest(lazy, value) < 1e-5
    dx, *dw = torch.autograd.grad((lazy * ramp).sum(), [x, *rows])
    assert error(dx, gradients[1]) < 1e-5
    assert error(torch.cat(dw), gradients[2]) < 1e-5


def _ranks(rank: int, size: int) -> None:
    group, sizes = dist.group.WORLD, UNEVEN[size]
    ranges = ranges_from_sizes(sizes, VOCAB)
    mine = ranges[rank]
    hidden, weight, logits = example()
    here = slice(mine.start, mine.stop)
    layout = {"group": group, "ranges": ranges}
    stored = vocab_top(logits[..., here], K, **layout)
    torch.testing.assert_close(stored.logprobs, reference.log_softmax(logits).topk(K).values)
    for kind in KINDS:
        for teacher in (logits[..., here], stored):
            value, gradients = expected_of(kind, teacher is stored, hidden, weight, logits, 1.0)
            x, w = hidden.clone().requires_grad_(), weight[here].clone().requires_grad_()
            mixture = MIXTURE if kind == "js" else None
            found = vocab_kl(*ordered(kind, teacher, LazyLogits(x, w)), mixture=mixture, **layout)
            assert _furthest(found, value) < 1e-5
            dx, dw = torch.autograd.grad((found * torch.linspace(-1, 2, 8).view(2, 4)).sum(), [x, w])
            assert error(dx, gradients[1]) < 1e-5
            assert error(dw, gradients[2][here]) < 1e-5


def test_processes() -> None:
    run_ranks(3, _ranks, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_into_both_sides(kind: str) -> None:
    """By finite differences; of stored ids one does not count."""
    draw = torch.Generator().manual_seed(5)
    p, q = (torch.randn(3, 9, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2))
    mixture = MIXTURE if kind == "js" else None

    def both(p: Tensor, q: Tensor) -> Tensor:
        return vocab_kl(*ordered(kind, p.split((4, 0, 5), 1), q.split((4, 0, 5), 1)), mixture=mixture)

    assert torch.autograd.gradcheck(both, (p, q))
    stored = vocab_top(p.detach(), 4)
    stored.logprobs[1, 3] = -1e3

    def bins(q: Tensor) -> Tensor:
        return vocab_kl(*ordered(kind, stored, q.split((4, 5), 1)), mixture=mixture)

    assert torch.autograd.gradcheck(bins, (q,))
    assert torch.autograd.gradcheck(lambda q: vocab_kl(q, stored, mixture=mixture), (q,))
    fewer = TopLogprobs(stored.logprobs[1:2, :3], stored.ids[1:2, :3])
    torch.testing.assert_close(
        bins(q)[1:2], vocab_kl(*ordered(kind, fewer, q[1:2].split((4, 5), 1)), mixture=mixture)
    )


def test_a_stored_id_beyond_the_vocabulary_counts_as_another() -> None:
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(6))
    stored = vocab_top(logits, 3)
    beyond = TopLogprobs(
        torch.cat([stored.logprobs, torch.full((2, 1), -2.0)], 1),
        torch.cat([stored.ids, torch.full((2, 1), 6)], 1),
    )
    torch.testing.assert_close(vocab_kl(beyond, 0.5 * logits), vocab_kl(stored, 0.5 * logits))


def test_nothing_beyond_the_stored_ids() -> None:
    """All ids are stored, or nearly all of the mass: the rest is 1e-8 on both sides, as in Megatron-LM."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [40.0, 1.0, 0.0]])
    student = torch.tensor([[1.0, 0.0, 0.5], [41.0, 0.0, 1.0]]).requires_grad_()
    stored = vocab_top(logits, 3)
    log_p, log_q = logits.double().log_softmax(1), student.double().log_softmax(1)
    found = vocab_kl(stored, student)
    torch.testing.assert_close(found.double(), (log_p.exp() * (log_p - log_q)).sum(1), atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(grad.double(), log_q.exp() - log_p.exp(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_id_that_the_student_cannot_choose(kind: str) -> None:
    """Its logit is -inf: only the forward KL is infinite, and no gradient is NaN but that one's."""
    teacher = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(-1)
    student = torch.tensor([[float("-inf"), 1.0, 2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    stored = TopLogprobs(*teacher.topk(2))
    found = vocab_kl(*ordered(kind, stored, student), mixture=MIXTURE if kind == "js" else None)
    if kind == "forward":
        assert found.item() == float("inf")
        return
    finite = torch.where(student.isinf(), -700.0, student.detach())
    logs = [binned(each.double().log_softmax(-1), stored.ids) for each in (teacher, finite)]
    assert error(found.detach(), divergence(kind, *ordered(kind, *logs))) < 1e-6
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient.isfinite().all()


def test_a_certain_teacher_keeps_what_it_gives_the_other_ids() -> None:
    """From 2e-8 on, which is less than a digit of 1 in float32."""
    rest = torch.logspace(-7.7, -5, 40, dtype=torch.float64)
    logs = torch.stack([torch.log1p(-rest), *[(rest / 8).log()] * 8], 1)
    stored = TopLogprobs(logs[:, :3].float(), torch.arange(3).expand(40, 3))
    student = torch.randn(40, 9, generator=torch.Generator().manual_seed(8))
    log_p, log_q = (binned(each.double().log_softmax(1), stored.ids) for each in (student, logs))
    expected = (log_p.exp() * (log_p - log_q)).sum(1)
    torch.testing.assert_close(vocab_kl(student, stored).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, s: vocab_kl(s, s), "both stored"),
        (lambda x, s: vocab_kl(s, x[:1]), r"p has tokens \(2,\), q \(1,\)"),
        (lambda x, s: vocab_kl(s, x, invariant=True), "leave it out"),
        (lambda x, s: vocab_kl(x, x, mixture=1.0), "mixture 1.0: give more than 0"),
        (lambda x, s: vocab_top(x, 5), "the 5 most likely ids of 4: give 1 up to 4"),
        (lambda x, s: TopLogprobs(s.logprobs, s.ids[:1]), "one integer id for each"),
    ],
)
def test_wrong_arguments_are_named(call: object, says: str) -> None:
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match=says):
        call(x, vocab_top(x, 2))  # type: ignore[operator]
