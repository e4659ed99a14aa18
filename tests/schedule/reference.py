"""An independent reading of the rules, from the JSON form alone, written out plainly and slowly.

It shares no code with ``megatron_vocabpar.schedule``: it lists for every pass the passes it must follow, with
the latency between them, and starts what is ready until nothing is left.
"""

from __future__ import annotations

from typing import Any

Key = tuple[str, int, int]  # op, stage (F, B, W) or rank, microbatch


def keys_of(data: dict[str, Any]) -> list[list[Key]]:
    """Each rank's passes, with chunks turned into stages."""
    p = data["p"]
    rows = []
    for rank, row in enumerate(data["ranks"]):
        keys = []
        for item in row:
            place = rank
            if item["op"] in ("F", "B", "W"):
                backwards = data["placement"] == "vshape" and item["chunk"] % 2 == 1
                place = item["chunk"] * p + (p - 1 - rank if backwards else rank)
            keys.append((item["op"], place, item["mb"]))
        rows.append(keys)
    return rows


def wanted(data: dict[str, Any], split: bool = False) -> list[set[Key]]:
    """The passes that each rank must have."""
    p, ops = data["p"], {"none": "", "naive": "S S2 T", "vocab-1": "S T", "vocab-2": "S T", "interlaced": "S"}
    out = []
    for rank in range(p):
        keys: set[Key] = set()
        for mb in range(data["m"]):
            for chunk in range(data["chunks"]):
                backwards = data["placement"] == "vshape" and chunk % 2 == 1
                stage = chunk * p + (p - 1 - rank if backwards else rank)
                keys |= {(op, stage, mb) for op in ("F", "B", "W") if split or op != "W"}
            keys |= {(op, rank, mb) for op in ops[data["algorithm"]].split()}
            if has_loss_pass(data):
                keys |= {("L", rank, mb)} if rank == p - 1 else set()
                keys |= {("TW", rank, mb)} if data["algorithm"] in ("naive", "vocab-1") else set()
            if data["input"] == "parallel":
                keys |= {("IF", rank, mb), ("IB", rank, mb)}
        out.append(keys)
    return out


def waits_for(key: Key, data: dict[str, Any], comm: float) -> list[tuple[Key, float]]:
    """The passes that must end before ``key`` starts, each with the latency between the two."""
    op, place, mb = key
    p, algorithm, last = data["p"], data["algorithm"], data["p"] * data["chunks"] - 1
    everywhere = range(p)
    of_statistics = "S2" if algorithm == "naive" else "S"
    broadcast = [(("L", p - 1, mb), comm)]
    if op == "F" and place == 0:
        return [(("IF", rank, mb), comm) for rank in everywhere] if data["input"] == "parallel" else []
    if op == "F":
        return [(("F", place - 1, mb), comm if moves(place - 1, place, data) else 0.0)]
    if op == "B" and place < last:
        return [
            (("F", place, mb), 0.0),
            (("B", place + 1, mb), comm if moves(place, place + 1, data) else 0.0),
        ]
    if op == "B":
        producer = {"naive": "T", "vocab-1": "T", "vocab-2": "S", "interlaced": "S"}.get(algorithm)
        latency = 0.0 if algorithm == "interlaced" else comm
        follows = [((producer, rank, mb), latency) for rank in everywhere] if producer else []
        if has_loss_pass(data):
            at_hand = rank_of(last, data) == p - 1
            follows.append((("L", p - 1, mb), 0.0 if at_hand else comm))
        return [(("F", place, mb), 0.0), *follows]
    if op == "S":
        return [(("F", last, mb), comm)]
    if op == "S2":
        return [(("S", rank, mb), comm) for rank in everywhere]
    if op == "L" and algorithm == "none":
        return [(("F", last, mb), comm)]
    if op in ("L", "T", "TW"):
        waits = op == "TW" or (op == "T" and algorithm == "vocab-2")
        return [((of_statistics, rank, mb), comm) for rank in everywhere] + (broadcast if waits else [])
    if op == "W":
        return [(("B", place, mb), 0.0)]
    if op == "IB":
        return [(("B", 0, mb), comm)]
    if mb < 2:
        return []
    # The throttle of IF: the embedded tokens of the microbatch before last have left this rank.
    gone = [(("IF", rank, mb - 2), comm) for rank in everywhere]
    return gone + ([(("F", 0, mb - 2), 0.0)] if place == rank_of(0, data) else [])


def has_loss_pass(data: dict[str, Any]) -> bool:
    """Whether the loss function is a pass: of a whole layer only if it is not on the last stage's rank."""
    if data["algorithm"] == "none":
        return rank_of(data["p"] * data["chunks"] - 1, data) != data["p"] - 1
    return bool(data["algorithm"] != "interlaced")


def moves(stage: int, following: int, data: dict[str, Any]) -> bool:
    """Whether two stages are on different ranks."""
    return rank_of(stage, data) != rank_of(following, data)


def rank_of(stage: int, data: dict[str, Any]) -> int:
    chunk, position = divmod(stage, data["p"])
    backwards = data["placement"] == "vshape" and chunk % 2 == 1
    return data["p"] - 1 - position if backwards else position


def starts(data: dict[str, Any], ms: dict[str, float], comm: float) -> dict[Key, float] | None:
    """The earliest start of every pass; None if the order deadlocks."""
    rows = keys_of(data)
    edges: dict[Key, list[tuple[Key, float]]] = {}
    for row in rows:
        for before, key in zip([None, *row], row, strict=False):
            edges[key] = waits_for(key, data, comm) + ([(before, 0.0)] if before else [])
    start: dict[Key, float] = {}
    left = set(edges)
    while left:
        ready = {key for key in left if all(need in start for need, _ in edges[key])}
        if not ready:
            return None
        for key in ready:
            start[key] = max((start[n] + ms[n[0]] + late for n, late in edges[key]), default=0.0)
        if data["algorithm"] == "interlaced":
            together(ready, start, data["p"])
            ready = {key for key in ready if key in start}
            if not ready:
                return None
        left -= ready
    return start


def together(ready: set[Key], start: dict[Key, float], p: int) -> None:
    """Interlaced's S starts on all ranks at once: undo those whose peers are not ready."""
    for key in [key for key in ready if key[0] == "S"]:
        peers = [("S", rank, key[2]) for rank in range(p)]
        if all(peer in ready for peer in peers):
            latest = max(start[peer] for peer in peers)
            for peer in peers:
                start[peer] = latest
    for key in [key for key in ready if key[0] == "S"]:
        if not all(("S", rank, key[2]) in ready for rank in range(p)):
            del start[key]


def peak_activations(data: dict[str, Any]) -> float:
    """The most microbatches between F and B (or a separate W) on any rank; a chunk is a fraction of one."""
    split = any(item["op"] == "W" for row in data["ranks"] for item in row)
    peak = 0
    for row in data["ranks"]:
        alive = 0
        for item in row:
            alive += (item["op"] == "F") - (item["op"] == ("W" if split else "B"))
            peak = max(peak, alive)
    return peak / data["chunks"]
