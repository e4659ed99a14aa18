"""What an unchanged Megatron ``forward_step`` feeds to the model: recorded by a stand-in for it.

Next: ``microbatches.py``, which shares it with every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_vocabpar.pipeline.call import Call, ForwardStep
from megatron_vocabpar.schedule.words.placement import Placement


def _unknown_loss(*_: Any) -> Any:
    raise AssertionError("forward_step had not returned yet")


@dataclass(frozen=True)
class ModelCall:
    """One call of the model by ``forward_step``, and the loss function that ``forward_step`` returned."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_func: Callable[..., Any] = _unknown_loss

    @property
    def input_ids(self) -> torch.Tensor | None:
        """Token ids ``[b, s]``."""
        return _argument(self.args, self.kwargs, "input_ids")

    @property
    def labels(self) -> torch.Tensor | None:
        """Target ids ``[b, s]``."""
        return _argument(self.args, self.kwargs, "labels")

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """What attention leaves out: ``[1 or b, 1, s, s]`` bool, the largest tensor of a batch."""
        return _argument(self.args, self.kwargs, "attention_mask")

    def with_argument(self, name: str, value: torch.Tensor) -> ModelCall:
        """This call with one argument replaced; ``name`` is one of ``_POSITIONS``."""
        position = _POSITIONS[name]
        if len(self.args) <= position:
            return replace(self, kwargs={**self.kwargs, name: value})
        return replace(self, args=(*self.args[:position], value, *self.args[position + 1 :]))


# Where GPTModel.forward takes the arguments that callers pass by position or by name.
_POSITIONS = {"input_ids": 0, "attention_mask": 2, "labels": 4}


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    position = _POSITIONS[name]
    return args[position] if len(args) > position else kwargs.get(name)


class StandIn:
    """Stands in for the model: looks like it, wrapped or not, but a call only records the arguments."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._calls: list[ModelCall] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model if hasattr(self._model, name) else unwrap_model(self._model), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(ModelCall(args, kwargs))
        return self.answer(self._calls[-1])

    def answer(self, call: ModelCall) -> Any:
        """What a call returns: token losses of 0, where it has labels."""
        labels = call.labels
        return torch.zeros(()) if labels is None else torch.zeros_like(labels, dtype=torch.float32)

    def only_call(self) -> ModelCall:
        """The call that was recorded.

        Raises:
            ValueError: if it is not exactly one.
        """
        if len(self._calls) != 1:
            raise ValueError(
                f"forward_step called the model {len(self._calls)} times in one microbatch; vocabulary "
                "parallelism needs exactly one call"
            )
        return self._calls[0]


def record_calls(
    forward_step_func: ForwardStep, data_iterator: Iterator[Any] | None, model: Any, count: int
) -> list[ModelCall]:
    """Run ``forward_step`` this many times with a stand-in for the model.

    Megatron's loader gives each microbatch a mask of its own, all alike unless documents are told apart: 64
    MiB with 8,192 tokens. Masks equal to the first share its memory; after a mask that differs there are no
    further comparisons, as each waits for the device.

    Raises:
        ValueError: if it does not call the model exactly once.
    """
    calls: list[ModelCall] = []
    alike = True
    for _ in range(count):
        call = record_call(forward_step_func, data_iterator, model)
        first = calls[0].attention_mask if calls else None
        if alike and first is not None and call.attention_mask is not None:
            alike = torch.equal(first, call.attention_mask)
            call = call.with_argument("attention_mask", first) if alike else call
        calls.append(call)
    return calls


def record_call(forward_step_func: ForwardStep, data_iterator: Iterator[Any] | None, model: Any) -> ModelCall:
    """Run ``forward_step`` with a stand-in for the model.

    Raises:
        ValueError: if it does not call the model exactly once.
    """
    stand_in = StandIn(model)
    _, loss_func = forward_step_func(data_iterator, stand_in)
    return replace(stand_in.only_call(), loss_func=loss_func)


def record_ends(call: Call, placement: Placement, rank: int) -> dict[int, list[ModelCall]]:
    """The calls that ``forward_step`` makes for the first stage, the loss stage and that before it in a V.

    Each chunk has its own data iterator, as in Megatron.

    Args:
        rank: this pipeline rank, which records the calls of its own stages.
    """
    has_loss = rank == placement.p - 1
    ends = [0] * (rank == placement.first_rank) + [placement.loss_stage] * has_loss
    if has_loss and placement.loss_stage != placement.last_stage:
        ends.append(placement.loss_stage - 1)
    return {
        stage: record_calls(
            call.forward_step_func, call.data_iterators[chunk], call.chunks[chunk], call.num_microbatches
        )
        for stage, chunk in ((stage, placement.chunk_of(stage)) for stage in dict.fromkeys(ends))
    }


def replayed_calls(
    recorded: Mapping[int, list[ModelCall]], placement: Placement, rank: int
) -> dict[int, list[ModelCall]]:
    """By stage, the calls that its layers get: a batch on the model's first and last stages alone.

    ``forward_step`` takes the last rank's last chunk for the last stage and gives it the batch: tokens,
    positions, masks and ends of packed sequences. In a V-shaped placement that is a stage in the middle. So
    there the last stage gets the call of the first, which is on its rank, and the stage of the loss that of
    the stage before, which is on its rank too and in the middle for Megatron as well.
    """
    calls = dict(recorded)
    if placement.loss_stage != placement.last_stage:
        if rank == placement.last_rank:
            calls[placement.last_stage] = list(recorded[0])
        if rank == placement.p - 1:
            calls[placement.loss_stage] = recorded[placement.loss_stage - 1]
    return calls
