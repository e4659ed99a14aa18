"""The methods: one name each, everywhere, with the number of communication barriers they need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Method:
    """How the vocabulary layers are placed and scheduled.

    Attributes:
        name: the one name, as on the command line.
        algorithm: the output layer's algorithm in the JSON form of a schedule; ``none`` where the
            output layer stays inside the last stage's F and B.
        barriers: communication barriers between the last stage's F and B (sections 4.3 and 4.4).
        summary: one line for tables and ``--help``.
    """

    name: str
    algorithm: str
    barriers: int
    summary: str

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether the vocabulary layers are partitioned over all ranks."""
        return self.algorithm != "none"


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("baseline", "none", 0, "input layer on the first stage, output layer on the last"),
        Method("redis", "none", 0, "baseline with transformer layers moved away from the last stage"),
        Method("naive", "naive", 3, "partitioned; maximum, sum and input gradient reduced one by one"),
        Method("vocab-1", "vocab-1", 2, "partitioned, Algorithm 1: statistics, then the input gradient"),
        Method("vocab-2", "vocab-2", 1, "partitioned, Algorithm 2: one barrier, T delayed at will"),
        Method("interlaced", "interlaced", 0, "partitioned; all ranks stop for a synchronous output layer"),
    )
}


def method_named(name: str) -> Method:
    """The method with this name.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]
