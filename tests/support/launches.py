"""When Megatron launches the reduction of a bucket, among the passes of our schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_vocabpar.pipeline import compat, forward_backward

LAUNCH, REPORT, END = "launch", "report", "end"


@dataclass
class Heard:
    """What a rank has done.

    Attributes:
        events: launches, reports of gradients that bypass autograd, and ends of instructions.
        at_launch: the gradients that launches found, of this rank alone.
    """

    events: list[str] = field(default_factory=list)
    at_launch: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        self.events.clear()
        self.at_launch.clear()

    @property
    def in_passes(self) -> int:
        """Launches before the last instruction ends."""
        return self._before_the_last(END)

    @property
    def early(self) -> int:
        """Launches before the last gradient is complete."""
        return self._before_the_last(REPORT)

    def _before_the_last(self, event: str) -> int:
        last = len(self.events) - self.events[::-1].index(event)
        return self.events[:last].count(LAUNCH)


@contextmanager
def hearing() -> Iterator[Heard]:
    """In this context the launches of this process are heard."""
    heard, start, report = Heard(), _ParamAndGradBucketGroup.start_grad_sync, compat.report_gradient

    def start_and_keep(group: Any, *args: Any, **kwargs: Any) -> None:
        heard.events.append(LAUNCH)
        parameters = [p for bucket in group.buckets for p in bucket.params]
        heard.at_launch.update((p, p.main_grad.clone()) for p in parameters)
        start(group, *args, **kwargs)

    def report_and_keep(chunk: Any, parameter: torch.nn.Parameter) -> None:
        heard.events.append(REPORT)
        report(chunk, parameter)

    @contextmanager
    def named_range(*_: Any) -> Iterator[None]:
        yield
        heard.events.append(END)

    with (
        mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start_and_keep),
        mock.patch.object(compat, "report_gradient", report_and_keep),
        mock.patch.multiple(forward_backward, named_range=named_range, profiled=lambda _: True),
    ):
        yield heard
