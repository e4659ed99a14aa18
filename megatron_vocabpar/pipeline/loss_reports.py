"""The loss function's calls, on the last rank, where Megatron's training loop expects its reports.

The loss function gets the tokens' losses of one microbatch, and may be any differentiable function of them.

It may also have parameters for every token's ``entropy``, for ``correct`` (whether its target is the most
likely id) and for its target's ``rank``. If it has none, it is called again with these numbers in the place
of the losses. If it is linear, it then reports their masked mean: Megatron logs an ``entropy`` and an
``accuracy`` beside the ``lm loss``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import Parameter
from typing import Any

import torch
import torch.distributed as dist

from megatron_vocabpar.pipeline import compat, heads
from megatron_vocabpar.pipeline.iteration import Iteration
from megatron_vocabpar.pipeline.microbatches import DROPPED
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.runtime.streams import HostCopy, start_to_host
from megatron_vocabpar.schedule.words.passes import Pass, PassType

_METRICS = {
    "entropy": "entropy",
    "correct": "accuracy",
    "rank": "target rank",
    "divergence": "divergence",
    "cross_entropy": "cross-entropy",
}
"""Parameters that a loss function may have beside the losses, and what the mean of each is called."""


def further_arguments(options: VocabOptions, forward_only: bool) -> list[str]:
    """The names of the further arguments that the options ask for."""
    rank = options.target_rank and forward_only
    distils = options.distillation is not None and not forward_only
    asked = {"entropy": options.entropy, "correct": options.accuracy, "rank": rank}
    asked |= {"divergence": distils, "cross_entropy": distils}
    return [name for name in _METRICS if asked[name]]


def taken_by(loss_func: Callable[..., Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values for which the loss function has a parameter of that name, or ``**anything``.

    A wrapper, ``(*args, **kwargs)``, gets none, and neither does a function without a signature.
    """
    try:
        parameters = inspect.signature(loss_func).parameters if values else {}
    except (TypeError, ValueError):
        return {}
    kinds = {parameter.kind for parameter in parameters.values()}
    any_name = Parameter.VAR_KEYWORD in kinds and Parameter.VAR_POSITIONAL not in kinds
    return {name: value for name, value in values.items() if any_name or name in parameters}


class LossReports:
    """Calls the loss function of the training script, microbatch by microbatch, and checks what it gives."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self._looks = iteration.rank.not_finite is not None and iteration.rank.has_loss
        self._noted = _Noted(iteration.rank.pipeline_rank, iteration.rank.not_finite)

    def hidden(self, i: int, x: torch.Tensor) -> None:
        """Note whether the output layer's hidden states ``[n, H]`` of microbatch ``i`` are finite."""
        if self._looks:
            self._noted.finite_hidden[i] = x.isfinite().all()

    def report(
        self,
        i: int,
        token_losses: torch.Tensor,
        entropy: torch.Tensor | None = None,
        wins: torch.Tensor | None = None,
        rank: torch.Tensor | None = None,
        **of_teacher: torch.Tensor,
    ) -> torch.Tensor | None:
        """Call the loss function for microbatch ``i``.

        Args:
            token_losses: ``[1 + D, b, s]`` float32, as all other tensors here.
            entropy: the loss function gets those of the first head, if they were asked for.
            wins: 1 if the target is the most likely id. Those of further heads are for Megatron's log, those
                of the first head for the loss function, if they were asked for.
            rank: how many ids are likelier; for the loss function, of the first head.
            of_teacher: in a distillation the two parts of the loss, ``divergence`` and ``cross_entropy``.

        Returns:
            The gradient ``[k, 1 + D, b, s]`` of the losses, and if k is 2, of the entropies, on which the
            loss may then depend; None in an evaluation.
        """
        iteration, call = self.iteration, self.iteration.call
        if self._looks:
            self._noted.finite_losses[i] = token_losses.isfinite().all()
        numbers = {"entropy": entropy, "correct": wins, "rank": rank, **of_teacher}
        asked = further_arguments(iteration.rank.output_options, call.forward_only)
        values = {name: value[0] for name, value in numbers.items() if name in asked and value is not None}
        model, recorded = call.chunks[-1], iteration.with_loss[i]
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
            why = f"it takes {' and '.join(taken)}" if taken else ""
            metrics, self._noted.linear[i] = _with_metrics(reported[0], recorded.loss_func, others, why)
            reported = [metrics]
        iteration.reported.extend(reported)
        iteration.num_tokens = iteration.num_tokens + num_tokens
        if grad is None:
            return None
        if iteration.rank.output_options.drop_masked:
            dropped = iteration.microbatches.labels(i) == DROPPED
            self._noted.without_loss[i] = (grad * dropped == 0).all()
        if not iteration.rank.output_options.entropy_gradient:
            if more is not None:
                self._noted.takes_entropy.append(i)
            return grad[None]
        grads = torch.stack([grad, torch.zeros_like(grad)])
        if more is not None:
            grads[1, 0] = more
        return grads

    def finish(self) -> None:
        """Have what was noted checked when the host has queued everything."""
        self.iteration.checks.extend(self._noted.checks())


class _Noted:
    """What is noted of the microbatches: one bool each, on the device, until the whole iteration is queued.

    The iteration holds it, so it does not hold the iteration: a cycle would keep every microbatch alive
    until Python's collector runs.
    """

    def __init__(self, pipeline_rank: int, not_finite: Callable[[str], None] | None) -> None:
        self.linear: dict[int, torch.Tensor] = {}
        self.without_loss: dict[int, torch.Tensor] = {}
        self.finite_hidden: dict[int, torch.Tensor] = {}
        self.finite_losses: dict[int, torch.Tensor] = {}
        self.takes_entropy: list[int] = []
        self._pipeline_rank = pipeline_rank
        self._not_finite = not_finite

    def checks(self) -> Iterator[Callable[[], None]]:
        """The check, if there is something to check; one copy brings all to the host."""
        values = [value for kind in self._kinds() for value in kind.values()]
        if values or self.takes_entropy:
            copy = start_to_host(torch.stack(values)) if values else HostCopy(torch.empty(0))
            yield partial(self._check, copy)

    def _kinds(self) -> tuple[dict[int, torch.Tensor], ...]:
        return self.linear, self.without_loss, self.finite_hidden, self.finite_losses

    def _check(self, copy: HostCopy) -> None:
        """Raise, or tell the listener, if something that should hold of a microbatch does not."""
        values = iter(copy.wait().tolist())  # each dictionary takes as many as it has microbatches
        linear, without_loss, finite_hidden, finite_losses = (
            dict(zip(kind, values, strict=False)) for kind in self._kinds()
        )
        rank = f"rank {dist.get_rank()}"
        if (bent := _first_broken(linear)) is not None:
            raise ValueError(
                f"{rank}, microbatch {bent}: the loss function is not linear in the tokens' losses, so what "
                "it reports of entropies or accuracies in their place is no mean of them; give it a "
                "parameter entropy or correct, or don't ask for these metrics"
            )
        if (lost := _first_broken(without_loss)) is not None:
            raise ValueError(
                f"{rank}, microbatch {lost}: the loss depends on tokens that the batch's loss mask leaves "
                "out, and with drop_masked the output layer, too; leave out drop_masked, or mask the loss "
                "with the mask that the model is given"
            )
        if self.takes_entropy:
            raise ValueError(
                f"{rank}, microbatch {self.takes_entropy[0]}: the loss depends on the entropies, whose "
                "gradient is not computed; detach them, or ask for it: VocabOptions(entropy_gradient=True)"
            )
        bad = _first_broken(finite_losses)
        if bad is not None:
            where = "in the output layer or before"
            if bad in finite_hidden:
                softmax = Pass(PassType.S, self._pipeline_rank, bad)
                where = f"{'in' if finite_hidden[bad] else 'before'} pass {softmax}"
            assert self._not_finite is not None
            self._not_finite(f"{rank}: the loss of microbatch {bad} is not finite, first {where}")


def _with_metrics(
    report: Any, loss_func: Callable[..., Any], values: Mapping[str, torch.Tensor], against: str
) -> tuple[dict[str, Any], torch.Tensor]:
    """The loss function's report, with the means of these values that its second call gives.

    Returns:
        The report, and whether the loss function is linear, as a mean must be: twice the loss for twice the
        values.

    Raises:
        ValueError: if ``against`` names a reason why that is no mean, or the report has no names.
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
        losses = [loss_func(value.clone()) for value in values.values()]
        *_, value = values.values()
        linear = torch.isclose(loss_func(2 * value)[0], 2 * losses[-1][0], rtol=1e-4, equal_nan=True)
    means = {name: loss[-1][mean] for name, loss in zip(names, losses, strict=True)}
    return dict(report) | means, linear


def _first_broken(holds: Mapping[int, bool]) -> int | None:
    """The first microbatch whose value is False."""
    return min((i for i, value in holds.items() if not value), default=None)
