"""The loss function's calls, on the last rank, where Megatron's training loop expects its reports.

The loss function gets the tokens' losses of one microbatch, and may be any differentiable function of them.

It may also have parameters for further numbers of every token, such as ``entropy`` or ``correct`` (whether
its target is the most likely id). If it has none, it is called again with these numbers in the place of the
losses. If it is linear, it then reports their masked mean: Megatron logs an ``entropy`` and an ``accuracy``
beside the ``lm loss``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron_vocabpar.pipeline import compat, heads
from megatron_vocabpar.pipeline.iteration import Iteration
from megatron_vocabpar.pipeline.microbatches import DROPPED
from megatron_vocabpar.runtime.streams import HostCopy, start_to_host
from megatron_vocabpar.schedule.words.passes import Pass, PassType

_NONE: Mapping[str, Any] = MappingProxyType({})


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
    """Calls the loss function of the training script, microbatch by microbatch, and checks what it gives.

    Args:
        iteration: the state of the call.
        means: by the parameters that the loss function may have, what the mean of each is called in a log.
        gradients: the numbers, among these, on which the loss may depend.
    """

    def __init__(
        self, iteration: Iteration, means: Mapping[str, str] = _NONE, gradients: Sequence[str] = ()
    ) -> None:
        self.iteration, self._means, self._gradients = iteration, means, gradients
        self._looks = iteration.rank.not_finite is not None and iteration.rank.has_loss
        self._noted = _Noted(iteration.rank.pipeline_rank, iteration.rank.not_finite)

    def hidden(self, i: int, x: torch.Tensor) -> None:
        """Note the largest of the output layer's hidden states ``[n, H]`` of microbatch ``i``."""
        if self._looks:
            self._noted.largest_hidden[i] = torch.linalg.vector_norm(x, torch.inf)

    def report(
        self, i: int, token_losses: torch.Tensor, numbers: Mapping[str, torch.Tensor] = _NONE
    ) -> list[torch.Tensor] | None:
        """Call the loss function for microbatch ``i``.

        Args:
            token_losses: ``[1 + D, b, s]`` float32, as all other tensors here.
            numbers: by parameter of a loss function; it gets those of the first head that were asked for.
                ``correct``, 1 if the target is the most likely id, is for Megatron's log of further heads,
                too.

        Returns:
            The gradients ``[1 + D, b, s]`` of the losses, and of each number on which the loss may depend;
            None in an evaluation.
        """
        iteration, call = self.iteration, self.iteration.call
        if self._looks:
            self._noted.largest_loss[i] = torch.linalg.vector_norm(token_losses, torch.inf)
        values = {name: numbers[name][0] for name in self._means if name in numbers}
        model, recorded = call.chunks[-1], iteration.with_loss[i]
        wins = numbers.get("correct")
        main_loss = partial(heads.main_loss, model, recorded, training=not call.forward_only, wins=wins)
        reported, num_tokens, grad, more = compat.loss_and_gradient(
            call,
            token_losses=token_losses,
            values=(taken := taken_by(recorded.loss_func, values)),
            main_loss=main_loss,
            loss_func=recorded.loss_func,
            collect_non_loss_data=call.collect_non_loss_data,
        )
        unrequested = {self._means[name]: value for name, value in values.items() if name not in taken}
        if unrequested and not call.collect_non_loss_data:
            why = f"it takes {' and '.join(taken)}" if taken else ""
            asked = [name for name in values if name not in taken]
            metrics, linear = _with_metrics(reported[0], recorded.loss_func, unrequested, asked, why)
            self._noted.linear[i] = linear
            reported = [metrics]
        iteration.reported.extend(reported)
        iteration.num_tokens = iteration.num_tokens + num_tokens
        if grad is None:
            return None
        if iteration.call.options.drop_masked:
            dropped = iteration.microbatches.labels(i) == DROPPED
            self._noted.without_loss[i] = (grad * dropped == 0).all()
        self._noted.unasked.extend((i, name) for name in more if name not in self._gradients)
        grads = [grad]
        for name in self._gradients:
            grads.append(torch.zeros_like(grad))
            if name in more:
                grads[-1][0] = more[name]
        return grads

    def finish(self) -> None:
        """Have what was noted checked when the host has queued everything."""
        self.iteration.checks.extend(self._noted.checks())


class _Noted:
    """What is noted of the microbatches: one number each, on the device, until the whole iteration is queued.

    Of what is to be finite it is the largest magnitude: one kernel, which reads once. NaN stays NaN in it.

    The iteration holds it, so it does not hold the iteration: a cycle would keep every microbatch alive
    until Python's collector runs.
    """

    def __init__(self, pipeline_rank: int, not_finite: Callable[[str], None] | None) -> None:
        self.linear: dict[int, torch.Tensor] = {}
        self.without_loss: dict[int, torch.Tensor] = {}
        self.largest_hidden: dict[int, torch.Tensor] = {}
        self.largest_loss: dict[int, torch.Tensor] = {}
        self.unasked: list[tuple[int, str]] = []
        self._pipeline_rank = pipeline_rank
        self._not_finite = not_finite

    def checks(self) -> Iterator[Callable[[], None]]:
        """The check, if there is something to check; one copy brings all to the host."""
        values = [torch.stack(list(kind.values())) for kind in self._kinds() if kind]
        if values or self.unasked:
            holds = [value if value.dtype == torch.bool else value.isfinite() for value in values]
            yield partial(self._check, start_to_host(torch.cat(holds)) if holds else HostCopy(torch.empty(0)))

    def _kinds(self) -> tuple[dict[int, torch.Tensor], ...]:
        return self.linear, self.without_loss, self.largest_hidden, self.largest_loss

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
        for i, name in self.unasked:
            raise ValueError(
                f"{rank}, microbatch {i}: the loss depends on the tokens' {name}, whose gradient is not "
                f"computed; detach it, or ask for it: VocabOptions(metrics=('{name}-gradient',))"
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
    report: Any,
    loss_func: Callable[..., Any],
    values: Mapping[str, torch.Tensor],
    parameters: Sequence[str],
    against: str,
) -> tuple[dict[str, Any], torch.Tensor]:
    """The loss function's report, with the means of these values, by name, that its second call gives.

    Returns:
        The report, and whether the loss function is linear, as a mean must be: twice the loss for twice the
        values.

    Raises:
        ValueError: if ``against`` names a reason why that is no mean, or the report has no names.
    """
    names = list(values)
    if not (isinstance(report, Mapping) and report):
        against = against or "it reports nothing by name"
    elif taken := [name for name in names if name in report]:
        against = against or f"it reports {' and '.join(taken)} of its own"
    if against:
        raise ValueError(
            f"the loss function has no parameter {' and no '.join(parameters)}, nor can a mean be had from "
            f"what it reports: {against}; give it the parameter, or don't ask for "
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
