"""The methods: one value each, whose chain says it all.

A chain is what one microbatch's output layer does between the last stage's F and its B, in the words of
``passes.py``: every rank's pass, then the collective that carries its result, and so on. What may be done
later stands in a second chain. From these follow the passes and collectives of a method, what each waits for,
who produces it, and the number of barriers: the collectives that all ranks' passes produce on the way to B.

    naive       C0 S C1 S2 C2 T C3 B
    vocab-1     C0 S C1 T C2 B
    vocab-2     C0 S C1 B       and later   C1 T
    interlaced  C0 [S] B        in brackets: all ranks run it in step, with its collectives inside

Methods differ in when T runs, not in what the loss may be. Where it is any function of the tokens' losses
(*late gradient*), its gradient is known only when these are: L runs the loss function, CG sends every token's
gradient to all ranks, and B scales the rows of the input gradient with it. The weight gradient waits for CG,
and where B waits for T, is a pass of its own (TW). So there are besides

    naive       C2 L CG B    C2 TW    CG TW
    vocab-1     C1 L CG B    C1 TW    CG TW
    vocab-2     C1 L CG B             CG T

A method of your own is a ``Method`` with its chain and, in a cost file (``times/costs.py``), the times of its
passes. To train with it, write handlers for what is new in it (``integration/handlers.py``).

Source: sections 4.1 to 4.4, appendix C.
Next: ``dependencies.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from megatron_vocabpar.schedule.words.passes import CommType, PassType

Word = PassType | CommType


@dataclass(frozen=True)
class Method:
    """How the vocabulary layers are placed and scheduled.

    Attributes:
        name: the one name, as on the command line.
        summary: one line for tables and ``--help``.
        chain: from C0 to B; empty where both layers stay inside the first and the last stage's F and B.
        late: what follows a word of the chain, and may be delayed at will; such chains, separated by commas,
            may end in what stands before.
        late_gradient: whether the loss may be any function of the tokens' losses; see ``with_late_gradient``.

    Raises:
        ValueError: for a word that is no pass or collective of the output layer, or a chain that is none.
    """

    name: str
    summary: str
    chain: str = ""
    late: str = ""
    late_gradient: bool = False

    def __post_init__(self) -> None:
        words, *later = self._chains
        if words and (words[0] is not CommType.C0 or words[-1] is not PassType.B):
            raise ValueError(f"method {self.name}: the chain {self.chain!r} must lead from C0 to B")
        known, twice = set(words), len(set(words)) < len(words)
        for late in later:
            if late[0] not in known:
                raise ValueError(
                    f"method {self.name}: {self.late!r} must start with a word of {self.chain!r}"
                )
            joins = late[-1] is PassType.B or late[-1] not in words
            twice = twice or bool(known & set(late[1:-1] if joins else late[1:]))
            known |= set(late)
        if twice:
            raise ValueError(f"method {self.name}: {self.chain!r}, then {self.late!r}, names a word twice")

    def with_late_gradient(self) -> Method:
        """The same method for losses that are any function of the tokens' losses.

        Methods that keep the output layer on one rank have its autograd, and those whose ranks run it in step
        wait for one another anyway: their chains stay as they are.
        """
        if self.late_gradient or PassType.T not in self.passes:
            return replace(self, late_gradient=True)
        (statistics,) = (word.value for word in self.waits_for[PassType.T])
        weight = PassType.TW.value if PassType.T.value in self.chain.split() else PassType.T.value
        late = f"{statistics} L CG B, {self.late or f'{statistics} {weight}'}, CG {weight}"
        return replace(self, late=late, late_gradient=True)

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether the vocabulary layers are partitioned over all ranks."""
        return bool(self.chain)

    @cached_property
    def words(self) -> tuple[Word, ...]:
        """Passes and collectives, in order, without B."""
        words = dict.fromkeys(word for chain in self._chains for word in chain)
        return tuple(word for word in words if word is not PassType.B)

    @cached_property
    def passes(self) -> tuple[PassType, ...]:
        """The output layer's passes, which every rank runs for every microbatch, but for L."""
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
    def weight_pass(self) -> PassType:
        """The pass after which nothing needs the exponentials: it adds the weight gradient."""
        return PassType.TW if PassType.TW in self.passes else PassType.T

    @cached_property
    def waits_for(self) -> dict[PassType, tuple[Word, ...]]:
        """What each pass of the output layer waits for, and the last stage's B; first what the chain says."""
        waits: dict[PassType, tuple[Word, ...]] = {}
        for before, word in self._links:
            if isinstance(word, PassType):
                waits[word] = (*waits.get(word, ()), before)
        return waits

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
        return frozenset(pass_ for pass_, before in self.waits_for.items() if word in before)

    @property
    def barriers(self) -> int:
        """Communication barriers between the last stage's F and B (sections 4.3 and 4.4)."""
        return len(self.producers.keys() - {CommType.CG})

    @cached_property
    def _chains(self) -> tuple[list[Word], ...]:
        chains = (self.chain, *filter(None, self.late.split(",")))
        return tuple([_type(self, word) for word in chain.split()] for chain in chains)

    @cached_property
    def _links(self) -> tuple[tuple[Word, Word], ...]:
        return tuple(link for chain in self._chains for link in pairwise(chain))


_WORDS: dict[str, Word] = {
    word.value: word
    for word in (
        *(PassType.S, PassType.S2, PassType.T, PassType.L, PassType.TW, PassType.B),
        *(CommType.C0, CommType.C1, CommType.C2, CommType.C3, CommType.CG),
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


def method_named(method: str | Method, *, late_gradient: bool = False) -> Method:
    """The method with this name; a ``Method`` is its own. With a late gradient, if asked for.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    if not isinstance(method, Method):
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
        method = METHODS[method]
    return method.with_late_gradient() if late_gradient else method
