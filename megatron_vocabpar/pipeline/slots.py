"""What instructions leave for each other in an iteration's buffers: the whole list.

Letters: n tokens of a microbatch that count, H hidden, k gradients of a token (of its loss, and of extras).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_vocabpar.layers.extras.extra import Extra
from megatron_vocabpar.layers.numbers import Softmax
from megatron_vocabpar.layers.output.naive import NaiveState
from megatron_vocabpar.layers.output.shard_state import Part, ShardState
from megatron_vocabpar.runtime.buffers import Slot
from megatron_vocabpar.runtime.streams import Waitable


class Graph(NamedTuple):
    """What F of a stage leaves for its B."""

    stage_input: Tensor | None
    rows: Tensor | None
    output: Tensor


class Sent(NamedTuple):
    """What S sends: the packed statistics [n, W], and the extras whose columns are in them."""

    statistics: Tensor
    extras: Sequence[Extra]


class Joined(NamedTuple):
    """What the statistics of all shards have become.

    Attributes:
        softmax: of all shards.
        extras: its further numbers.
        hidden_grad: [n, H] or [k, n, H], the sum of the input gradient, where it came along.
    """

    softmax: Softmax
    extras: Sequence[Extra]
    hidden_grad: Tensor | None


# Transformer layers
OUTPUT = Slot[Tensor]("output")  # F, for the next stage: [s, b, H]
GRAPH = Slot[Graph]("graph")  # F, for B
INPUT_GRAD = Slot[Tensor]("input_grad")  # B, for the stage before: [s, b, H]
RECEIVED = Slot[Waitable[Tensor]]("received")  # RECV_F, RECV_B
HIDDEN = Slot[Tensor]("hidden")  # the last stage's F, for C0: [(1 + D) s b, H]
TOKEN_LOSSES = Slot[Tensor]("token_losses")  # the last stage's F with a whole output layer, for C0: [b s]

# Input layer
ROWS = Slot[Tensor]("rows")  # IF, for CI
ROWS_GRAD = Slot[Tensor]("rows_grad")  # B of a stage that embeds, for CIB

# Output layer
STATE = Slot[ShardState]("state")  # S, in naive S2
LOGITS = Slot[NaiveState]("logits")  # naive's S, for S2
OFFSETS = Slot[Tensor]("offsets")  # naive's S, for C1: [n]
SENT = Slot[Sent]("statistics")  # S, in naive S2
JOINED = Slot[Waitable[Joined]]("softmax")  # C1, in naive C2
PART = Slot[Part]("part of the input gradient")  # T, for C2
HIDDEN_GRAD = Slot[tuple[Tensor, Tensor]]("hidden_grad")  # interlaced's S, for B: [n, H], not scaled; [k, n]
COUNTS = Slot[Tensor]("counts")  # R: [n]
RANKED = Slot[Joined]("softmax")  # R, for L
GRADIENT = Slot[Tensor]("gradient")  # L: [k, n]; [b s] of a whole output layer

ARRIVAL = Slot[Waitable[Tensor]]("tensor")  # every collective that brings a tensor
