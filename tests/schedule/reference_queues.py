"""An independent simulation of programs with queues: equations, solved by repetition, on the text form.

Every instruction has an end; ends only grow until all equations hold. No event loop, no numbers, no tables of
the package: what is sent where, and what a pass waits for, is read off the names again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tests.schedule import reference
from tests.schedule.random_schedules import Shape

Words = Sequence[Sequence[str]]
_NEEDS = {  # the collectives that a pass of each algorithm waits for; B for the last stage alone
    "naive": {"S": "C0", "S2": "C1", "T": "C2", "L": "C2", "TW": "C2", "B": "C3"},
    "vocab-1": {"S": "C0", "T": "C1", "L": "C1", "TW": "C1", "B": "C2"},
    "vocab-2": {"S": "C0", "T": "C1", "L": "C1", "B": "C1"},
    "interlaced": {"S": "C0"},
    "none": {"L": "C0"},
}


def parts(word: str) -> tuple[int, str, int]:
    """Stage (or rank), name and microbatch in an instruction's text; a pair gives those of its F."""
    found = re.fullmatch(r"(\d+)([A-Z_]+)(?:(\d)\.)?(\d+)", word.partition("+")[0])
    assert found
    return int(found[1]), found[2] + (found[3] or ""), int(found[4])


def ends(
    program: Words, shape: Shape, ms: dict[str, float], late: Mapping[str, float] = MappingProxyType({})
) -> dict[str, float]:
    """The end of every pass, transfer (by its receive) and part in a collective.

    A pair takes ``ms["hidden"]`` less than F and B. What is ``late`` is issued inside the pass behind it.
    """
    data, last = shape.data, shape.p * shape.chunks - 1
    where = [reference.rank_of(stage, data) for stage in range(last + 1)]
    needs = {word: needs_of(word, shape, where) for row in program for word in row}
    end: dict[str, float] = {}
    for _ in range(10_000):
        before = dict(end)
        issued: dict[str, float] = {}
        for rank, row in enumerate(program):
            free = 0.0
            held: list[str] = []
            for word in row:
                _, name, mb = parts(word)
                if name in ms and not name.startswith(("C", "RECV")):
                    start = max([free, *(end.get(need, 0.0) for need in needs[word])])
                    if shape.algorithm == "interlaced" and name == "S":
                        start = max(start, *(end.get(f"{r}S{mb}", 0.0) - ms["S"] for r in range(shape.p)))
                    both = word.split("+")
                    free = start + sum(ms[parts(part)[1]] for part in both)
                    free -= ms["hidden"] if len(both) > 1 else 0.0
                    end |= dict.fromkeys(both, free)
                    issued |= {f"{rank} {w}": start + late[w] * (free - start) for w in held}
                    held = []
                elif word in late:
                    held.append(word)
                else:
                    issued[f"{rank} {word}"] = free
        _transfers(program, issued, end, where, ms)
        free = 0.0
        for word in [w for w in program[0] if parts(w)[1].startswith("C")]:
            same = [word.replace("0", str(rank), 1) for rank in range(shape.p)]
            free = max([free, *(issued[f"{r} {w}"] for r, w in enumerate(same))]) + ms[parts(word)[1]]
            end |= dict.fromkeys(same, free)
        if end == before:
            return end
    raise AssertionError("the equations have no solution")


def _transfers(
    program: Words, issued: dict[str, float], end: dict[str, float], where: list[int], ms: dict[str, float]
) -> None:
    links: dict[tuple[int, int], float] = {}
    for rank, row in enumerate(program):
        for word in row:
            stage, name, mb = parts(word)
            if name.startswith("SEND"):
                stage += 1 if name == "SEND_F" else -1
                receive = f"{stage}{name.replace('SEND', 'RECV')}{mb}"
                link = rank, where[stage]
                times = issued[f"{rank} {word}"], issued[f"{where[stage]} {receive}"], links.get(link, 0.0)
                end[receive] = links[link] = max(times) + ms["RECV"]


def needs_of(word: str, shape: Shape, where: list[int]) -> list[str]:
    """The instructions that one waits for on its rank; a pair waits for those of both passes."""
    return [need for part in word.split("+") for need in _needs(part, shape, where)]


def _needs(word: str, shape: Shape, where: list[int]) -> list[str]:
    stage, name, mb = parts(word)
    last, local = len(where) - 1, shape.algorithm == "none"
    wait = _NEEDS[shape.algorithm].get(name)
    if name in ("F", "B"):
        behind = stage + (-1 if name == "F" else 1)
        first = [f"{stage}F{mb}"] if name == "B" else []
        if not 0 <= behind <= last:
            if name == "F":
                return [] if local else [f"{where[0]}CI{mb}"]
            together = [f"{where[last]}S{mb}"] if shape.algorithm == "interlaced" else []
            at_hand = where[last] == shape.p - 1
            source = f"{where[last]}{'L' if at_hand else 'CG'}{mb}"
            gradient = [source] if reference.has_loss_pass(shape.data) else []
            return [*first, *together, *([f"{where[last]}{wait}.{mb}"] if wait else []), *gradient]
        moved = where[behind] != where[stage]
        return [*first, f"{stage}RECV_{name}{mb}" if moved else f"{behind}{name}{mb}"]
    if name == "IF":
        if mb < 2:
            return []
        return [f"{stage}CI{mb - 2}", *([f"0F{mb - 2}"] if stage == where[0] else [])]
    if name == "W":
        return [f"{stage}B{mb}"]
    if name == "IB":
        return [f"{stage}CIB{mb}"]
    late = name == "TW" or (shape.algorithm == "vocab-2" and name == "T")
    return [*([f"{stage}{wait}.{mb}"] if wait else []), *([f"{stage}CG{mb}"] if late else [])]
