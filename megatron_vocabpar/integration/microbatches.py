"""What an unchanged Megatron ``forward_step`` would have fed to the model, known on every rank.

Megatron gives a batch to the first and the last stage only. Before an iteration starts, the two run
``forward_step`` once per microbatch with a stand-in for the model that records its arguments; tokens then
go from the first stage to all ranks, labels and the gradient of every token's loss from the last.

The gradient is known before the loss because Megatron's loss functions are linear in the per-token losses
(a masked sum); that is checked against the true losses when they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_vocabpar.layers.embedding import InputPlan, plan_input
from megatron_vocabpar.layers.partition import VocabRange
from megatron_vocabpar.layers.targets import OwnedTargets, owned_targets, target_rows
from megatron_vocabpar.runtime.comm import VocabGroups, broadcast

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

    def replace_input_ids(self, rows: torch.Tensor) -> ModelCall:
        """The same call with embedded rows ``[b, s, H]`` in place of token ids ``[b, s]``."""
        if self.args:
            return ModelCall((rows, *self.args[1:]), self.kwargs, self.loss_func)
        return ModelCall((), {**self.kwargs, "input_ids": rows}, self.loss_func)


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


def share_microbatches(
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
) -> list[Microbatch]:
    """Send tokens, labels and per-token gradients of all microbatches to every rank of the group.

    Args:
        first_member, last_member: who has the tokens, and who has labels and gradients.
        tokens: ``[b, s]`` int64 each, on the members of the first stage; None elsewhere.
        labels: ``[b, s]`` int64 each, on the members of the last stage.
        grad_losses: ``[b, s]`` float32 each, likewise; None in evaluation.

    Raises:
        ValueError: if a token id lies outside the vocabulary.
    """

    def shared(values: list[torch.Tensor] | None, member: int, dtype: torch.dtype, sizes: list[int]) -> Any:
        if values is None:
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        else:
            flat = torch.cat([value.reshape(-1) for value in values]).to(device=device, dtype=dtype)
        broadcast(groups, groups.input, [flat], [member])
        return flat.split(sizes)

    shapes = None if tokens is None else [torch.tensor(t.shape, device=device) for t in tokens]
    pairs = shared(shapes, first_member, torch.int64, [2] * num_microbatches)
    grid = [(int(b), int(s)) for b, s in torch.stack(list(pairs)).tolist()]
    sizes = [b * s for b, s in grid]
    # The plan is host work (its counts are sizes of messages), so tokens come to the host, all at once.
    all_tokens = shared(tokens, first_member, torch.int64, sizes)
    host_tokens = torch.cat(list(all_tokens)).cpu().split(sizes)
    all_labels = shared(labels, last_member, torch.int64, sizes)
    # Likewise which targets this rank owns: found here, pass S need not wait for the device.
    host_labels = torch.cat(list(all_labels)).cpu().split(sizes)
    all_grads = [None] * num_microbatches
    if not forward_only:
        all_grads = shared(grad_losses, last_member, torch.float32, sizes)

    def sequence_major(flat: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        return flat.view(shape).t().reshape(-1)

    microbatches = []
    mine = ranges[groups.member]
    per_microbatch = zip(grid, host_tokens, all_labels, host_labels, all_grads, strict=True)
    for shape, ids, label, host_label, grad in per_microbatch:
        plan = plan_input(ids, ranges)
        start = sum(plan.counts[: groups.member])
        owned = plan.order[start : start + plan.counts[groups.member]]
        plan = replace(plan, order=plan.order.to(device))
        microbatches.append(
            Microbatch(
                shape,
                ids[owned].to(device),
                plan,
                sequence_major(label, shape),
                None if grad is None else sequence_major(grad, shape),
                owned_targets(target_rows(sequence_major(host_label, shape), mine)).to(device),
            )
        )
    return microbatches
