"""1F1B: one stage a rank; F and B run down and up the pipeline without waiting.

Source: Harlap et al., PipeDream (2018); Figure 9 with the vocabulary passes inserted.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..costs import PassTimes
from ..passes import PassType
from ..placement import Placement
from . import Family


def pattern(layout: Placement, times: PassTimes) -> Mapping[tuple[PassType, int], float]:
    """No pass waits."""
    return {}


ONE_F_ONE_B = Family("1f1b", "standard", 1, False, pattern)
