"""The peaks that families claim, stated again."""

from __future__ import annotations

from megatron_vocabpar.schedule.words.methods import Method

CLAIMED = {"baseline": 0, "redis": 0, "naive": 3, "vocab-1": 2, "vocab-2": 1}


def claimed(family: str, method: str, p: int) -> float:
    """The claims, stated again: 1F1B p; interleaved as Megatron; V shapes a half, a third and all of p."""
    barriers = CLAIMED.get(method, 0)
    base = {
        "1f1b": p,
        "zb-h1": p,
        "interleaved": (3 * p - 1) / 2,
        "v-half": -(-p // 2) + 1,
        "v-min": -(-p // 3) + 1,
        "v-zb": max(p, 2),
        "dualpipev": p + 2,
        "1f1b-overlap": (3 * p + 1) / 2,
    }[family]
    if method == "interlaced":
        return -(-3 * base // 2)
    if family == "dualpipev":
        return base
    return max(p, 2 + barriers) if family == "v-zb" else base + barriers


PAPERS = {
    "naive": Method("naive", "", "C0 S C1 S2 C2 T C3 B"),
    "vocab-1": Method("vocab-1", "", "C0 S C1 T C2 B"),
    "vocab-2": Method("vocab-2", "", "C0 S C1 B", "C1 T"),
}
"""The paper's chains: every token's gradient is known before, and there is no loss function."""
