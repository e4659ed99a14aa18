"""The methods: one value each, whose chain says it all.

A chain says what the output layer does for one microbatch between the last stage's F and its B, in the words
of ``passes.py``: a pass of every rank, then the collective that carries its result, and so on. Chains beside
it start where that one has come by. From these follow the passes and collectives of a method, what each waits
for, who produces it, and the number of barriers: the collectives on the way to B that all ranks' passes
produce.

    naive       C0 S C1 S2 C2 T C3 B    beside   C2 L CG B    C2 TW    CG TW
    vocab-1     C0 S C1 T C2 B          beside   C1 L CG B    C1 TW    CG TW
    vocab-2     C0 S C1 B               beside   C1 L CG B    C1 T     CG T
    interlaced  C0 [S] B                in brackets: all ranks run it in step, with its collectives inside

The gradient of the loss is known when the tokens' losses are: L, on one rank, runs the loss function, and CG
sends every token's gradient to all ranks. B scales the rows of the input gradient with it. Only the weight
gradient (TW, in vocab-2 T) waits for CG as well, and may be delayed at will. Interlaced's S does all of it.

An evaluation is a chain, too, which ends in the loss: ``C0 S C1 L``, for naive ``C0 S C1 S2 C2 L``. Where it
ranks the targets, R counts the ids of a shard that are likelier, and the next collective sums the counts:
``C0 S C1 R C2 L``, for naive ``C0 S C1 S2 C2 R C3 L``.

Baseline and redis have no chain, unless the last stage is not on the loss function's rank, as in a V shape:
then the tokens' losses travel there, and their gradient back, ``C0 L CG B`` (``placed``).

A method of your own is a ``Method`` with its chain and, in a cost file (``times/costs.py``), the times of its
passes. To train with it, write handlers for what is new in it (``pipeline/handlers/``).

Source: sections 4.1 to 4.4, appendix C.
Next: ``dependencies.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile

from megatron_vocabpar.schedule.words.passes import CommType, PassType
from megatron_vocabpar.schedule.words.placement import Placement

Word = PassType | CommType


@dataclass(frozen=True)
class Method:
    """How the vocabulary layers are placed and scheduled.

    Attributes:
        name: the one name, as on the command line.
        summary: one line for tables and ``--help``.
        chain: the words from C0 to B; empty if the first and the last stage run both layers inside F and B.
        beside: further chains, separated by commas. Each starts with a word that was named before, and may
            end in one.

    Raises:
        ValueError: for an unknown word, or a chain that does not lead from C0 to B (of an evaluation, to L).
    """

    name: str
    summary: str
    chain: str = ""
    beside: str = ""

    def __post_init__(self) -> None:
        words, *further = _chains(self)
        if words and (words[0] is not CommType.C0 or words[-1] not in (PassType.B, PassType.L)):
            raise ValueError(f"method {self.name}: the chain {self.chain!r} must lead from C0 to B")
        names, twice = set(words), len(set(words)) < len(words)
        for beside in further:
            if beside[0] not in names:
                raise ValueError(
                    f"method {self.name}: {self.beside!r} must start with a word of {self.chain!r}"
                )
            joins = beside[-1] is PassType.B or beside[-1] not in words
            twice = twice or bool(names & set(beside[1:-1] if joins else beside[1:]))
            names |= set(beside)
        if twice:
            raise ValueError(f"method {self.name}: {self.chain!r}, then {self.beside!r}, names a word twice")

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether the vocabulary layers are partitioned over all ranks."""
        return PassType.S in self.passes

    @cached_property
    def words(self) -> tuple[Word, ...]:
        """Passes and collectives, in order, without B."""
        words = dict.fromkeys(word for chain in _chains(self) for word in chain)
        return tuple(word for word in words if word is not PassType.B)

    @cached_property
    def passes(self) -> tuple[PassType, ...]:
        """The output layer's passes. Every rank runs them for every microbatch, except L."""
        return tuple(word for word in self.words if isinstance(word, PassType))

    @cached_property
    def collectives(self) -> tuple[CommType, ...]:
        """The output layer's collectives. Every rank takes part in them for every microbatch."""
        return tuple(word for word in self.words if isinstance(word, CommType))

    @cached_property
    def in_step(self) -> frozenset[PassType]:
        """The passes that all ranks start together, because collectives run inside them."""
        marked = (word for word in self.chain.split() if word.startswith("["))
        return frozenset(type_ for word in marked if isinstance(type_ := _type(self, word), PassType))

    @cached_property
    def weight_pass(self) -> PassType:
        """The pass that adds the weight gradient, the last to need the exponentials."""
        return next((type_ for type_ in (PassType.TW, PassType.T) if type_ in self.passes), PassType.S)

    @cached_property
    def waits_for(self) -> dict[PassType, tuple[Word, ...]]:
        """What each pass of the output layer, and the last stage's B, waits for; the chain's word first."""
        waits: dict[PassType, tuple[Word, ...]] = {}
        for before, word in _links(self):
            if isinstance(word, PassType):
                waits[word] = (*waits.get(word, ()), before)
        return waits

    @cached_property
    def producers(self) -> dict[CommType, PassType]:
        """The pass whose result each collective carries. C0 is left out: it carries the last stage's F."""
        return {
            word: before
            for before, word in _links(self)
            if isinstance(word, CommType) and isinstance(before, PassType)
        }

    def waiting_for(self, word: Word) -> frozenset[PassType]:
        """The passes that wait for a pass or collective of the chain."""
        return frozenset(pass_ for pass_, before in self.waits_for.items() if word in before)

    @property
    def barriers(self) -> int:
        """Communication barriers between the last stage's F and B (sections 4.3 and 4.4)."""
        return len(self.producers.keys() - {CommType.CG})


def without_gradients(method: Method, *, ranks_targets: bool = False) -> Method:
    """The method of an evaluation: the chain up to the statistics, then L, the loss function.

    No gradient follows, so ranks need not run the layer in step.
    """
    if not method.chain:
        return method
    forward = takewhile(lambda word: _unmarked(word) not in ("T", "L", "B"), method.chain.split())
    words = [*map(_unmarked, forward), *(["C1"] if method.in_step else [])]
    if ranks_targets and method.vocabulary_parallel:
        words += ["R", next(word for word in ("C1", "C2", "C3") if word not in words)]
    return replace(method, chain=" ".join([*words, "L"]), beside="")


def placed(method: Method, placement: Placement) -> Method:
    """The method with these stages: a whole layer sends its losses where the loss function is elsewhere."""
    if method.vocabulary_parallel or placement.rank_of(placement.loss_stage) == placement.last_rank:
        return method
    return replace(method, chain="C0 L CG B")


_WORDS: dict[str, Word] = {
    word.value: word
    for word in (
        *(PassType.S, PassType.S2, PassType.T, PassType.L, PassType.TW, PassType.R, PassType.B),
        *(CommType.C0, CommType.C1, CommType.C2, CommType.C3, CommType.CG),
    )
}


def _chains(method: Method) -> list[list[Word]]:
    chains = (method.chain, *filter(None, method.beside.split(",")))
    return [[_type(method, word) for word in chain.split()] for chain in chains]


def _links(method: Method) -> Iterator[tuple[Word, Word]]:
    return (link for chain in _chains(method) for link in pairwise(chain))


def _unmarked(word: str) -> str:
    return word.removeprefix("[").removesuffix("]")


def _type(method: Method, word: str) -> Word:
    name = _unmarked(word)
    if name not in _WORDS:
        raise ValueError(f"method {method.name}: {word!r} in its chain; there are {', '.join(_WORDS)}")
    return _WORDS[name]


BASELINE, REDIS, NAIVE, INTERLACED = "baseline", "redis", "naive", "interlaced"
VOCAB_1, VOCAB_2 = "vocab-1", "vocab-2"
DEFAULT = VOCAB_2
"""The default method: it holds one microbatch less than ``VOCAB_1``."""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(BASELINE, "input layer on the first stage, output layer on the last"),
        Method(REDIS, "baseline with transformer layers moved away from the last stage"),
        Method(
            NAIVE,
            "partitioned; maximum, sum and input gradient reduced one by one",
            "C0 S C1 S2 C2 T C3 B",
            "C2 L CG B, C2 TW, CG TW",
        ),
        Method(
            VOCAB_1,
            "partitioned, Algorithm 1: statistics, then the input gradient",
            "C0 S C1 T C2 B",
            "C1 L CG B, C1 TW, CG TW",
        ),
        Method(
            VOCAB_2,
            "partitioned, Algorithm 2: one barrier, T delayed at will",
            "C0 S C1 B",
            "C1 L CG B, C1 T, CG T",
        ),
        Method(INTERLACED, "partitioned; all ranks stop for a synchronous output layer", "C0 [S] B"),
    )
}


def method_named(method: str | Method) -> Method:
    """The method with this name; a ``Method`` stands for itself.

    Raises:
        ValueError: if there is none; the message lists the names.
    """
    if not isinstance(method, Method):
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
        method = METHODS[method]
    return method
