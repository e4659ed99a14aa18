"""A plan that a model was not built for is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_vocabpar.pipeline.model.built_for import check_built_for
from megatron_vocabpar.schedule.make.generate import generate
from megatron_vocabpar.schedule.times.costs import PassCosts


def chunks_of(*ends: tuple[bool, bool]) -> list[torch.nn.Module]:
    """Chunks with these ``pre_process`` and ``post_process``."""
    chunks: list[Any] = [torch.nn.Module() for _ in ends]
    for chunk, (first, last) in zip(chunks, ends, strict=True):
        chunk.pre_process, chunk.post_process = first, last
    return chunks


FIRST, LAST, BETWEEN = (True, False), (False, True), (False, False)
PLAIN = SimpleNamespace(mtp_num_layers=None)
V = generate("vocab-2", 2, 4, family="v-half")
STANDARD = generate("vocab-2", 2, 4, family="interleaved")


@pytest.mark.parametrize(
    ("schedule", "ends", "config", "message"),
    [
        (V, [FIRST], PLAIN, "the model has 1 chunks, the schedule 2"),
        (
            V,
            [FIRST, BETWEEN],
            PLAIN,
            r"stage 3 in chunk 1 of pipeline rank 0 \(vshape\), .* built with post_process False",
        ),
        (
            STANDARD,
            [FIRST, LAST],
            PLAIN,
            r"stage 2 in chunk 1 of pipeline rank 0 \(standard\), .* built with post_process True",
        ),
        (V, [FIRST, LAST], SimpleNamespace(mtp_num_layers=1), "0 depths of multi-token prediction, .* 1"),
        (
            generate("vocab-2", 2, 4, costs=PassCosts.default(2, 1), family="v-half"),
            [FIRST, LAST],
            SimpleNamespace(
                mtp_num_layers=1, pipeline_model_parallel_layout=SimpleNamespace(layout=[[[], []], [[], []]])
            ),
            None,
        ),
        (V, [FIRST, LAST], PLAIN, None),
        (STANDARD, [FIRST, BETWEEN], PLAIN, None),
    ],
)
def test_a_plan_runs_only_what_was_built_for_it(
    schedule: Any, ends: list[tuple[bool, bool]], config: Any, message: str | None
) -> None:
    if message is None:
        check_built_for(schedule, chunks_of(*ends), 0, config)
        return
    with pytest.raises(ValueError, match=message):
        check_built_for(schedule, chunks_of(*ends), 0, config)
