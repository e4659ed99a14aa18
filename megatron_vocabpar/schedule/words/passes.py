"""The words: what a pipeline rank does, one instruction at a time.

A schedule is data. Its atoms are *passes* (computation) and *communications*; both print as
``<stage><type><microbatch>`` and parse back: ``2S5`` is pass S of microbatch 5 on stage 2,
``0SEND_F3`` sends the output of 0F3, ``1C1.5`` is C1 of microbatch 5 (the dot keeps digits apart).
A *pair* is two passes that run together, one instruction: ``0F5+2B1``. Times, peers and flags never live
inside an instruction; they stand in maps keyed by it.

The stage of F, B and W is the virtual pipeline stage (``chunk * p + rank`` in the standard placement). The
passes of the vocabulary layers run on every rank (L only on the loss function's), so their stage, and that of
the collectives between them, is the rank.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, sections 4 and 5, appendix C.
Next: ``dependencies.py`` (the ordering rules), then ``make/building_block.py`` (the idea).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum


class _Name(Enum):
    """Hashes members by identity, as they are singletons; Enum's own hash is a slow call on every look-up."""

    __hash__ = object.__hash__


class PassType(_Name):
    """Computation: the passes of one microbatch."""

    IF = "IF"  # input forward: look up this rank's rows of the embedding
    F = "F"  # forward of a stage's transformer layers
    S = "S"  # output layer on this rank's shard: logits and local softmax statistics
    S2 = "S2"  # naive only: exponentials and their sum, once the global maximum is known
    T = "T"  # output layer: input gradient; in vocab-2, whose S has it, weight gradient
    L = "L"  # the loss function, and the gradient of every token's loss
    TW = "TW"  # output layer, except in vocab-2: weight gradient
    R = "R"  # output layer, in an evaluation that ranks the targets: count this shard's ids that are likelier
    B = "B"  # backward of a stage; if W is split off, only its input gradient
    W = "W"  # weight gradient of a stage, if it is split from B
    IB = "IB"  # input backward: add the input gradient into this rank's embedding rows


class PairType(_Name):
    """Two passes that run together."""

    FB = "FB"  # F of one microbatch beside B of another


class CommType(_Name):
    """Communication. Collectives name the moment a rank *launches* its part; consumers wait."""

    SEND_F = "SEND_F"  # output of F to the next stage
    RECV_F = "RECV_F"  # post the receive of the input of F
    SEND_B = "SEND_B"  # input gradient of B to the previous stage
    RECV_B = "RECV_B"  # post the receive of the output gradient of B
    C0 = "C0"  # output of the last stage's F to every rank; of a whole layer, the tokens' losses
    C1 = "C1"  # softmax statistics of all ranks (naive: maxima; vocab-2: and the input gradient)
    C2 = "C2"  # vocab-1: the input gradient to the last stage; naive: the sums of exponentials
    C3 = "C3"  # naive: the input gradient to the last stage
    CG = "CG"  # the gradient of every token's loss, from L's rank to every rank
    CI = "CI"  # embedded tokens to the first stage
    CIB = "CIB"  # input gradient of the first stage's B back to the shards that own the rows


POINT_TO_POINT = frozenset({CommType.SEND_F, CommType.RECV_F, CommType.SEND_B, CommType.RECV_B})
# The receive of each send, and how many stages further it stands.
RECEIVE_OF = {CommType.SEND_F: (CommType.RECV_F, 1), CommType.SEND_B: (CommType.RECV_B, -1)}
COLLECTIVES = frozenset(CommType) - POINT_TO_POINT
LAYERS = (PassType.F, PassType.B, PassType.W)  # passes of transformer layers
VOCABULARY_PASSES = frozenset(PassType).difference(LAYERS)


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


@dataclass(frozen=True, slots=True)
class Pair:
    """F of one microbatch and B of another, which a rank runs together.

    Each hides the other's exchange between experts: while B computes, F's tokens travel, and the other way
    round. Both start when both have what they wait for, and both end at one time.

    Attributes:
        forward: an F.
        backward: a B of the same rank and of another microbatch.
    """

    forward: Pass
    backward: Pass

    @property
    def type(self) -> PairType:
        """``FB``, the type of every pair."""
        return PairType.FB

    @property
    def stage(self) -> int:
        """F's stage; B's may be another one of the same rank."""
        return self.forward.stage

    @property
    def microbatch(self) -> int:
        """F's microbatch."""
        return self.forward.microbatch

    def __str__(self) -> str:
        return f"{self.forward}{_TOGETHER}{self.backward}"


Atom = Pass | Comm
Instruction = Atom | Pair
InstructionType = PassType | CommType | PairType

_TOGETHER = "+"
_NAMES = {t.value: t for t in (*PassType, *CommType)}
_PATTERN = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(?:(\d)\.)?(\d+)")


def join_pairs(row: Iterable[Atom], pairs: Collection[Pair]) -> tuple[Instruction, ...]:
    """A rank's instructions, in which F and B of a pair are one: ``0F5 2B1`` becomes ``0F5+2B1``.

    ``pairs`` are neighbours in ``row``, F first; those of other ranks are ignored.
    """
    if not pairs:
        return tuple(row)
    backward = {pair.forward: pair for pair in pairs}
    joined: list[Instruction] = []
    for item in row:
        last = joined[-1] if joined else None
        pair = backward.get(last) if isinstance(last, Pass) else None
        if pair is not None and pair.backward == item:
            joined[-1] = pair
        else:
            joined.append(item)
    return tuple(joined)


def split_pairs(row: Iterable[Instruction]) -> tuple[Atom, ...]:
    """A rank's passes and communication, in order: ``0F5+2B1`` becomes ``0F5 2B1``."""
    return tuple(part for item in row for part in parts_of(item))


def parts_of(item: Instruction) -> tuple[Atom, ...]:
    """F and B of a pair; else the instruction alone."""
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)


def _text(stage: int, name: str, microbatch: int) -> str:
    """A dot separates a name that ends in a digit from the microbatch: 2S2.0 is S2, 2S20 is S."""
    return f"{stage}{name}.{microbatch}" if name[-1].isdigit() else f"{stage}{name}{microbatch}"


def parse(text: str) -> Instruction:
    """Read an instruction back from its text form.

    Raises:
        ValueError: if ``text`` is not ``<stage><type><microbatch>``, or an F and a B with ``+`` between.
    """
    if _TOGETHER in text:
        parts = [_parse_atom(part) for part in text.split(_TOGETHER)]
        match parts:
            case [Pass(PassType.F) as forward, Pass(PassType.B) as backward]:
                return Pair(forward, backward)
        raise ValueError(f"{text!r} is not a pair; expected an F and a B, such as 0F5+2B1")
    return _parse_atom(text)


def _parse_atom(text: str) -> Atom:
    match = _PATTERN.fullmatch(text)
    name = match[2] + (match[3] or "") if match else ""
    if match is None or name not in _NAMES:
        raise ValueError(f"{text!r} is not an instruction; expected <stage><type><microbatch>, such as 2S5")
    type_, stage, microbatch = _NAMES[name], int(match[1]), int(match[4])
    if isinstance(type_, PassType):
        return Pass(type_, stage, microbatch)
    return Comm(type_, stage, microbatch)
