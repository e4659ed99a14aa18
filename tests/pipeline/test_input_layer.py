"""The partitioned input layer without a job: how many microbatches' rows a rank holds."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import torch

from megatron_vocabpar.pipeline.handlers.input_layer import InputLayer
from megatron_vocabpar.runtime.buffers import Buffers
from megatron_vocabpar.runtime.comm import VocabGroups
from megatron_vocabpar.schedule.words.passes import Comm, CommType, Pass, PassType
from megatron_vocabpar.schedule.words.placement import Placement


def test_rows_wait_for_those_of_two_microbatches_before() -> None:
    events, waited = count(), []
    rank = SimpleNamespace(
        groups=VocabGroups((0, 1), 2, 1, 1, *[Mock()] * 3),
        placement=Placement(2),
        pipeline_rank=1,
        side_stream=SimpleNamespace(submit=lambda work: next(events)),
    )
    owned = torch.tensor([0])
    tokens = SimpleNamespace(rank=0, plan=SimpleNamespace(counts=(1, 1)))
    microbatch = SimpleNamespace(owned_rows=owned, embedded=(tokens,))
    iteration = SimpleNamespace(
        rank=rank,
        call=SimpleNamespace(config=None),
        gradients=None,
        buffers=Buffers(),
        microbatches=[microbatch] * 4,
        wait=waited.append,
        arrived=None,
        hand_on=None,
    )
    embedding = Mock(side_effect=lambda tokens: torch.zeros(len(tokens), 4))
    layer = InputLayer(iteration, SimpleNamespace(word_embeddings=embedding))
    seen = []
    for i in range(4):
        layer.input_forward(Pass(PassType.IF, 1, i))
        seen.append(list(waited))
        layer.gather_rows(Comm(CommType.CI, 1, i))
    assert seen == [[], [], [0], [0, 1]]
