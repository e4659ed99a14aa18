"""A framework's ``forward_step`` as Megatron's own would be: labels go into the model, token losses come out.

A step of Megatron's scripts calls the model with labels and is taken as it is. Frameworks call it without;
they give logits and labels to a function of log-probabilities, in ``forward_step`` itself (verl) or in the
loss function that it returns (slime). That code runs twice: before the iteration up to that call, on a handle
without an answer, which learns labels and temperature; and to its end with the answer, when the pipeline has
the token losses. For verl that is ``forward_step``, with the same batch, for slime the loss function.

Next: ``runner.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_vocabpar.frameworks.handle import Answer, LogitsHandle, TokenRequest, Wanted
from megatron_vocabpar.pipeline.call import ForwardStep
from megatron_vocabpar.pipeline.microbatches import IGNORED
from megatron_vocabpar.pipeline.recording import ModelCall, StandIn


class _Remembered:
    """Wraps a data iterator and keeps its batches."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.batches: list[Any] = []

    def __next__(self) -> Any:
        self.batches.append(next(self._iterator))
        return self.batches[-1]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class HandleModel(StandIn):
    """Stands in for the model of the loss stage: a call without labels gives a handle.

    Attributes:
        batches: those that ``forward_step`` has taken from its iterator.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batches: list[Any],
        width: int,
        device: torch.device,
        known: Answer | None = None,
    ) -> None:
        super().__init__(model)
        self.batches = batches
        self._handle = partial(LogitsHandle, width=width, device=device, answer=known)

    def answer(self, call: ModelCall) -> Any:
        return super().answer(call) if call.labels is not None else self._handle(_token_shape(call))


def _token_shape(call: ModelCall) -> tuple[int, int]:
    """``(b, s)`` of a call of the model; on a last stage the ids may not be packed yet."""
    packed = call.kwargs.get("packed_seq_params")
    ends = getattr(packed, "cu_seqlens_q_padded", None)
    ends = getattr(packed, "cu_seqlens_q", None) if ends is None else ends
    ids = call.input_ids
    if ids is not None and not ids.is_nested:
        return ids.shape[0], ids.shape[1]
    if ends is None:
        raise ValueError(
            "forward_step gave the model neither padded token ids [b, s] nor packed_seq_params: vocabulary "
            "parallelism cannot tell the shape of its logits; give it one of them"
        )
    return 1, int(ends[-1])


@dataclass(frozen=True)
class BegunStep:
    """One microbatch of a framework, run until it asked for log-probabilities.

    Attributes:
        call: the call of the model.
        request: the numbers that the framework asked for.
        finish: takes the answer; returns what the loss function returns.
    """

    call: ModelCall
    request: TokenRequest
    finish: Callable[[Answer], Any]


def begin_step(
    forward_step: ForwardStep, data_iterator: Any, model: torch.nn.Module, width: int, device: torch.device
) -> BegunStep:
    """Run a framework's ``forward_step``, and its loss function, until one asks for log-probabilities.

    Raises:
        ValueError: if neither asks, the model is not called exactly once, or logits are needed otherwise.
    """
    batch = _Remembered(data_iterator)
    stand_in = HandleModel(model, batch.batches, width, device)
    returned: tuple[Any, ...] = ()
    try:
        output, loss_func = returned = forward_step(batch, stand_in)
        labels = stand_in.only_call().labels
        if labels is not None:
            return BegunStep(
                stand_in.only_call(), TokenRequest(labels), lambda answer: loss_func(-answer.logprobs)
            )
        loss_func(output)
    except Wanted as wanted:
        request = wanted.request
    else:
        raise ValueError(
            "the loss function asked for no log-probabilities by the framework's own function; vocabulary "
            "parallelism computes nothing else from logits: use a loss of log-probabilities, or train "
            "without it"
        )

    def finish(answer: Answer) -> Any:
        if returned:
            output, loss_func = returned
            return loss_func(LogitsHandle(output.shape[:-1], width, device, answer))
        answering = HandleModel(model, batch.batches, width, device, answer)
        output, loss_func = forward_step(iter(batch.batches), answering)
        return loss_func(output)

    return BegunStep(stand_in.only_call(), request, finish)


def as_megatron(step: BegunStep, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """What Megatron's own ``forward_step`` would return for this step.

    Tokens whose labels are not ids get NaN, which a framework does not read.
    """
    call = step.call
    if call.labels is not None:
        return model(*call.args, **call.kwargs), lambda losses: step.finish(Answer(-losses))
    labels = step.request.labels.reshape(_token_shape(call))
    unknown = labels < 0
    call = call.with_argument("labels", labels.masked_fill(unknown, IGNORED))

    def loss_func(losses: torch.Tensor, entropy: torch.Tensor | None = None) -> Any:
        entropy = None if entropy is None else entropy.masked_fill(unknown, torch.nan)
        return step.finish(Answer(-losses.masked_fill(unknown, torch.nan), entropy))

    return model(*call.args, **call.kwargs), loss_func
