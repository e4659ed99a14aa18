"""The handle in the logits' place, and steps of frameworks that use it as verl and as slime do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_vocabpar.frameworks.handle import Answer, LogitsHandle, Wanted
from megatron_vocabpar.frameworks.replaced_functions import FUNCTIONS, answering
from megatron_vocabpar.frameworks.steps import as_megatron, begin_step

B, S, P = 2, 5, 7
LABELS = torch.arange(B * S).view(B, S)
LOSSES = torch.linspace(1, 2, B * S).view(B, S)

_FUNCTIONS = {
    binding.name: answering(binding, lambda *_, **__: "the framework's own") for binding in FUNCTIONS
}
log_probs = _FUNCTIONS["vocab_parallel_log_probs_from_logits"]
entropy = _FUNCTIONS["vocab_parallel_entropy"]
both = _FUNCTIONS["calculate_log_probs_and_entropy"]


def handle(answer: Answer | None = None) -> LogitsHandle:
    return LogitsHandle((B, S), P, torch.device("cpu"), answer)


class Model(torch.nn.Module):
    """A last stage: what it gives for labels are the losses above."""

    post_process = True

    def __init__(self, expected: torch.Tensor = LABELS) -> None:
        super().__init__()
        self.expected = expected

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        assert labels is not None
        assert labels.shape == (B, S)
        assert torch.equal(labels, self.expected)
        return LOSSES


def test_it_tells_what_is_wanted() -> None:
    logits = handle()
    assert logits.div_(0.5) is logits
    kept = logits.clone()
    assert not entropy(logits).any()
    with pytest.raises(Wanted) as wanted:
        log_probs((kept / 4).contiguous(), LABELS)
    request = wanted.value.request
    assert (request.temperature, request.entropy, request.entropy_gradient) == (2.0, True, True)
    assert torch.equal(request.labels, LABELS)


def test_one_temperature_a_token_is_one_for_all_that_have_labels() -> None:
    """As verl from v0.8 on gives it: with 1e-8 where there is padding."""
    per_token = torch.tensor([[0.7] * 4 + [1e-8], [0.7] * 5]).unsqueeze(-1)
    padded = LABELS.clone()
    padded[0, 4] = -1
    for labels, named in ((padded, None), (LABELS, "in one microbatch")):
        logits = handle().div_(per_token) / 2
        if named:
            with pytest.raises(ValueError, match=named):
                log_probs(logits, labels)
        else:
            with pytest.raises(Wanted) as wanted:
                log_probs(logits.unsqueeze(0).squeeze(0), labels)
            assert wanted.value.request.temperature == pytest.approx(1.4)
    with pytest.raises(Wanted) as wanted:  # no token has a label
        log_probs(handle().div_(per_token), torch.full_like(LABELS, -1))
    assert wanted.value.request.temperature == pytest.approx(0.7)


def test_it_answers_in_the_shape_of_the_labels() -> None:
    logits = handle(Answer(-LOSSES, 3 * LOSSES))
    assert torch.equal(log_probs(logits, LABELS), -LOSSES)
    row = LogitsHandle((1, B * S), P, torch.device("cpu"), Answer(-LOSSES, 3 * LOSSES)).squeeze(0)
    assert tuple(row.shape) == (B * S, P)
    found, entropies = both(row, LABELS.flatten(), None, with_entropy=True, with_entropy_grad=False)
    assert torch.equal(found, -LOSSES.reshape(-1, 1))
    assert torch.equal(entropies, 3 * LOSSES.flatten())
    assert log_probs(torch.zeros(B, S, P), LABELS) == "the framework's own"


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda x: x + 1, "logits.__add__"),
        (lambda x: 2 * x, "logits.__rmul__"),
        (lambda x: x[0], "logits.__getitem__"),
        (lambda x: x.softmax(-1), "logits.softmax"),
        (lambda x: torch.cat([x, x]), "cat of logits"),
        (lambda x: torch.nn.functional.cross_entropy(x, LABELS), "cross_entropy"),
        (lambda x: x / torch.ones(B), r"a temperature of shape \(2,\) for tokens \(2, 5\): give one number"),
        (lambda x: x.div_(0), "temperature 0.0: give a positive number"),
        (lambda x: log_probs(x, LABELS[0]), r"labels of shape \(5,\): the tokens have \(2, 5\)"),
        (lambda x: both(x, LABELS, None, log_prob_keep_mask=LABELS), "--rollout-top-p 1"),
        (lambda x: x.sum(), "logits.sum"),
        (lambda x: handle(Answer(-LOSSES)).sum(-1), "logits.sum"),
        (lambda x: 2 * handle(Answer(-LOSSES)).sum(), "2 times the sum"),
        (lambda x: entropy(handle(Answer(-LOSSES))), "entropy that was asked for after"),
    ],
)
def test_what_needs_logits_is_refused(use: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        use(handle())
    assert not hasattr(handle(), "softmax")


def test_entropies_have_a_gradient_where_it_is_asked_for() -> None:
    asked = LogitsHandle((B * S,), P, torch.device("cpu"))
    with pytest.raises(Wanted) as wanted:
        both(asked, LABELS.flatten(), None, with_entropy=True, with_entropy_grad=False)
    assert (wanted.value.request.entropy, wanted.value.request.entropy_gradient) == (True, False)
    entropies = (3 * LOSSES).requires_grad_()
    logits = LogitsHandle((B * S,), P, torch.device("cpu"), Answer(-LOSSES, entropies))
    _, metric = both(logits, LABELS.flatten(), None, with_entropy=True, with_entropy_grad=False)
    assert not metric.requires_grad
    _, term = both(logits, LABELS.flatten(), None, with_entropy=True)
    (grad,) = torch.autograd.grad(term.sum(), entropies)
    assert torch.equal(grad, torch.ones(B, S))


def test_a_loss_of_no_token_has_a_gradient() -> None:
    logprobs = torch.full((B, S), torch.nan).requires_grad_()
    loss = 3 + 0 * handle(Answer(logprobs)).sum()
    assert loss == 3
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert torch.equal(grad, torch.zeros(B, S))


def test_numbers_of_tokens_that_are_not_read_are_nan() -> None:
    labels = LABELS.masked_fill(LABELS % 3 == 0, -1)

    def step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
        logits = model(input_ids=next(iterator))
        entropies = entropy(logits)
        return (log_probs(logits, labels), entropies), lambda output: (output[0].nansum(), output)

    _, loss_func = as_megatron(
        begin_step(step, iter([LABELS]), Model(labels), P, torch.device("cpu")),
        Model(labels.masked_fill(labels < 0, -100)),
    )
    losses = LOSSES.clone().requires_grad_()
    loss, (found, entropies) = loss_func(losses, 3 * LOSSES)
    assert torch.equal(found.isnan(), labels < 0)
    assert torch.equal(entropies.nan_to_num(), (3 * LOSSES).masked_fill(labels < 0, 0))
    (grad,) = torch.autograd.grad(loss, losses)
    assert torch.equal(grad, -(labels >= 0).float())


def verl_step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
    """Asks in ``forward_step``, for entropies too."""
    ids = next(iterator)
    logits = model(input_ids=ids)
    if not model.post_process:
        return logits, None
    logits.div_(0.5)
    kept, entropies = logits.clone(), entropy(logits)
    output = {"entropy": entropies + 1, "log_probs": log_probs(kept, ids).flip(0)}
    return output, lambda output: (output["log_probs"].sum() * 2, output)


def slime_step(iterator: Any, model: Any) -> tuple[Any, Any]:
    """Asks in the loss function, which knows the batch; its iterator is none of Python's."""
    ids = iterator.get_next()

    def loss_func(logits: Any) -> tuple[Any, Any]:
        found, _ = both(logits, ids, None)
        return found.sum() * 2, {"log_probs": found}

    return model(input_ids=ids), loss_func


class Batches:
    """An iterator with a way of its own."""

    def __init__(self) -> None:
        self.get_next = iter([LABELS]).__next__


@pytest.mark.parametrize(("step", "batches"), [(verl_step, iter([LABELS])), (slime_step, Batches())])
def test_a_step_becomes_megatrons(step: Any, batches: Any) -> None:
    begun = begin_step(step, batches, Model(), P, torch.device("cpu"))
    assert begun.request.temperature == (0.5 if step is verl_step else 1.0)
    output, loss_func = as_megatron(begun, Model())
    losses = output.clone().requires_grad_()
    loss, reported = loss_func(losses, 3 * LOSSES)
    (grad,) = torch.autograd.grad(loss, losses)
    assert torch.equal(grad, torch.full((B, S), -2.0))
    if step is verl_step:
        assert torch.equal(reported["log_probs"], -LOSSES.flip(0))
        assert torch.equal(reported["entropy"], 3 * LOSSES + 1)


def test_megatrons_own_step_stays() -> None:
    def step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
        ids = next(iterator)
        return model(ids, labels=ids), lambda losses: (losses.mean(), {"loss": losses.sum()})

    output, loss_func = as_megatron(
        begin_step(step, iter([LABELS]), Model(), P, torch.device("cpu")), Model()
    )
    assert loss_func(output)[1]["loss"] == LOSSES.sum()


def test_a_step_that_asks_for_nothing_is_refused() -> None:
    def step(iterator: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
        return model(input_ids=next(iterator)), lambda logits: (torch.ones(()), {})

    with pytest.raises(ValueError, match="asked for no log-probabilities"):
        begin_step(step, iter([LABELS]), Model(), P, torch.device("cpu"))
