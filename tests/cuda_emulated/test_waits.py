"""The host's budget of waits for the device: none in a pass of the steady state, few in an iteration.

``vocabpar train`` may wait three times between the passes of a step on the rank of the loss, twice on the
others: for the shapes of the microbatches, for their ids, and for what is to hold of gradients and losses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_vocabpar.schedule.make.families import families
from tests.cuda_emulated import jobs

OURS = "runtime/streams.py"


@pytest.mark.parametrize("family", families())
def test_no_pass_waits_in_the_steady_state(family: str, tmp_path: Path) -> None:
    config = replace(jobs.SMALL, family=family, layers=4 * families()[family].chunks)
    outcome = jobs.run(config, tmp_path / "job")
    assert outcome.well, outcome.message
    assert outcome.waits_in_passes() == {}
    # The last step is the one whose timeline is read.
    between = dict.fromkeys(range(2), 0)
    for rank, iteration, _, kind, place, count in outcome.waits:
        if iteration == 1 and place.startswith(OURS):
            assert kind == "cudaEventSynchronize"
            between[rank] += count
    assert max(between.values()) <= 3


def test_a_wait_in_a_pass_is_seen(tmp_path: Path) -> None:
    from tests.cuda_emulated.faults import copy_inside_a_pass

    outcome = jobs.run(jobs.SMALL, tmp_path / "job", plant=copy_inside_a_pass)
    assert outcome.waits_in_passes()
