"""``FlagConfig``, the values of our flags. A field that is an ``option`` is a flag.

Standard library only. Next: ``flags.py``, which makes the flags and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vocabpar.option import option
from megatron_vocabpar.pipeline.options import DEFAULTS, VocabOptions
from megatron_vocabpar.schedule.make.families import SEARCH, Family, claimed_peak, families, family_named
from megatron_vocabpar.schedule.words.methods import BASELINE, METHODS, VOCAB_2, method_named
from megatron_vocabpar.schedule.words.placement import Placement

AUTO = "auto"
FAMILIES = (*families(), SEARCH, AUTO)
"""Families; ``search``, the fastest family for the number of chunks; ``auto``, the fastest method, too."""

PROFILE_ITERATIONS = 5
"""Iterations that are measured by default, after the first."""


@dataclass(frozen=True, slots=True)
class FlagConfig:
    """The values of our flags, and what follows from them.

    Attributes:
        enabled: the flags change where layers are, or their schedule.
        method: a name of ``schedule.words.methods``; ``baseline`` if no flag changes anything.
        family: one of ``FAMILIES``; ``baseline`` and ``redis`` on 1f1b run Megatron's own schedule.
        options: how the vocabulary layers are computed.
        methods: the methods that ``auto`` and ``search`` choose from.
        hides_exchange: Megatron is asked to hide the exchange between experts, so ``search`` and ``auto`` may
            choose schedules with pairs.
        redistribute: transformer layers move away from the last stage.
        final_stage_layers: the number of layers that stay there; None: it follows from operation counts.
    """

    enabled: bool = False
    method: str = option(
        BASELINE,
        "How they are computed; vocab-2 by default.",
        page=f"One of {', '.join(f'`{name}`' for name in METHODS)}; `redis` only moves transformer layers, "
        "`baseline` moves nothing.",
        choices=tuple(METHODS),
    )
    family: str = option(
        "1f1b",
        "Which family of pipeline schedules they are woven into.",
        page=f"One of {', '.join(f'`{name}`' for name in FAMILIES)}; see [Schedules](#schedules).",
        metavar=f"{{{','.join(FAMILIES)}}}",
        unset="1f1b",
    )
    costs: str | None = option(
        None,
        "Times of the passes to plan with, as JSON.",
        page="As `vocabpar schedule --costs` reads it.",
        metavar="FILE",
    )
    profile_iterations: int = option(
        PROFILE_ITERATIONS,
        "Iterations of which the passes are timed, to plan again while training goes on; "
        f"{PROFILE_ITERATIONS} by default, 0 with --vocab-parallel-costs; 0 leaves the plan as it is.",
        page="See [measured plans](#measured-plans).",
        metavar="N",
        least=0,
    )
    max_activations: float | None = option(
        None,
        "Most microbatches whose activations a rank may hold.",
        page="At least 1; by default what the family needs.",
        metavar="X",
        least=1,
    )
    timeline: int | None = option(
        None,
        "Write the measured timeline of this iteration of all ranks.",
        page="With pictures, in `vocab_parallel_timeline_<iteration>/` of `--tensorboard-dir` or `--save`.",
        metavar="ITER",
        least=1,
    )
    layout: str | None = option(
        None,
        "Place the layers where an iteration is estimated to be the shortest.",
        page="In place of `--pipeline-model-parallel-layout`; see [Schedules](#schedules).",
        choices=("auto",),
    )
    strict: bool = option(
        False,
        "End, and not only warn, where Megatron or a combination of flags has not been run.",
        page="See [What is refused](#what-is-refused).",
    )
    options: VocabOptions = DEFAULTS
    methods: tuple[str, ...] = ()
    hides_exchange: bool = False
    redistribute: bool = False
    final_stage_layers: int | None = None

    @property
    def partitions_vocabulary(self) -> bool:
        return method_named(self.method).vocabulary_parallel

    @property
    def runs_our_schedule(self) -> bool:
        """Whether Megatron's own schedule is replaced."""
        return self.partitions_vocabulary or self.family != "1f1b"

    @property
    def leaves_open(self) -> bool:
        """Whether the vocabulary layers may be whole or partitioned, whichever is faster."""
        return self.partitions_vocabulary and BASELINE in self.methods

    @property
    def is_placed(self) -> bool:
        """Whether the placement of model chunks may differ from Megatron's."""
        return any(family.shape != "standard" for family in self.families(2))

    def has_pairs(self, chunks: int) -> bool:
        """Whether the schedule may have pairs, which hide the exchange between experts."""
        return any(family.pairs for family in self.families(chunks))

    def splits_w(self, chunks: int) -> bool:
        """Whether weight gradients may be separate passes."""
        return any(family.splits_w for family in self.families(chunks))

    def most_activations(self, p: int) -> float | None:
        """Most microbatches whose activations a rank may hold; ``search``, ``auto``: what 1F1B needs."""
        if self.max_activations is None and self.family in (SEARCH, AUTO):
            return claimed_peak(method_named(VOCAB_2), p, family_named("1f1b"), 1)
        return self.max_activations

    def families(self, chunks: int) -> tuple[Family, ...]:
        """The families that the schedule may come from, on ranks with this many model chunks.

        The model is built before a search, so a search keeps to one placement: the V shape for two chunks.
        """
        if self.family not in (SEARCH, AUTO):
            return (family_named(self.family),)
        shape = "vshape" if chunks == 2 else "standard"
        fitting = (f for f in families().values() if f.shape == shape and f.allows(chunks))
        return tuple(family for family in fitting if self.hides_exchange or not family.pairs)

    def placement(self, p: int, chunks: int) -> Placement:
        """The map from the chunks of ``p`` ranks to stages."""
        return Placement(p, chunks, self.families(chunks)[0].shape)
