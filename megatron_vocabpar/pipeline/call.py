"""``Call``: the arguments of one forward-backward call. Next: ``iteration.py``, what happens during it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vocabpar.layers.bins import TopLogprobs
from megatron_vocabpar.layers.extras.distillation import Teacher
from megatron_vocabpar.pipeline.options import VocabOptions

ForwardStep = Callable[..., tuple[torch.Tensor, Callable[..., Any]]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one forward-backward call that handlers need.

    Attributes:
        fixed_shape: ``[s, b, H]`` between stages on this rank, if all microbatches have one length.
        options: how partitioned vocabulary layers are computed.
        teacher: gives what a teacher says of a microbatch, in a distillation.
        keep_top: gets a microbatch's number and its ``top_logprobs``.
    """

    forward_step_func: ForwardStep
    data_iterators: Sequence[Iterator[Any] | None]
    chunks: Sequence[torch.nn.Module]
    config: Any
    num_microbatches: int
    fixed_shape: tuple[int, int, int]
    cp_group_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_microbatch_flag: bool
    options: VocabOptions
    teacher: Callable[[int], Teacher] | None = None
    keep_top: Callable[[int, TopLogprobs], None] | None = None
