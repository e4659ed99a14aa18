"""The methods: one value each, whose chain says it all.

A chain is what one microbatch's output layer does between the last stage's F and its B, in the words of
``passes.py``: every rank's pass, then the collective that carries its result, and so on. What may be done
later stands in a second chain. From these follow the passes and collectives of a method, what each waits for,
who produces it, and the number of barriers: the collectives that all ranks' passes produce on the way to B.

    naive       C0 S C1 S2 C2 T C3 B
    vocab-1     C0 S C1 T C2 B
    vocab-2     C0 S C1 B       and later   C1 T
    interlaced  C0 [S] B        in brackets: all ranks run it in step, with its collectives inside

A method of one's own is a ``Method``: its chain, times of its passes in ``costs.py`` (or a cost file), and,
to train with it, handlers for what is new in it (``integration/handlers.py``).

Source: sections 4.1 to 4.4, appendix C.
Next: ``dependencies.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .passes import CommType, PassType

Word = PassType | CommType


@dataclass(frozen=True)
class Method:
    """How the vocabulary layers are placed and scheduled.

    Attributes:
        name: the one name, as on the command line.
        summary: one line for tables and ``--help``.
        chain: from C0 to B; empty where both layers stay inside the first and the last stage's F and B.
        late: what follows a collective of the chain, and may be delayed at will.

    Raises:
        ValueError: for a word that is no pass or collective of the output layer, or a chain that is none.
    """

    name: str
    summary: str
    chain: str = ""
    late: str = ""

    def __post_init__(self) -> None:
        words = [_type(self, word) for word in self.chain.split()]
        if words and (words[0] is not CommType.C0 or words[-1] is not PassType.B):
            raise ValueError(f"method {self.name}: the chain {self.chain!r} must lead from C0 to B")
        late = [_type(self, word) for word in self.late.split()]
        if late and late[0] not in words:
            raise ValueError(f"method {self.name}: {self.late!r} must start with a word of {self.chain!r}")
        if len(set(words)) < len(words) or set(words) & set(late[1:]):
            raise ValueError(f"method {self.name}: {self.chain!r}, then {self.late!r}, names a word twice")

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether the vocabulary layers are partitioned over all ranks."""
        return bool(self.chain)

    @cached_property
    def words(self) -> tuple[Word, ...]:
        """Passes and collectives, in order, without B."""
        words = [_type(self, word) for word in (*self.chain.split(), *self.late.split())]
        return tuple(word for word in dict.fromkeys(words) if word is not PassType.B)

    @cached_property
    def passes(self) -> tuple[PassType, ...]:
        """The output layer's passes, which every rank runs for every microbatch."""
        return tuple(word for word in self.words if isinstance(word, PassType))

    @cached_property
    def collectives(self) -> tuple[CommType, ...]:
        """The output layer's collectives, which every rank takes part in for every microbatch."""
        return tuple(word for word in self.words if isinstance(word, CommType))

    @cached_property
    def in_step(self) -> frozenset[PassType]:
        """The passes that all ranks start together, since their collectives are inside."""
        marked = (word for word in self.chain.split() if word.startswith("["))
        return frozenset(type_ for word in marked if isinstance(type_ := _type(self, word), PassType))

    @cached_property
    def waits_for(self) -> dict[PassType, Word]:
        """What each pass of the output layer waits for, and the last stage's B."""
        return {word: before for before, word in self._links if isinstance(word, PassType)}

    @cached_property
    def producers(self) -> dict[CommType, PassType]:
        """Whose result a collective carries; C0 is missing, which carries the last stage's alone."""
        return {
            word: before
            for before, word in self._links
            if isinstance(word, CommType) and isinstance(before, PassType)
        }

    def waiting_for(self, word: Word) -> frozenset[PassType]:
        """The passes that wait for a pass or collective of the chain."""
        return frozenset(pass_ for pass_, before in self.waits_for.items() if before is word)

    @property
    def barriers(self) -> int:
        """Communication barriers between the last stage's F and B (sections 4.3 and 4.4)."""
        return len(self.producers)

    @cached_property
    def _links(self) -> tuple[tuple[Word, Word], ...]:
        chains = ([_type(self, word) for word in chain.split()] for chain in (self.chain, self.late))
        return tuple(link for chain in chains for link in pairwise(chain))


_WORDS: dict[str, Word] = {
    word.value: word
    for word in (
        *(PassType.S, PassType.S2, PassType.T, PassType.B),
        *(CommType.C0, CommType.C1, CommType.C2, CommType.C3),
    )
}


def _type(method: Method, word: str) -> Word:
    name = word.removeprefix("[").removesuffix("]")
    if name not in _WORDS:
        raise ValueError(f"method {method.name}: {word!r} in its chain; there are {', '.join(_WORDS)}")
    return _WORDS[name]


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("baseline", "input layer on the first stage, output layer on the last"),
        Method("redis", "baseline with transformer layers moved away from the last stage"),
        Method(
            "naive",
            "partitioned; maximum, sum and input gradient reduced one by one",
            "C0 S C1 S2 C2 T C3 B",
        ),
        Method(
            "vocab-1",
            "partitioned, Algorithm 1: statistics, then the input gradient",
            "C0 S C1 T C2 B",
        ),
        Method("vocab-2", "partitioned, Algorithm 2: one barrier, T delayed at will", "C0 S C1 B", "C1 T"),
        Method("interlaced", "partitioned; all ranks stop for a synchronous output layer", "C0 [S] B"),
    )
}


def method_named(method: str | Method) -> Method:
    """The method with this name; a ``Method`` is its own.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    return METHODS[method]
