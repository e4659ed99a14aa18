"""A product that B has left to W."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LeftProduct:
    """One product of a layer's run.

    Attributes:
        parameters: those to whose gradients it adds.
        add: computes it, and adds.
    """

    parameters: Sequence[torch.nn.Parameter]
    add: Callable[[], None]
