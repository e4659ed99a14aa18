"""Gradients that bypass autograd, and when data parallelism may reduce them.

T (or TW), IB and a split-off W add directly into the fp32 ``main_grad`` of a weight. Megatron's
DistributedDataParallel reduces a bucket when autograd has reported, in the last microbatch, the gradients of
all its parameters. For the weights that bypass autograd we report that ourselves, after their last write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.schedule.words.passes import PassType


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The tensor in which the gradient of ``parameter`` accumulates: DDP's ``main_grad``, else ``grad``."""
    buffer = getattr(parameter, "main_grad", None)
    if buffer is not None:
        return buffer
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class GradientSync:
    """Delays data-parallel reduction to the last microbatch, as Megatron's schedules do.

    Args:
        chunks: the wrapped model chunks of this rank.
        no_sync_funcs: for each chunk, a function whose context suspends reduction (``no_sync_func``).
        grad_sync_funcs: if Megatron aligns reduction across stages, the functions that start it for each
            chunk; then only the first stage reduces before the end.
        starts_early: whether this rank may reduce as soon as its last backward runs.
        num_microbatches: backwards per chunk.
        written: the parameters that bypass autograd, by the type of pass that adds to their gradients.
        runs: how often each of these types runs on this rank.
    """

    def __init__(
        self,
        *,
        chunks: Sequence[torch.nn.Module],
        no_sync_funcs: Sequence[Callable[[], AbstractContextManager[Any]]],
        grad_sync_funcs: Sequence[Callable[[Iterable[torch.nn.Parameter]], None]],
        starts_early: bool,
        num_microbatches: int,
        written: Mapping[PassType, Sequence[torch.nn.Parameter]],
        runs: Mapping[PassType, int],
    ) -> None:
        self._chunks = chunks
        self._grad_sync_funcs = grad_sync_funcs
        self._starts_early = starts_early
        self._backwards_left = [num_microbatches] * len(chunks)
        self._suspended: list[AbstractContextManager[Any] | None] = [func() for func in no_sync_funcs]
        for context in self._suspended:
            if context is not None:
                context.__enter__()
        self._parameters = written
        self._runs_left = dict(runs)
        self._types_left: dict[torch.nn.Parameter, int] = {}
        for parameters in written.values():
            for parameter in parameters:
                self._types_left[parameter] = self._types_left.get(parameter, 0) + 1
        self._written: list[torch.nn.Parameter] = []

    def before_backward(self, chunk: int) -> None:
        """A backward of ``chunk`` is about to run."""
        self._backwards_left[chunk] -= 1
        if self._backwards_left[chunk] == 0 and self._starts_early:
            self._resume(chunk)

    def after_backward(self, chunk: int) -> None:
        """A backward of ``chunk`` has run."""
        if not any(self._backwards_left):
            self._report_written()

    def wrote(self, pass_type: PassType) -> None:
        """A pass of this type has added its part into its parameters' gradients."""
        self._runs_left[pass_type] -= 1
        if self._runs_left[pass_type] > 0:
            return
        for parameter in self._parameters[pass_type]:
            self._types_left[parameter] -= 1
            if self._types_left[parameter] == 0:
                self._written.append(parameter)
        if not any(self._backwards_left):
            self._report_written()

    def finish(self) -> None:
        """Resume reduction in all chunks, and report the parameters that are left."""
        for chunk in range(len(self._chunks)):
            if self._suspended[chunk] is not None:
                self._resume(chunk)
                if self._grad_sync_funcs:
                    # This reduces all gradients of the chunk, so none is reported on its own.
                    self._grad_sync_funcs[chunk](self._chunks[chunk].parameters())
                    self._written.clear()
        self._report_written()

    def abandon(self) -> None:
        """Resume reduction in all chunks without reducing anything."""
        for chunk in range(len(self._chunks)):
            self._resume(chunk)

    def _resume(self, chunk: int) -> None:
        context, self._suspended[chunk] = self._suspended[chunk], None
        if context is not None:
            context.__exit__(None, None, None)

    def _report_written(self) -> None:
        if any(context is not None for context in self._suspended):
            return
        while self._written:
            parameter = self._written.pop()
            for chunk in self._chunks:
                compat.report_gradient(chunk, parameter)
