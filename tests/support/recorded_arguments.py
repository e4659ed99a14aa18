"""The arguments of the Megatron versions that were read."""

from __future__ import annotations

from functools import cache

from tests.megatron_lm.training import ROOT


@cache
def recorded() -> dict[str, set[str]]:
    """The arguments of each version that was read, by version."""
    versions: dict[str, set[str]] = {}
    now: set[str] = set()
    for line in (ROOT / "tests/megatron_lm/recorded_arguments.txt").read_text().splitlines():
        sign, *names = line.split() or ["#"]
        if sign.startswith("["):
            versions[sign.strip("[]")] = now = set(now)
        elif sign == "+":
            now |= set(names)
        elif sign == "-":
            now -= set(names)
    return versions
