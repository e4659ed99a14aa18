"""Command-line flags: our options beside Megatron's, one frozen configuration, and every cross-flag check.

The options are read twice: from ``sys.argv`` when Megatron is about to be imported, to know whether anything
is to be replaced at all, and by Megatron's own parser, so that they show in ``--help`` and in what Megatron
prints and saves. Standard library only. Next: ``refusals.py``, the table of what cannot be combined.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vocabpar.layers.recipes import RECIPES, ROW, Fp8Recipe
from megatron_vocabpar.layers.terms import PLAIN, LossTerms
from megatron_vocabpar.schedule.make.families import SEARCH, Family, families, family_named
from megatron_vocabpar.schedule.words.methods import METHODS, method_named
from megatron_vocabpar.schedule.words.placement import Placement

AUTO = "auto"
SCHEDULES = (*families(), SEARCH, AUTO)
"""Schedule families; the fastest of those that fit the number of model chunks; that, of all methods."""

PROFILE_ITERATIONS = 5
"""Iterations that are measured by default, after the first."""

METRICS = ("entropy", "entropy-gradient", "accuracy")
"""What may be computed of every token beside its loss, by its flag's names."""

_HELP = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class Option:
    """One command-line option.

    Attributes:
        flag: as on the command line.
        arguments: further arguments of ``argparse``'s ``add_argument``.
        published: whether it is a spelling of the published scripts, kept so that their launch lines run.
    """

    flag: str
    arguments: dict[str, Any]
    published: bool = False

    @property
    def attribute(self) -> str:
        """Its name in the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")


LOSS_OPTIONS = {
    "z_loss": Option(
        "--vocab-parallel-z-loss",
        {"type": float, "default": None, "help": "Weight of the squared logsumexp in every token's loss."},
    ),
    "softcap": Option(
        "--vocab-parallel-logit-softcap",
        {"type": float, "default": None, "help": "Bound of the logits c: c tanh(logit / c), as in Gemma 2."},
    ),
    "label_smoothing": Option(
        "--vocab-parallel-label-smoothing",
        {"type": float, "default": None, "help": "Part of the label that is spread over all ids."},
    ),
    "logit_scale": Option(
        "--vocab-parallel-logit-scale",
        {"type": float, "default": None, "help": "Factor of the logits, before a softcap."},
    ),
}
"""The options that change the loss, by the field of ``LossTerms`` that they set."""

OPTIONS = (
    Option(
        "--enable-vocab-parallel",
        {"action": "store_true", "help": "Partition the vocabulary layers over all pipeline stages."},
    ),
    Option(
        "--vocab-parallel-method",
        {"choices": tuple(METHODS), "default": None, "help": "How they are computed; vocab-2 by default."},
    ),
    Option(
        "--vocab-parallel-schedule",
        {
            "metavar": f"{{{','.join(SCHEDULES)}}}",
            "default": "1f1b",
            "help": "Which pipeline schedule they are woven into.",
        },
    ),
    Option(
        "--vocab-parallel-costs",
        {"metavar": "FILE", "default": None, "help": "Times of the passes to plan with, as JSON."},
    ),
    Option(
        "--vocab-parallel-profile-iterations",
        {
            "type": int,
            "metavar": "N",
            "default": None,
            "help": "Iterations of which the passes are timed, to plan again while training goes on; "
            f"{PROFILE_ITERATIONS} by default, 0 with --vocab-parallel-costs; 0 leaves the plan as it is.",
        },
    ),
    Option(
        "--vocab-parallel-max-activations",
        {
            "type": float,
            "metavar": "X",
            "default": None,
            "help": "Most microbatches whose activations a rank may hold.",
        },
    ),
    Option(
        "--vocab-parallel-timeline",
        {
            "type": int,
            "metavar": "ITER",
            "default": None,
            "help": "Write the measured timeline of this iteration of all ranks.",
        },
    ),
    Option(
        "--vocab-parallel-allow-unknown-megatron",
        {
            "action": "store_true",
            "help": "Run on a Megatron version that is not in the table, if it has every parameter we use.",
        },
    ),
    Option(
        "--vocab-parallel-recompute-logits",
        {
            "action": "store_true",
            "help": "Keep nothing of the logits from pass S to T, which then computes them again.",
        },
    ),
    Option(
        "--vocab-parallel-tokens-per-chunk",
        {
            "type": int,
            "default": None,
            "help": "Tokens whose float32 logits exist at one time; by default as many as take 32 MiB.",
        },
    ),
    Option(
        "--vocab-parallel-invariant",
        {
            "action": "store_true",
            "help": "The same bits of the loss and the vocabulary layers' gradients for every pipeline and "
            "tensor size, at a cost.",
        },
    ),
    *LOSS_OPTIONS.values(),
    Option(
        "--vocab-parallel-fp32-head",
        {
            "action": "store_true",
            "help": "Keep the output layer's weight in float32 in a 16-bit model, and compute with it so.",
        },
    ),
    Option(
        "--vocab-parallel-fp8-head",
        {
            "nargs": "?",
            "choices": tuple(RECIPES),
            "const": ROW.name,
            "help": "Multiply 8-bit operands in the output layer, with a scale for each row or (mxfp8) each "
            "32 neighbours: log-probabilities of trained models were off by hundredths of a nat.",
        },
    ),
    Option(
        "--vocab-parallel-late-gradient",
        {
            "action": "store_true",
            "help": "The loss function may be any function of the tokens' losses, not a linear one alone: "
            "their gradients are sent when it has run, not ahead.",
        },
    ),
    Option(
        "--vocab-parallel-drop-masked",
        {
            "action": "store_true",
            "help": "In training, leave tokens that the loss function masks out of the output layer: it gets "
            "losses of 0 for them.",
        },
    ),
    Option(
        "--vocab-parallel-metrics",
        {
            "nargs": "+",
            "choices": METRICS,
            "default": [],
            "help": "What is given of every token to a loss function that has a parameter for it (entropy, "
            "correct), else logged as its mean; entropy-gradient lets the loss depend on the entropies.",
        },
    ),
    Option(
        "--vocab-parallel-independent-init",
        {
            "action": "store_true",
            "help": "Draw the initial vocabulary weights on each rank, which differ then from those of a run "
            "without the flag, instead of whole on the first and last stage.",
        },
    ),
    Option(
        "--disable-backward-fusion",
        {"action": "store_true", "help": "As published: --vocab-parallel-method vocab-1."},
        published=True,
    ),
    Option(
        "--use-interlaced-schedule",
        {"action": "store_true", "help": "As published: --vocab-parallel-method interlaced."},
        published=True,
    ),
    Option(
        "--enable-layer-redistribution",
        {"action": "store_true", "help": "As published: move transformer layers away from the last stage."},
        published=True,
    ),
    Option(
        "--final-stage-num-layers",
        {"type": int, "default": None, "help": "Transformer layers left on the last stage."},
        published=True,
    ),
    Option(
        "--schedule-timer-start",
        {"type": int, "default": None, "help": "As published; has no effect: nothing is timed in training."},
        published=True,
    ),
    Option(
        "--schedule-timer-end",
        {"type": int, "default": None, "help": "As published; has no effect."},
        published=True,
    ),
)


@dataclass(frozen=True, slots=True)
class FlagConfig:
    """What the flags ask for.

    Attributes:
        enabled: whether layers are to be moved or scheduled otherwise at all.
        method: a name of ``schedule.words.methods``; ``baseline`` where no option changes anything.
        schedule: one of ``SCHEDULES``; ``baseline`` and ``redis`` on 1f1b run Megatron's own.
        methods: what ``auto`` chooses from.
        costs: a cost file to plan with; None: the proportions of ``PassCosts.default``.
        profile_iterations: how many iterations are measured to plan again; 0: none.
        max_activations: most microbatches whose activations a rank may hold; None: as the family needs.
        timeline: the iteration whose measured timeline is written; None: of none.
        redistribute: whether transformer layers move away from the last stage.
        final_stage_layers: how many stay there; None: as the operation counts say.
        allow_unknown: run on an unknown Megatron version if its signatures allow it.
        recompute_logits: T computes logits again instead of keeping their exponentials.
        tokens_per_chunk: tokens whose float32 logits exist at one time; None: as many as take 32 MiB.
        invariant: the same bits for every sharding of the vocabulary.
        terms: what the loss consists of.
        fp32_head: the output weight is float32 in a 16-bit model.
        fp8_head: the recipe of 8-bit operands that the output layer multiplies; None: of none.
        late_gradient: the loss function may be any function of the tokens' losses.
        metrics: which of ``METRICS`` are computed.
        drop_masked: masked tokens take no part in the output layer.
        independent_init: each rank draws its initial vocabulary rows.
    """

    enabled: bool = False
    method: str = "baseline"
    schedule: str = "1f1b"
    redistribute: bool = False
    final_stage_layers: int | None = None
    allow_unknown: bool = False
    recompute_logits: bool = False
    tokens_per_chunk: int | None = None
    invariant: bool = False
    terms: LossTerms = PLAIN
    fp32_head: bool = False
    fp8_head: Fp8Recipe | None = None
    late_gradient: bool = False
    drop_masked: bool = False
    metrics: tuple[str, ...] = ()
    independent_init: bool = False
    methods: tuple[str, ...] = ()
    costs: str | None = None
    profile_iterations: int = PROFILE_ITERATIONS
    max_activations: float | None = None
    timeline: int | None = None

    @property
    def partitions_vocabulary(self) -> bool:
        """Whether the vocabulary layers are partitioned."""
        return method_named(self.method).vocabulary_parallel

    @property
    def runs_our_schedule(self) -> bool:
        """Whether Megatron's own schedule is replaced."""
        return self.partitions_vocabulary or self.schedule != "1f1b"

    @property
    def is_placed(self) -> bool:
        """Whether model chunks may be placed otherwise than Megatron places them."""
        return any(family.shape != "standard" for family in self.families(2))

    @property
    def splits_w(self) -> bool:
        """Whether weight gradients may be passes of their own."""
        return any(family.splits_w for family in self.families(2))

    def families(self, chunks: int) -> tuple[Family, ...]:
        """The families that the schedule may be of, on ranks with this many model chunks.

        A search keeps to one placement, since the model is built before: the V shape for two chunks.
        """
        if self.schedule not in (SEARCH, AUTO):
            return (family_named(self.schedule),)
        shape = "vshape" if chunks == 2 else "standard"
        return tuple(f for f in families().values() if f.shape == shape and f.allows(chunks))

    def placement(self, p: int, chunks: int) -> Placement:
        """Which stage each of the chunks of ``p`` ranks is."""
        return Placement(p, chunks, self.families(chunks)[0].shape)


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our options to Megatron's parser, as its ``extra_args_provider`` would."""
    group = parser.add_argument_group(title="vocabulary parallelism")
    for option in OPTIONS:
        group.add_argument(option.flag, **option.arguments)
    return parser


def chain(provider: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """An ``extra_args_provider`` that runs ``provider`` and then adds our options."""

    def both(parser: Any) -> Any:
        return add_options(provider(parser) if provider is not None else parser)

    return both


def is_asked_for(argv: Sequence[str]) -> bool:
    """Whether the command line holds one of our options, or asks for help."""
    names = {option.flag for option in OPTIONS} | set(_HELP)
    return any(word.partition("=")[0] in names for word in argv)


def config_from_argv(argv: Sequence[str]) -> FlagConfig:
    """What our options in a command line with Megatron's arguments ask for.

    Raises:
        ValueError: if they contradict each other, naming flags and remedy.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    args, _ = add_options(parser).parse_known_args(list(argv))
    return config_from(args)


def config_from(args: Any) -> FlagConfig:
    """The configuration that parsed arguments ask for.

    Raises:
        ValueError: if our options contradict each other, naming flags and remedy.
    """
    named = [
        ("--vocab-parallel-method", args.vocab_parallel_method),
        ("--use-interlaced-schedule", "interlaced" if args.use_interlaced_schedule else None),
        ("--disable-backward-fusion", "vocab-1" if args.disable_backward_fusion else None),
    ]
    methods = {flag: method for flag, method in named if method is not None}
    if args.final_stage_num_layers is not None and not (
        args.enable_layer_redistribution or args.vocab_parallel_method == "redis"
    ):
        raise ValueError("--final-stage-num-layers needs --enable-layer-redistribution; add it")
    redistribute = args.enable_layer_redistribution or args.vocab_parallel_method == "redis"
    if not args.enable_vocab_parallel:
        if methods:
            raise ValueError(f"{' and '.join(methods)}: needs --enable-vocab-parallel; add it")
        method = "redis" if redistribute else "baseline"
    else:
        if len(set(methods.values())) > 1:
            raise ValueError(f"{' and '.join(methods)} ask for different methods; keep one of them")
        method = next(iter(methods.values()), "vocab-2")
    _check_output_options(args, method)
    _check_schedule(args)
    _check_planning(args, method)
    profile_iterations = args.vocab_parallel_profile_iterations
    if profile_iterations is None:
        profile_iterations = PROFILE_ITERATIONS if args.vocab_parallel_costs is None else 0
    terms = _loss_terms(args, method)
    return FlagConfig(
        enabled=method != "baseline" or args.vocab_parallel_schedule != "1f1b",
        method=method,
        schedule=args.vocab_parallel_schedule,
        redistribute=redistribute,
        final_stage_layers=args.final_stage_num_layers,
        allow_unknown=args.vocab_parallel_allow_unknown_megatron,
        recompute_logits=args.vocab_parallel_recompute_logits,
        tokens_per_chunk=args.vocab_parallel_tokens_per_chunk,
        invariant=args.vocab_parallel_invariant,
        terms=terms,
        fp32_head=args.vocab_parallel_fp32_head,
        fp8_head=RECIPES.get(args.vocab_parallel_fp8_head),
        late_gradient=args.vocab_parallel_late_gradient,
        drop_masked=args.vocab_parallel_drop_masked,
        metrics=_metrics(args, method),
        methods=_open_methods(args, terms, methods) if args.vocab_parallel_schedule == AUTO else (),
        costs=args.vocab_parallel_costs,
        profile_iterations=profile_iterations,
        max_activations=args.vocab_parallel_max_activations,
        timeline=args.vocab_parallel_timeline,
        independent_init=args.vocab_parallel_independent_init,
    )


def _open_methods(args: Any, terms: LossTerms, named: dict[str, str]) -> tuple[str, ...]:
    """The methods that partition the vocabulary layers and go with the other options, or the one named."""
    if named:
        return tuple(set(named.values()))
    naive = not (
        args.vocab_parallel_recompute_logits
        or args.vocab_parallel_invariant
        or args.vocab_parallel_fp8_head
        or args.vocab_parallel_metrics
        or terms.label_smoothing
    )
    return tuple(
        name for name, method in METHODS.items() if method.vocabulary_parallel and (naive or name != "naive")
    )


def _metrics(args: Any, method: str) -> tuple[str, ...]:
    asked = tuple(name for name in METRICS if name in args.vocab_parallel_metrics)
    flag = f"--vocab-parallel-metrics {' '.join(asked)}"
    others = {
        f"method {method}": method == "naive" or not method_named(method).vocabulary_parallel,
        "--vocab-parallel-recompute-logits": args.vocab_parallel_recompute_logits,
        "--vocab-parallel-invariant": args.vocab_parallel_invariant,
        "--vocab-parallel-fp8-head": args.vocab_parallel_fp8_head,
        "--vocab-parallel-logit-softcap": args.vocab_parallel_logit_softcap is not None,
    }
    against = [other for other, is_given in others.items() if is_given]
    if asked and against:
        raise ValueError(
            f"{flag}: made of the exponentials that vocab-1, vocab-2 and interlaced keep; not with "
            f"{' and '.join(against)}"
        )
    if "entropy-gradient" in asked and not args.vocab_parallel_late_gradient:
        raise ValueError(f"{flag}: its gradient comes late; give --vocab-parallel-late-gradient, too")
    return asked


def _check_planning(args: Any, method: str) -> None:
    least = {
        "--vocab-parallel-profile-iterations": (args.vocab_parallel_profile_iterations, 0),
        "--vocab-parallel-max-activations": (args.vocab_parallel_max_activations, 1),
        "--vocab-parallel-timeline": (args.vocab_parallel_timeline, 1),
    }
    for flag, (value, lowest) in least.items():
        if value is not None and not value >= lowest:
            raise ValueError(f"{flag} {value:g}: give {lowest} or more")
    given = [flag for flag, (value, _) in least.items() if value is not None]
    given += ["--vocab-parallel-costs"] if args.vocab_parallel_costs is not None else []
    if given and not (method_named(method).vocabulary_parallel or args.vocab_parallel_schedule != "1f1b"):
        raise ValueError(
            f"{' and '.join(given)}: method {method} runs Megatron's own schedule; use "
            "--enable-vocab-parallel with another method"
        )


def _check_schedule(args: Any) -> None:
    schedule = args.vocab_parallel_schedule
    if schedule not in SCHEDULES:
        raise ValueError(
            f"--vocab-parallel-schedule {schedule}: unknown schedule; use one of {', '.join(SCHEDULES)}"
        )
    if schedule != "1f1b" and not args.enable_vocab_parallel:
        raise ValueError(
            f"--vocab-parallel-schedule {schedule}: needs --enable-vocab-parallel; add it, with "
            "--vocab-parallel-method baseline to leave the vocabulary layers whole"
        )


def _loss_terms(args: Any, method: str) -> LossTerms:
    values = {name: getattr(args, option.attribute) for name, option in LOSS_OPTIONS.items()}
    given = {name: value for name, value in values.items() if value is not None}
    flags = " and ".join(LOSS_OPTIONS[name].flag for name in given)
    if given and not method_named(method).vocabulary_parallel:
        raise ValueError(
            f"{flags}: method {method} does not partition the output layer; use --enable-vocab-parallel with "
            "another method"
        )
    try:
        terms = LossTerms(**given)
    except ValueError as error:
        raise ValueError(f"{flags}: {error}") from error
    if terms.label_smoothing and (method == "naive" or args.vocab_parallel_invariant):
        other = "--vocab-parallel-invariant" if args.vocab_parallel_invariant else "method naive"
        raise ValueError(
            f"--vocab-parallel-label-smoothing: not with {other}; use vocab-1 or vocab-2 without it"
        )
    return terms


def _check_output_options(args: Any, method: str) -> None:
    asked = [
        flag
        for flag, is_asked in (
            ("--vocab-parallel-recompute-logits", args.vocab_parallel_recompute_logits),
            ("--vocab-parallel-tokens-per-chunk", args.vocab_parallel_tokens_per_chunk is not None),
            ("--vocab-parallel-invariant", args.vocab_parallel_invariant),
        )
        if is_asked
    ]
    heads = {
        "--vocab-parallel-fp32-head": args.vocab_parallel_fp32_head,
        "--vocab-parallel-fp8-head": args.vocab_parallel_fp8_head,
    }
    others = {
        "--vocab-parallel-independent-init": args.vocab_parallel_independent_init,
        "--vocab-parallel-late-gradient": args.vocab_parallel_late_gradient,
        "--vocab-parallel-drop-masked": args.vocab_parallel_drop_masked,
        **heads,
    }
    needs = [*asked, *(flag for flag, is_asked in others.items() if is_asked)]
    if all(heads.values()):
        raise ValueError(f"{' and '.join(heads)} ask for different precisions; keep one of them")
    if args.vocab_parallel_fp8_head and (method == "naive" or args.vocab_parallel_invariant):
        other = "--vocab-parallel-invariant" if args.vocab_parallel_invariant else "method naive"
        raise ValueError(f"--vocab-parallel-fp8-head: not with {other}; use vocab-1 or vocab-2 without it")
    if needs and not method_named(method).vocabulary_parallel:
        raise ValueError(
            f"{' and '.join(needs)}: method {method} does not partition the output layer; use "
            "--enable-vocab-parallel with another method"
        )
    if args.vocab_parallel_drop_masked and args.vocab_parallel_late_gradient:
        raise ValueError(
            "--vocab-parallel-drop-masked: masked tokens are known by the gradient that is sent ahead, not "
            "with --vocab-parallel-late-gradient; give such tokens labels of -100"
        )
    if args.vocab_parallel_invariant and len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)}: the last has blocks of its own; keep one of them")
    if args.vocab_parallel_invariant and method == "naive":
        raise ValueError("--vocab-parallel-invariant: not with naive; use vocab-1 or vocab-2")
    if args.vocab_parallel_recompute_logits and method == "naive":
        raise ValueError(
            "--vocab-parallel-recompute-logits: naive keeps its logits between two barriers; use vocab-1 or "
            "vocab-2, or leave it out"
        )
    if args.vocab_parallel_tokens_per_chunk is not None and args.vocab_parallel_tokens_per_chunk < 1:
        raise ValueError(
            f"--vocab-parallel-tokens-per-chunk {args.vocab_parallel_tokens_per_chunk}: give 1 or more"
        )
