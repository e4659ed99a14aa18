"""A first call's warm-up, as on a GPU: it gets what the call asks for, and leaves no trace."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megatron_vocabpar.layers.output.warm_up import warm_up
from megatron_vocabpar.pipeline import forward_backward
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.output import chain
from tests.cases import rest_is_slow
from tests.pipeline.gpt import Case, Result, run, train

ENTROPY = VocabOptions(metrics=("entropy-gradient", "accuracy"))
CASES = {
    "entropy": (Case(method="vocab-2", output_options=ENTROPY), {"entropy", "target_rank"}, False, False),
    "naive": (Case(method="naive"), set(), True, False),
    "8 bits": (Case(method="vocab-1", output_options=VocabOptions(fp8_head=True)), set(), False, True),
}


def trained(rank: int, case: Case, warm: bool) -> tuple[Result, list[Any]]:
    """The training, and by each warm-up its extras, whether it was naive's, and whether in 8 bits."""
    asked: list[Any] = []

    def noted(*given: Any, **options: Any) -> None:
        *_, shard_options, _, _, extras = given
        asked.append(({e.name for e in extras}, options["naive"], shard_options.fp8_weight is not None))
        warm_up(*given, **options)

    why = None if warm else "there is no GPU"
    with (
        patch.object(forward_backward, "why_not_triton", lambda *_: why),
        patch.object(chain, "warm_up", noted),
    ):
        return train(rank, case), asked


@pytest.mark.parametrize("name", rest_is_slow(list(CASES), "entropy", "naive"))
def test_a_call_warms_up_once_with_what_it_asks_for(name: str) -> None:
    case, extras, naive, fp8 = CASES[name]
    ((cold, nothing),), ((warm, asked),) = (run(case, warm, body=trained) for warm in (False, True))
    assert nothing == []
    assert asked == [(extras, naive, fp8)]
    assert warm.losses == cold.losses
    for key, weight in cold.weights.items():
        np.testing.assert_array_equal(warm.weights[key], weight)
