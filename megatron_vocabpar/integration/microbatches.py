"""What an unchanged Megatron ``forward_step`` would have fed to the model, known on every rank.

Megatron gives a batch to the first chunk of the first rank and to the last chunk of the last rank only,
whichever stages they are. Before an iteration starts, the two run ``forward_step`` once per microbatch with
a stand-in for the model that records its arguments; tokens then go from the first to all ranks, labels and
the gradient of every token's loss from the last.

The gradient is known before the loss because Megatron's loss functions are linear in the per-token losses
(a masked sum); that is checked against the true losses when they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_vocabpar.layers.embedding import InputPlan, check_ids, plan_input
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import OwnedTargets, owned_targets, target_rows
from megatron_vocabpar.runtime.comm import VocabGroups, broadcast
from megatron_vocabpar.runtime.streams import to_device, to_host

ForwardStep = Callable[..., tuple[torch.Tensor, Callable[..., Any]]]


@dataclass(frozen=True)
class ModelCall:
    """One recorded call of the model by ``forward_step``, and the loss function that it returned."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_func: Callable[..., Any]

    @property
    def input_ids(self) -> torch.Tensor | None:
        """Token ids ``[b, s]``."""
        return _argument(self.args, self.kwargs, "input_ids")

    @property
    def labels(self) -> torch.Tensor | None:
        """Target ids ``[b, s]``."""
        return _argument(self.args, self.kwargs, "labels")

    def replace(self, name: str, value: torch.Tensor) -> ModelCall:
        """The same call with another ``input_ids``, such as embedded rows ``[b, s, H]``, or ``labels``."""
        position = _POSITIONS[name]
        if len(self.args) <= position:
            return replace(self, kwargs={**self.kwargs, name: value})
        return replace(self, args=(*self.args[:position], value, *self.args[position + 1 :]))


# Where GPTModel.forward takes the arguments that callers pass by position or by name.
_POSITIONS = {"input_ids": 0, "labels": 4}


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    position = _POSITIONS[name]
    return args[position] if len(args) > position else kwargs.get(name)


class _Recorder:
    """Stands in for the model: looks like it, but a call only records the arguments."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((args, kwargs))
        labels = _argument(args, kwargs, "labels")
        return torch.zeros(()) if labels is None else torch.zeros_like(labels, dtype=torch.float32)


def record_call(forward_step_func: ForwardStep, data_iterator: Iterator[Any] | None, model: Any) -> ModelCall:
    """Run ``forward_step`` with a recorder in the model's place.

    Raises:
        ValueError: if it does not call the model exactly once.
    """
    recorder = _Recorder(model)
    _, loss_func = forward_step_func(data_iterator, recorder)
    if len(recorder.calls) != 1:
        raise ValueError(
            f"forward_step called the model {len(recorder.calls)} times in one microbatch; vocabulary "
            "parallelism needs exactly one call"
        )
    args, kwargs = recorder.calls[0]
    return ModelCall(args, kwargs, loss_func)


@dataclass(frozen=True)
class Microbatch:
    """What every rank knows of one microbatch.

    Attributes:
        shape: ``(b, s)`` on this context-parallel rank.
        owned_tokens: the token ids among ``[b * s]`` whose rows this rank owns.
        plan: which rank owns which token position.
        labels: target ids ``[n]``, sequence-major as the hidden states ``[s, b, H]`` are.
        grad_loss: gradient of every token's loss ``[n]``, float32, sequence-major; None in evaluation.
        owned_targets: the tokens among ``[n]`` whose targets this rank owns.
    """

    shape: tuple[int, int]
    owned_tokens: torch.Tensor
    plan: InputPlan
    labels: torch.Tensor
    grad_loss: torch.Tensor | None
    owned_targets: OwnedTargets

    @property
    def tokens(self) -> int:
        """``n = b * s``."""
        return self.shape[0] * self.shape[1]

    @property
    def gradient(self) -> torch.Tensor:
        """``grad_loss``, which there is in training."""
        assert self.grad_loss is not None
        return self.grad_loss


class Microbatches(dict[int, Microbatch]):
    """The microbatches of an iteration by number; each is planned when it is first asked for.

    Planning is host work, on ids that are on the host already, so it happens while the device works on what
    was queued before; what it finds goes to the device in one copy that nobody waits for.

    Args:
        shapes: ``(b, s)`` of each.
        ids: ``[2, total]`` int64 on the host: the tokens of all microbatches, and their labels, batch-major.
        labels: the labels once more, on the device.
        grad_losses: likewise the gradients of the tokens' losses, float32; None in evaluation.
        ranges: rows of every member of the vocabulary group; empty where it is not partitioned.
        member: this rank's place among them.
    """

    def __init__(
        self,
        *,
        shapes: Sequence[tuple[int, int]],
        ids: torch.Tensor,
        labels: torch.Tensor,
        grad_losses: torch.Tensor | None,
        ranges: tuple[VocabRange, ...],
        member: int,
    ) -> None:
        super().__init__()
        self.shapes = tuple(shapes)
        sizes = [b * s for b, s in shapes]
        tokens, host_labels = ids
        self._tokens, self._host_labels = tokens.split(sizes), host_labels.split(sizes)
        self._labels = labels.split(sizes)
        self._grad_losses = None if grad_losses is None else grad_losses.split(sizes)
        self._ranges = ranges
        self._member = member

    def labels(self, i: int) -> torch.Tensor:
        """Target ids ``[b, s]`` of a microbatch, on the device."""
        return self._labels[i].view(self.shapes[i])

    def gradient(self, i: int) -> torch.Tensor:
        """The gradient ``[b, s]`` of every token's loss in a microbatch, in training."""
        assert self._grad_losses is not None
        return self._grad_losses[i].view(self.shapes[i])

    def __missing__(self, i: int) -> Microbatch:
        self[i] = planned = self._plan(i)
        return planned

    def _plan(self, i: int) -> Microbatch:
        shape, ids = self.shapes[i], self._tokens[i]
        plan = plan_input(ids, self._ranges)
        mine = plan.positions(self._member)
        targets = owned_targets(
            target_rows(_sequence_major(self._host_labels[i], shape), self._ranges[self._member])
        )
        order, owned_tokens, *owned = to_device(
            (plan.order, ids[mine], targets.tokens, targets.rows, targets.by_token, targets.by_row),
            self._labels[i].device,
        )
        grads = self._grad_losses
        return Microbatch(
            shape,
            owned_tokens,
            replace(plan, order=order),
            _sequence_major(self._labels[i], shape),
            None if grads is None else _sequence_major(grads[i], shape),
            OwnedTargets(*owned),
        )


def _sequence_major(flat: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return flat.view(shape).t().reshape(-1)


def no_microbatches() -> Microbatches:
    """What there is where nothing is shared."""
    nothing = torch.empty(2, 0, dtype=torch.int64)
    return Microbatches(shapes=(), ids=nothing, labels=nothing[1], grad_losses=None, ranges=(), member=0)


def share_microbatches(
    *,
    groups: VocabGroups,
    ranges: tuple[VocabRange, ...],
    first_member: int,
    last_member: int,
    tokens: list[torch.Tensor] | None,
    labels: list[torch.Tensor] | None,
    grad_losses: list[torch.Tensor] | None,
    num_microbatches: int,
    device: torch.device,
    forward_only: bool,
) -> Microbatches:
    """Send tokens, labels and per-token gradients of all microbatches to every rank of the group.

    The host waits for the device twice: for the shapes, and for all ids together.

    Args:
        first_member, last_member: who has the tokens, and who has labels and gradients.
        tokens: ``[b, s]`` int64 each, on the members of the first stage; None elsewhere.
        labels: ``[b, s]`` int64 each, on the members of the last stage.
        grad_losses: ``[b, s]`` float32 each, likewise; None in evaluation.

    Raises:
        ValueError: if a token id lies outside the vocabulary.
    """

    def share(flat: torch.Tensor, values: list[torch.Tensor] | None, member: int) -> torch.Tensor:
        if values is not None:
            flat.copy_(torch.cat([value.reshape(-1) for value in values]))
        broadcast(groups, groups.input, [flat], [member])
        return flat

    sizes = None if tokens is None else [torch.tensor([list(t.shape) for t in tokens])]
    flat = share(torch.empty(2 * num_microbatches, dtype=torch.int64, device=device), sizes, first_member)
    shapes = [(int(b), int(s)) for b, s in flat.view(-1, 2).tolist()]
    total = sum(b * s for b, s in shapes)
    ids = torch.empty((2, total), dtype=torch.int64, device=device)
    share(ids[0], tokens, first_member)
    share(ids[1], labels, last_member)
    grads = None
    if not forward_only:
        grads = share(torch.empty(total, dtype=torch.float32, device=device), grad_losses, last_member)
    # Counts of the plans are sizes of messages, so the ids come to the host, all at once.
    host_ids = to_host(ids)
    if ranges:
        check_ids(host_ids[0], ranges[0].vocab_size)
    return Microbatches(
        shapes=shapes,
        ids=host_ids,
        labels=ids[1],
        grad_losses=grads,
        ranges=ranges,
        member=groups.member,
    )
