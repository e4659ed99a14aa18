"""The loss where Megatron's training loop looks for it: on the last rank, whichever rank has the last stage.

Its loss function runs on the token losses that arrive there. Its gradient was sent ahead
(``microbatches.py``), where it is linear in them; a late gradient is what it gives now.

Entropies, whether a token's target is the most likely id, and its rank are further arguments. A loss function
without a parameter of that name is called on them too, in the place of the losses: as it is linear, what it
reports first is their masked mean, as it is the losses'. So Megatron's ``lm loss`` gets an ``entropy`` and an
``accuracy`` beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megatron_vocabpar.pipeline import compat, heads
from megatron_vocabpar.pipeline.iteration import Iteration
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.runtime.comm import broadcast
from megatron_vocabpar.runtime.streams import HostCopy, start_to_host
from megatron_vocabpar.schedule.words.passes import Pass, PassType

_METRICS = {"entropy": "entropy", "correct": "accuracy", "rank": "target rank"}
"""What a loss function may take beside the losses, and what the mean of it is called in its report."""


def further_arguments(options: VocabOptions, forward_only: bool) -> list[str]:
    """What there is for the loss function to take."""
    rank = options.target_rank and forward_only
    asked = {"entropy": options.entropy, "correct": options.accuracy, "rank": rank}
    return [name for name in _METRICS if asked[name]]


def taken_by(loss_func: Callable[..., Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those values that the loss function has a parameter of that name for, or takes by any name.

    One that hands on all that it is given, or has no signature, takes none.
    """
    try:
        parameters = inspect.signature(loss_func).parameters if values else {}
    except (TypeError, ValueError):
        return {}
    kinds = {parameter.kind for parameter in parameters.values()}
    any_name = Parameter.VAR_KEYWORD in kinds and Parameter.VAR_POSITIONAL not in kinds
    return {name: value for name, value in values.items() if any_name or name in parameters}


class LossReports:
    """Calls the loss function of the training script, microbatch by microbatch, and checks its gradients."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self._looks = iteration.rank.not_finite is not None and iteration.rank.has_loss
        # What is to hold of microbatches, on the device.
        self._as_announced: dict[int, torch.Tensor] = {}
        self._finite_hidden: dict[int, torch.Tensor] = {}
        self._finite_losses: dict[int, torch.Tensor] = {}
        self._takes_entropy: list[int] = []

    def hidden(self, i: int, x: torch.Tensor) -> None:
        """Look at the hidden states ``[n, H]`` of microbatch ``i`` that the output layer is given."""
        if self._looks:
            self._finite_hidden[i] = x.isfinite().all()

    def report(
        self,
        i: int,
        token_losses: torch.Tensor,
        entropy: torch.Tensor | None = None,
        wins: torch.Tensor | None = None,
        rank: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Megatron's loss function on the losses ``[1 + D, b, s]`` float32 of microbatch ``i``.

        Where entropies were asked for, likewise, it gets those of the first head too. ``wins``, likewise, is
        1 where the target is the most likely id, for Megatron's log of the further heads, and of the first
        one for the loss function where that was asked for, as ``rank`` is.

        Returns:
            The gradient ``[k, 1 + D, b, s]`` float32 that it gives them; k is 2 where it may depend on the
            entropies, else 1; None in an evaluation.
        """
        iteration, call = self.iteration, self.iteration.call
        if self._looks:
            self._finite_losses[i] = token_losses.isfinite().all()
        given = {"entropy": entropy, "correct": wins, "rank": rank}
        asked = further_arguments(iteration.rank.output_options, call.forward_only)
        values = {name: value[0] for name, value in given.items() if name in asked and value is not None}
        model, recorded = call.chunks[-1], iteration.recorded[iteration.rank.placement.loss_stage][i]
        main_loss = partial(heads.main_loss, model, recorded, training=not call.forward_only, wins=wins)
        reported, num_tokens, grad, more = compat.loss_and_gradient(
            call,
            token_losses=token_losses,
            values=(taken := taken_by(recorded.loss_func, values)),
            main_loss=main_loss,
            loss_func=recorded.loss_func,
            collect_non_loss_data=call.collect_non_loss_data,
        )
        others = {name: value for name, value in values.items() if name not in taken}
        if others and not call.collect_non_loss_data:
            late = iteration.rank.method.late_gradient
            why = "with late gradients it need not be linear" if late else f"it takes {' and '.join(taken)}"
            reported = [_with_metrics(reported[0], recorded.loss_func, others, why if late or taken else "")]
        iteration.reported.extend(reported)
        iteration.num_tokens = iteration.num_tokens + num_tokens
        if grad is not None and not iteration.rank.method.late_gradient:
            announced = iteration.microbatches.gradient(i)
            close = torch.isclose(grad, announced, rtol=1e-4, atol=0.0, equal_nan=True)
            self._as_announced[i] = close.all()
        if grad is None:
            return None
        if not iteration.rank.output_options.entropy_gradient:
            if more is not None:
                self._takes_entropy.append(i)
            return grad[None]
        grads = torch.stack([grad, torch.zeros_like(grad)])
        if more is not None:
            grads[1, 0] = more
        return grads

    def finish(self) -> None:
        """Have gradients and losses checked when the host has nothing left to queue.

        What is to hold goes to the host in one copy, which nobody waits for here.
        """
        held = (self._as_announced, self._finite_hidden, self._finite_losses)
        values = [value for kind in held for value in kind.values()]
        if values or self._takes_entropy:
            copy = start_to_host(torch.stack(values)) if values else HostCopy(torch.empty(0))
            self.iteration.checks.append(partial(self._check, copy))

    def _check(self, copy: HostCopy) -> None:
        """Look at what arrived.

        Raises:
            ValueError: if the loss function's gradient was not what had been announced, or there is one of
                the entropies, which was not asked for.
        """
        values = iter(copy.wait().tolist())  # each dictionary takes as many as it has microbatches
        as_announced, finite_hidden, finite_losses = (
            dict(zip(kind, values, strict=False))
            for kind in (self._as_announced, self._finite_hidden, self._finite_losses)
        )
        bent = _first_broken(as_announced)
        rank = f"rank {dist.get_rank()}"
        if bent is not None:
            raise ValueError(
                f"{rank}, microbatch {bent}: the loss function is not linear in the per-token losses: its "
                "gradient depends on their values. Vocabulary parallelism sends the gradient ahead; use a "
                "(masked) sum or mean, or have it sent when the losses are known: late_gradient=True, in "
                "Megatron-LM --vocab-parallel-late-gradient"
            )
        if self._takes_entropy:
            raise ValueError(
                f"{rank}, microbatch {self._takes_entropy[0]}: the loss depends on the entropies, whose "
                "gradient is not computed; detach them, or ask for it: VocabOptions(entropy_gradient=True)"
            )
        bad = _first_broken(finite_losses)
        if bad is not None:
            where = "in the output layer or before"
            if bad in finite_hidden:
                softmax = Pass(PassType.S, self.iteration.rank.pipeline_rank, bad)
                where = f"{'in' if finite_hidden[bad] else 'before'} pass {softmax}"
            tell = self.iteration.rank.not_finite
            assert tell is not None
            tell(f"{rank}: the loss of microbatch {bad} is not finite, first {where}")


def _with_metrics(
    report: Any, loss_func: Callable[..., Any], values: Mapping[str, torch.Tensor], against: str
) -> dict[str, Any]:
    """What the loss function reported, and what it reports of these values in the losses' place.

    Raises:
        ValueError: where something is against that, or nothing is reported by name.
    """
    names = [_METRICS[name] for name in values]
    if not (isinstance(report, Mapping) and report):
        against = against or "it reports nothing by name"
    elif taken := [name for name in names if name in report]:
        against = against or f"it reports {' and '.join(taken)} of its own"
    if against:
        raise ValueError(
            f"the loss function has no parameter {' and no '.join(values)}, nor can a mean be had from what "
            f"it reports: {against}; give it the parameter, or don't ask for "
            f"{' and '.join(names)}"
        )
    mean = "lm loss" if "lm loss" in report else next(iter(report))
    with torch.no_grad(), compat.unvalidated():
        reports = [loss_func(value.clone())[-1][mean] for value in values.values()]
    return dict(report) | dict(zip(names, reports, strict=True))


def _first_broken(holds: Mapping[int, bool]) -> int | None:
    """The first microbatch of which it does not hold."""
    return min((i for i, value in holds.items() if not value), default=None)


class DistantLoss:
    """The loss of a whole output layer whose rank is not that of the loss function."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self._token_losses: dict[int, torch.Tensor] = {}

    def keep(self, i: int, token_losses: torch.Tensor) -> None:
        """What the last stage computed for microbatch ``i``: ``[b, s]``."""
        self._token_losses[i] = token_losses

    def gradient(self, i: int) -> torch.Tensor:
        """Of the token losses of microbatch ``i``: ``[b, s]``."""
        return self.iteration.microbatches.gradient(i)[0]

    def finish(self) -> None:
        """Send the token losses of all microbatches, and report them."""
        rank, shapes = self.iteration.rank, self.iteration.microbatches.shapes
        sizes = [prod(shape) for shape in shapes]
        if rank.is_last:
            flat = torch.cat([self._token_losses[i].flatten() for i in range(len(shapes))]).float()
        else:
            flat = torch.empty(sum(sizes), device=rank.device)
        broadcast(
            rank.groups, rank.groups.output, [flat], [rank.groups.members_of(rank.placement.last_rank)[0]]
        )
        if rank.has_loss:
            reports = LossReports(self.iteration)
            for i, losses in enumerate(flat.split(sizes)):
                reports.report(i, losses.view(shapes[i]))
            reports.finish()
