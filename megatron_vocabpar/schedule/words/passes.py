"""The words: what a pipeline rank does, one instruction at a time.

A schedule is data. Its atoms are *passes* (computation) and *communications*; both print as
``<stage><type><microbatch>`` and parse back: ``2S5`` is pass S of microbatch 5 on stage 2,
``0SEND_F3`` sends the output of 0F3, ``1C1.5`` is C1 of microbatch 5 (the dot keeps digits apart).
Times, peers and flags never live inside an instruction; they stand in maps keyed by it.

The stage of F, B and W is the virtual pipeline stage (``chunk * p + rank`` in the standard placement). The
passes of the vocabulary layers run on every rank (L only on the loss function's), so their stage, and that of
the collectives between them, is the rank.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, sections 4 and 5, appendix C.
Next: ``dependencies.py`` (the ordering rules), then ``make/building_block.py`` (the idea).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class _Name(Enum):
    """Members are singletons, so identity can hash them; Enum's own hash is a slow call on every look-up."""

    __hash__ = object.__hash__


class PassType(_Name):
    """Computation: the passes of one microbatch."""

    IF = "IF"  # input forward: look up this rank's rows of the embedding
    F = "F"  # forward of a stage's transformer layers
    S = "S"  # output layer on this rank's shard: logits and local softmax statistics
    S2 = "S2"  # naive only: exponentials and their sum, once the global maximum is known
    T = "T"  # output layer: weight gradient, and, except in vocab-2, input gradient
    L = "L"  # late gradient: the loss function, and the gradient of every token's loss
    TW = "TW"  # late gradient, except in vocab-2: the weight gradient, which T leaves out
    B = "B"  # backward of a stage; if W is split off, only its input gradient
    W = "W"  # weight gradient of a stage, if it is split from B
    IB = "IB"  # input backward: add the input gradient into this rank's embedding rows


class CommType(_Name):
    """Communication. Collectives name the moment a rank *launches* its part; consumers wait."""

    SEND_F = "SEND_F"  # output of F to the next stage
    RECV_F = "RECV_F"  # post the receive of the input of F
    SEND_B = "SEND_B"  # input gradient of B to the previous stage
    RECV_B = "RECV_B"  # post the receive of the output gradient of B
    C0 = "C0"  # output of the last stage's F to every rank
    C1 = "C1"  # softmax statistics of all ranks (naive: maxima; vocab-2: and the input gradient)
    C2 = "C2"  # vocab-1: the input gradient to the last stage; naive: the sums of exponentials
    C3 = "C3"  # naive: the input gradient to the last stage
    CG = "CG"  # late gradient: the gradient of every token's loss, from L's rank to every rank
    CI = "CI"  # embedded tokens to the first stage
    CIB = "CIB"  # input gradient of the first stage's B back to the shards that own the rows


POINT_TO_POINT = frozenset({CommType.SEND_F, CommType.RECV_F, CommType.SEND_B, CommType.RECV_B})
# The receive of each send, and how many stages further it stands.
RECEIVE_OF = {CommType.SEND_F: (CommType.RECV_F, 1), CommType.SEND_B: (CommType.RECV_B, -1)}
OUTPUT_COLLECTIVES = frozenset({CommType.C0, CommType.C1, CommType.C2, CommType.C3, CommType.CG})
INPUT_COLLECTIVES = frozenset({CommType.CI, CommType.CIB})
COLLECTIVES = OUTPUT_COLLECTIVES | INPUT_COLLECTIVES
VOCABULARY_PASSES = frozenset(PassType) - {PassType.F, PassType.B, PassType.W}


@dataclass(frozen=True, slots=True)
class Pass:
    """One computation of one microbatch on one stage."""

    type: PassType
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return _text(self.stage, self.type.value, self.microbatch)


@dataclass(frozen=True, slots=True)
class Comm:
    """One communication of one microbatch, as one rank takes part in it."""

    type: CommType
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return _text(self.stage, self.type.value, self.microbatch)


Instruction = Pass | Comm

_NAMES = {t.value: t for t in (*PassType, *CommType)}
_PATTERN = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(?:(\d)\.)?(\d+)")


def _text(stage: int, name: str, microbatch: int) -> str:
    """A dot separates a name that ends in a digit from the microbatch: 2S2.0 is S2, 2S20 is S."""
    return f"{stage}{name}.{microbatch}" if name[-1].isdigit() else f"{stage}{name}{microbatch}"


def parse(text: str) -> Instruction:
    """Read an instruction back from its text form.

    Raises:
        ValueError: if ``text`` is not ``<stage><type><microbatch>``.
    """
    match = _PATTERN.fullmatch(text)
    name = match[2] + (match[3] or "") if match else ""
    if match is None or name not in _NAMES:
        raise ValueError(f"{text!r} is not an instruction; expected <stage><type><microbatch>, such as 2S5")
    type_, stage, microbatch = _NAMES[name], int(match[1]), int(match[4])
    if isinstance(type_, PassType):
        return Pass(type_, stage, microbatch)
    return Comm(type_, stage, microbatch)
