"""Gradients that bypass autograd, and when data parallelism may reduce them.

T (or TW), IB and a split-off W add directly into the ``main_grad`` of a weight. Megatron's
DistributedDataParallel reduces a bucket when, in the last microbatch, the gradients of all its parameters
have been reported: by autograd, and for the weights that bypass it by us, after their last write. Example,
two chunks on the first rank, each with buckets of its later and of its earlier layers:

    B of chunk 1 | W of chunk 1                | B of chunk 0 | W of chunk 0                | IB
    norms        | weights    -> both buckets  | norms        | weights -> the later layers | embedding -> all
                   one by one, last layer first                 (last W: not IB's bucket)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from megatron_vocabpar.pipeline import compat
from megatron_vocabpar.pipeline.call import Call
from megatron_vocabpar.schedule.words.passes import Pass, PassType
from megatron_vocabpar.schedule.words.placement import Placement
from megatron_vocabpar.schedule.words.schedule import Schedule


class Writer(NamedTuple):
    """The passes of one type on one model chunk, which add to gradients that bypass autograd."""

    type: PassType
    chunk: int = 0


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
        written: the parameters that bypass autograd, by the passes that add to their gradients.
        runs: how often each writer runs on this rank.
    """

    def __init__(
        self,
        *,
        chunks: Sequence[torch.nn.Module],
        no_sync_funcs: Sequence[Callable[[], AbstractContextManager[Any]]],
        grad_sync_funcs: Sequence[Callable[[Iterable[torch.nn.Parameter]], None]],
        starts_early: bool,
        num_microbatches: int,
        written: Mapping[Writer, Iterable[torch.nn.Parameter]],
        runs: Mapping[Writer, int],
    ) -> None:
        self._chunks = chunks
        self._grad_sync_funcs = grad_sync_funcs
        self._starts_early = starts_early
        self._backwards_left = [num_microbatches] * len(chunks)
        self._suspended: list[AbstractContextManager[Any] | None] = [func() for func in no_sync_funcs]
        for context in self._suspended:
            if context is not None:
                context.__enter__()
        self._runs_left = dict(runs)
        self._unwritten = {writer: dict.fromkeys(parameters) for writer, parameters in written.items()}
        self._complete: list[list[torch.nn.Parameter]] = [[] for _ in chunks]

    @staticmethod
    def of(
        call: Call, schedule: Schedule, rank: int, written: Mapping[Writer, Sequence[torch.nn.Parameter]]
    ) -> GradientSync:
        """Make the ``GradientSync`` of a call; its functions are those of Megatron's configuration.

        Args:
            call: the call, with its configuration and chunks.
            schedule: the passes of all ranks.
            rank: this pipeline rank.
            written: as for the class.
        """
        config, placement = call.config, schedule.placement
        # Megatron aligns stages as all but the first reduce in a bubble; with W there is none.
        aligned = config.grad_sync_func and not schedule.splits_w
        grad_sync = _per_chunk(config.grad_sync_func, len(call.chunks)) if aligned else []
        passes = schedule.ranks[rank]
        return GradientSync(
            chunks=call.chunks,
            no_sync_funcs=_per_chunk(config.no_sync_func or nullcontext, len(call.chunks)),
            grad_sync_funcs=grad_sync,
            starts_early=not grad_sync or rank == placement.first_rank,
            num_microbatches=call.num_microbatches,
            written=written,
            runs={writer: sum(_is_of(writer, pass_, placement) for pass_ in passes) for writer in written},
        )

    def before_backward(self, chunk: int) -> None:
        """A backward of ``chunk`` is about to run."""
        self._backwards_left[chunk] -= 1
        if self._backwards_left[chunk] == 0 and self._starts_early:
            self._resume(chunk)

    def after_backward(self, chunk: int) -> None:
        """A backward of ``chunk`` has run."""
        if not self._backwards_left[chunk]:
            self._report(chunk)

    def added(self, writer: Writer, parameter: torch.nn.Parameter) -> None:
        """A pass of this writer has added all that it adds to one of its parameters."""
        if self._runs_left[writer] > 1:
            return
        self._unwritten[writer].pop(parameter, None)
        if not any(parameter in parameters for parameters in self._unwritten.values()):
            self._complete[writer.chunk].append(parameter)
            if not self._backwards_left[writer.chunk]:
                self._report(writer.chunk)

    def wrote(self, writer: Writer) -> None:
        """A pass of this writer has added its part into its parameters' gradients."""
        for parameter in list(self._unwritten[writer]):
            self.added(writer, parameter)
        self._runs_left[writer] -= 1

    def finish(self) -> None:
        """Resume reduction in all chunks, and report the parameters that are left."""
        for chunk in range(len(self._chunks)):
            if self._suspended[chunk] is not None:
                self._resume(chunk)
                if self._grad_sync_funcs:
                    # This reduces all gradients of the chunk, so none is reported on its own.
                    self._grad_sync_funcs[chunk](self._chunks[chunk].parameters())
                    self._complete[chunk].clear()
            self._report(chunk)

    def abandon(self) -> None:
        """Resume reduction in all chunks without reducing anything."""
        for chunk in range(len(self._chunks)):
            self._resume(chunk)

    def _resume(self, chunk: int) -> None:
        context, self._suspended[chunk] = self._suspended[chunk], None
        if context is not None:
            context.__exit__(None, None, None)

    def _report(self, chunk: int) -> None:
        if self._suspended[chunk] is not None:
            return
        while self._complete[chunk]:
            compat.report_gradient(self._chunks[chunk], self._complete[chunk].pop())


def _is_of(writer: Writer, pass_: Pass, placement: Placement) -> bool:
    """Whether this pass is one of ``writer``'s; a vocabulary pass has a rank where others have a stage."""
    if pass_.type is not writer.type:
        return False
    return pass_.type is not PassType.W or placement.chunk_of(pass_.stage) == writer.chunk


def _per_chunk(value: Any, chunks: int) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * chunks
