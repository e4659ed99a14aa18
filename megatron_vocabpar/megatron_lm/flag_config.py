"""``FlagConfig``, the values of our flags. A field that is an ``option`` is a flag.

Standard library only. Next: ``flags.py``, which makes the flags and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vocabpar.option import option
from megatron_vocabpar.pipeline.options import DEFAULTS, VocabOptions
from megatron_vocabpar.schedule.make.families import SEARCH, Family, claimed_peak, families, family_named
from megatron_vocabpar.schedule.words.methods import BASELINE, DEFAULT, METHODS, VOCAB_2, method_named
from megatron_vocabpar.schedule.words.placement import Placement, Shape

AUTO = "auto"
FAMILIES = (*families(), SEARCH, AUTO)
"""Families; ``search``, the fastest family for the number of chunks; ``auto``, the fastest method, too."""

PROFILE_ITERATIONS = 5
"""Iterations that are measured by default, after the first."""


@dataclass(frozen=True, slots=True)
class OpenSchedules:
    """The schedules that the flags leave open, for one pipeline size and number of model chunks on each rank.

    The model is built before a search, so a search keeps to one placement: the V shape for two chunks.

    Attributes:
        families: the families that the schedule may come from.
        p: pipeline size.
        chunks: model chunks on each rank.
        shape: how stages are placed on ranks, the same in all of the families.
        most_activations: the most microbatches whose activations a rank may hold, as given; by default for
            ``search`` and ``auto`` what 1F1B needs with vocab-2, for one family None: what that family needs.
        has_pairs: the schedule may have pairs, which hide the exchange between experts.
        splits_w: weight gradients may be separate passes.
    """

    families: tuple[Family, ...]
    p: int
    chunks: int
    shape: Shape
    most_activations: float | None
    has_pairs: bool
    splits_w: bool

    @property
    def placement(self) -> Placement:
        """The map from chunks to stages.

        Raises:
            ValueError: if no pipeline has this size, or no rank this many chunks.
        """
        return Placement(self.p, self.chunks, self.shape)


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
        "The method that computes the vocabulary layers; vocab-2 by default.",
        page=f"It is one of {', '.join(f'`{name}`' for name in METHODS)}; [methods.md](methods.md) explains "
        "them. `redis` only moves transformer layers away from the last stage, and `baseline` leaves the "
        "vocabulary layers whole, so that another family can be tried without partitioning anything.",
        choices=tuple(METHODS),
        example="vocab-1",
        by_default=f"`{DEFAULT}`",
    )
    family: str = option(
        "1f1b",
        "The family of pipeline schedules into which the vocabulary passes are woven.",
        page=f"It is one of {', '.join(f'`{name}`' for name in FAMILIES)}; "
        "[megatron.md](megatron.md#schedules) says what each needs. `search` takes the fastest family, and "
        "`auto` the fastest family and method.",
        metavar=f"{{{','.join(FAMILIES)}}}",
        unset="1f1b",
        example="v-half --num-virtual-stages-per-pipeline-rank 2",
    )
    costs: str | None = option(
        None,
        "A JSON file with the times of the passes, with which the schedule is planned.",
        page="`vocabpar schedule --costs` reads the same [format](simulate.md#costs). By default the times "
        "are the planner's estimates for the model.",
        metavar="FILE",
        example="vocab_parallel_costs.json",
        by_default="none; the planner's estimates for the model are used",
    )
    profile_iterations: int = option(
        PROFILE_ITERATIONS,
        "The number of iterations whose passes are timed, so that the schedule can be planned again while "
        f"training goes on; {PROFILE_ITERATIONS} by default, or 0 with --vocab-parallel-costs. 0 keeps the "
        "first plan.",
        page="[Measured plans](megatron.md#measured-plans) says what happens. CUDA graphs need 0.",
        metavar="N",
        least=0,
        example="0",
        by_default=f"`{PROFILE_ITERATIONS}`, or `0` with --vocab-parallel-costs",
    )
    max_activations: float | None = option(
        None,
        "The most microbatches whose activations a rank may hold, at least 1; by default what the family "
        "needs.",
        page="The limit is hard: a schedule with less memory is slower, and holds it.",
        metavar="X",
        least=1,
        example="6",
        by_default="what the family needs; for `search` and `auto` what 1F1B needs with vocab-2",
    )
    timeline: int | None = option(
        None,
        "Write the measured timeline of all ranks in this iteration.",
        page="The folder `vocab_parallel_timeline_<iteration>/` in `--tensorboard-dir`, or else in "
        "`--save`, then has an interactive page and a trace for Perfetto; [timeline.md](timeline.md) says "
        "how to read them.",
        metavar="ITER",
        least=1,
        example="20 --tensorboard-dir tb",
        by_default="no timeline is written",
    )
    layout: str | None = option(
        None,
        "Place the transformer layers so that the estimated iteration is the shortest.",
        page="It takes the place of `--pipeline-model-parallel-layout`. Without the flag rank 0 prints the "
        "layout that it recommends, where that gains 1 % or more.",
        choices=("auto",),
        example="auto",
        by_default="Megatron's flags place the layers",
    )
    strict: bool = option(
        False,
        "End the job, instead of printing a warning, where Megatron's version or a combination of flags has "
        "not been run.",
        page="[What is refused](megatron.md#what-is-refused) tells warnings from errors.",
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
        return any(family.shape != "standard" for family in self._families(2))

    def open_schedules(self, p: int, chunks: int) -> OpenSchedules:
        """What the flags leave open, on ``p`` ranks with this many model chunks each."""
        fitting, cap = self._families(chunks), self.max_activations
        shape: Shape = fitting[0].shape if fitting else "standard"
        if cap is None and self.family in (SEARCH, AUTO):
            cap = claimed_peak(method_named(VOCAB_2), p, family_named("1f1b"), 1)
        return OpenSchedules(
            families=fitting,
            p=p,
            chunks=chunks,
            shape=shape,
            most_activations=cap,
            has_pairs=any(family.pairs for family in fitting),
            splits_w=any(family.splits_w for family in fitting),
        )

    def _families(self, chunks: int) -> tuple[Family, ...]:
        if self.family not in (SEARCH, AUTO):
            return (family_named(self.family),)
        shape = "vshape" if chunks == 2 else "standard"
        fitting = (f for f in families().values() if f.shape == shape and f.allows(chunks))
        return tuple(family for family in fitting if self.hides_exchange or not family.pairs)
