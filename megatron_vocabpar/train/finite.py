"""Finds where a loss ceased to be a number: a second forward run of the microbatches, watched layer by layer.

Next: ``trainer.py`` asks for it before the optimizer would spoil all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron_vocabpar.schedule.words.passes import Instruction, Pass
from megatron_vocabpar.train.failure import NotFinite

_ADVICE = "give a smaller --lr or a longer --warmup, or go on all the same with --no-check-finite"


@dataclass(order=True, frozen=True)
class BadTensor:
    """A tensor that is not finite; the smaller of two was computed earlier."""

    microbatch: int
    stage: int
    layer: int  # counted from 1 over the whole model; 0 for the input of the first
    rank: int  # global
    place: str  # layer, pass and rank in words


@dataclass
class Watch:
    """Looks at inputs and outputs of transformer layers; ``instruction`` is the one that runs."""

    instruction: Instruction | None = None
    bad_tensors: list[BadTensor] = field(default_factory=list)

    @contextmanager
    def layers_of(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Look at the layers of these model chunks inside the context."""
        with ExitStack() as stack:
            for chunk in chunks:
                for index, layer in enumerate(unwrap_model(chunk).decoder.layers):
                    number = layer.layer_number
                    if index == 0:
                        hook = layer.register_forward_pre_hook(self._before, with_kwargs=True)
                        stack.callback(hook.remove)
                    hook = layer.register_forward_hook(lambda _, __, out, n=number: self._look(n, out))
                    stack.callback(hook.remove)
            yield

    def _before(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(self.instruction, Pass) and self.instruction.stage == 0:
            self._look(0, kwargs.get("hidden_states", args))

    def _look(self, layer: int, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if isinstance(self.instruction, Pass) and not torch.isfinite(hidden).all():
            name = f"layer {layer}" if layer else "the embedded tokens"
            self.bad_tensors.append(_in_pass(self.instruction, layer, f"{name} in pass {self.instruction}"))


def _in_pass(pass_: Pass, layer: int, name: str) -> BadTensor:
    rank = dist.get_rank()
    place = f"{name}: {pass_.type.value} of microbatch {pass_.microbatch} on stage {pass_.stage}, rank {rank}"
    return BadTensor(pass_.microbatch, pass_.stage, layer, rank, place)


def end_at(
    step: int,
    loss: float,
    reported: Sequence[float],
    loss_pass: Callable[[int], Pass],
    watch: Watch,
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> NoReturn:
    """End the run on all ranks, with one message.

    Args:
        step: counted from 1.
        loss: of the step, the same on all ranks.
        reported: on the rank of the loss function, the loss of each microbatch; empty elsewhere.
        loss_pass: of a microbatch, the pass that computes the loss.
        watch: of this rank, after the second run of the microbatches.
        parameters: of this rank, with their names.

    Raises:
        NotFinite: naming the rank, pass, microbatch and layer of the first tensor that is not finite.
    """
    bad = [i for i, value in enumerate(reported) if not torch.isfinite(torch.tensor(value))]
    # A loss comes after all layers of its stage.
    losses = [_in_pass(loss_pass(i), 1 << 30, f"pass {loss_pass(i)}") for i in bad]
    first_here = sorted([*watch.bad_tensors, *losses])[:1]
    spoiled = [name for name, parameter in parameters if not torch.isfinite(parameter).all()]
    everyone: list[tuple[list[BadTensor], list[str]]] = [([], []) for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, (first_here, spoiled))
    first = min((tensor for tensors, _ in everyone for tensor in tensors), default=None)
    where = "in no forward pass when they ran once more" if first is None else f"in {first.place}"
    before = [f"; before it in {names[0]} of rank {r}" for r, (_, names) in enumerate(everyone) if names]
    raise NotFinite(f"loss {loss} at step {step}; first not finite {where}{''.join(before[:1])}; {_ADVICE}")


def check_norm(step: int, loss: float, norm: float) -> None:
    """End the run if the gradients of a finite loss are not."""
    if not torch.isfinite(torch.tensor(norm)):
        raise NotFinite(f"gradient norm {norm} at step {step}, whose loss is {loss:.4f}; {_ADVICE}")
