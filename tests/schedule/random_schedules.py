"""Valid schedules of any shape, in random order, by the independent reading in ``reference.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

from megatron_vocabpar.schedule.serialize import from_json
from megatron_vocabpar.schedule.words.passes import Pair, PassType
from megatron_vocabpar.schedule.words.schedule import Schedule
from tests.schedule import reference


@dataclass(frozen=True)
class Shape:
    """The parts of a schedule, without its order."""

    algorithm: str = "vocab-2"
    p: int = 2
    m: int = 3
    chunks: int = 1
    placement: str = "standard"
    split: bool = False

    @property
    def data(self) -> dict[str, Any]:
        """The JSON form without the passes of any rank."""
        return {
            "p": self.p,
            "m": self.m,
            "chunks": self.chunks,
            "algorithm": self.algorithm,
            "placement": self.placement,
            "input": "local" if self.algorithm == "none" else "parallel",
            "ranks": [[] for _ in range(self.p)],
        }


def random_data(shape: Shape, seed: int) -> dict[str, Any]:
    """The JSON form of a valid schedule: it repeatedly takes a random pass that may run next."""
    data, draw = shape.data, Random(seed)
    left = {key: rank for rank, keys in enumerate(reference.wanted(data, shape.split)) for key in keys}
    needs = {key: [need for need, _ in reference.waits_for(key, data, 0.0)] for key in left}
    done: set[reference.Key] = set()
    while left:
        ready = sorted(key for key in left if done.issuperset(needs[key]))
        chosen = draw.choice(ready)
        together = shape.algorithm == "interlaced" and chosen[0] == "S"
        for op, place, mb in [("S", r, chosen[2]) for r in range(shape.p)] if together else [chosen]:
            rank = left.pop((op, place, mb))
            chunk = place // shape.p if op in ("F", "B", "W") else 0
            data["ranks"][rank].append({"op": op, "mb": mb, "chunk": chunk})
            done.add((op, place, mb))
    return data


def random_schedule(shape: Shape, seed: int) -> Schedule:
    return from_json(json.dumps(random_data(shape, seed)))


def with_pairs(schedule: Schedule, draw: Random, share: float = 0.7) -> Schedule:
    """Make about this share of neighbours F and B of two microbatches pairs; not every choice can run."""
    pairs = {
        Pair(one, two)
        for row in schedule.ranks
        for one, two in pairwise(row)
        if (one.type, two.type) == (PassType.F, PassType.B)
        and one.microbatch != two.microbatch
        and draw.random() < share
    }
    return replace(schedule, pairs=frozenset(pairs))


def accepted(data: dict[str, Any], split: bool) -> bool:
    """Whether the independent reading finds every pass once, and an order that can run."""
    rows, expected = reference.keys_of(data), reference.wanted(data, split)
    if any(sorted(row) != sorted(keys) for row, keys in zip(rows, expected, strict=True)):
        return False
    ms = dict.fromkeys(["IF", "F", "S", "S2", "T", "L", "TW", "B", "W", "IB"], 1.0)
    return reference.starts(data, ms, 0.0) is not None


SHAPES = [
    Shape("none", 3, 4),
    Shape("naive", 2, 3),
    Shape("vocab-1", 3, 3),
    Shape("vocab-1", 2, 3, 2, "vshape", True),
    Shape("vocab-2", 1, 4),
    Shape("vocab-2", 3, 4, split=True),
    Shape("vocab-2", 2, 3, 2, "standard"),
    Shape("vocab-2", 3, 3, 2, "vshape", True),
    Shape("vocab-2", 2, 2, 3, "vshape"),
    Shape("none", 3, 3, 2, "vshape", True),
    Shape("interlaced", 3, 3),
]
