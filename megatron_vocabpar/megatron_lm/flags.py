"""Command-line flags: generated from fields, added to Megatron's parser, read, and checked among each other.

The fields are those of ``FlagConfig`` and ``VocabOptions``. Flags are read twice: from ``sys.argv`` before
Megatron is imported, to know whether to replace anything, and by Megatron's own parser, so that they show in
``--help`` and in what Megatron prints and saves. Standard library only.

Next: ``rules/``, what cannot be combined with Megatron's flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_vocabpar.megatron_lm.flag_config import AUTO, FAMILIES, FlagConfig
from megatron_vocabpar.option import Option, asked_for, options_of, value_types, wrong_values
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.rules.option_rules import conflicts
from megatron_vocabpar.schedule.make.families import SEARCH
from megatron_vocabpar.schedule.words.methods import (
    BASELINE,
    DEFAULT,
    INTERLACED,
    METHODS,
    REDIS,
    VOCAB_1,
    method_named,
)

ENABLE = "--enable-vocab-parallel"
OVERLAP = "--overlap-moe-expert-parallel-comm"
"""Megatron's flag to hide the exchange between experts: a search may then choose schedules with pairs."""

_HELP = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        flag: as on the command line.
        arguments: further arguments of ``argparse``'s ``add_argument``.
        field: the field of a record that it sets; None if ``config_from`` reads it by name.
        page: what the page of flags says besides its help.
        example: a value for the example of that page.
        by_default: what that page says of its default.
    """

    flag: str
    arguments: dict[str, Any]
    field: str | None = None
    page: str = ""
    example: str = ""
    by_default: str = "off"

    @property
    def attribute(self) -> str:
        """Its name in the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")


def _flags_of(record: type) -> Iterator[Flag]:
    """The flags of a record's options, in the order of its fields."""
    types = value_types(record)
    defaults = {each.name: each.default for each in fields(record)}
    for name, each in options_of(record).items():
        if each.flag is not None:
            several = isinstance(defaults[name], tuple)
            yield Flag(
                _flag(name, each),
                _arguments(each, types[name], several),
                name,
                each.page,
                each.example,
                each.by_default or _said(defaults[name]),
            )


def _said(default: Any) -> str:
    """A default as the page says it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default == ():
        return "none"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _flag(name: str, each: Option) -> str:
    return f"--vocab-parallel-{each.flag or name.replace('_', '-')}"


def _arguments(each: Option, kind: type, several: bool = False) -> dict[str, Any]:
    """The arguments of ``add_argument`` for an option without a value, with a value or with several."""
    if kind is bool:
        return {"action": "store_true", "help": each.help}
    if several:
        return {"nargs": "+", "choices": each.choices, "default": (), "help": each.help}
    arguments = {"type": kind, "default": each.unset, "help": each.help}
    more = {
        "choices": each.choices,
        "metavar": each.metavar,
    }
    return arguments | {name: value for name, value in more.items() if value}


_PUBLISHED: dict[str, tuple[type, str]] = {
    "--disable-backward-fusion": (bool, "As published: --vocab-parallel-method vocab-1."),
    "--use-interlaced-schedule": (bool, "As published: --vocab-parallel-method interlaced."),
    "--enable-layer-redistribution": (
        bool,
        "As published: move transformer layers away from the last stage.",
    ),
    "--final-stage-num-layers": (int, "Transformer layers left on the last stage."),
}

PUBLISHED = tuple(
    Flag(flag, _arguments(Option(help=help), kind)) for flag, (kind, help) in _PUBLISHED.items()
)
"""The spellings of the published scripts, so that their methods run."""

FLAGS = (
    Flag(
        ENABLE,
        _arguments(Option(help="Partition the vocabulary layers over all pipeline stages."), bool),
        page="Without it and the flags of the published scripts nothing of Megatron is replaced.",
    ),
    *_flags_of(FlagConfig),
    *_flags_of(VocabOptions),
    *PUBLISHED,
)


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser, as its ``extra_args_provider`` would."""
    group = parser.add_argument_group(title="vocabulary parallelism")
    for flag in FLAGS:
        group.add_argument(flag.flag, **flag.arguments)
    return parser


def chain(provider: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """An ``extra_args_provider`` that runs ``provider`` and then adds our flags."""

    def both(parser: Any) -> Any:
        return add_options(provider(parser) if provider is not None else parser)

    return both


def is_asked_for(argv: Sequence[str]) -> bool:
    """Whether the command line holds one of our flags, or asks for help."""
    names = {flag.flag for flag in FLAGS} | set(_HELP)
    return any(word.partition("=")[0] in names for word in argv)


def config_from_argv(argv: Sequence[str]) -> FlagConfig:
    """The configuration that our flags in a command line with Megatron's arguments ask for.

    Raises:
        ValueError: if they contradict each other, naming flags and remedy.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    args, _ = add_options(parser).parse_known_args(list(argv))
    return replace(config_from(args), hides_exchange=OVERLAP in argv)


def config_from(args: Any) -> FlagConfig:
    """The configuration that parsed arguments ask for.

    Raises:
        ValueError: if our flags contradict each other, naming flags and remedy.
    """
    options = VocabOptions(**_values(VocabOptions, args))
    values = _values(FlagConfig, args)
    methods = _methods(args)
    redistribute = args.enable_layer_redistribution or args.vocab_parallel_method == REDIS
    if args.final_stage_num_layers is not None and not redistribute:
        raise ValueError("--final-stage-num-layers needs --enable-layer-redistribution; add it")
    if args.enable_vocab_parallel:
        method = next(iter(methods.values()), DEFAULT)
    else:
        _check_enabled(args, options, [*methods])
        method = REDIS if redistribute else BASELINE
    if args.vocab_parallel_costs is not None:
        values.setdefault("profile_iterations", 0)
    values["method"] = method
    config = FlagConfig(
        enabled=method != BASELINE or args.vocab_parallel_family != "1f1b",
        options=options,
        methods=_open_methods(args.vocab_parallel_family, options, methods),
        redistribute=redistribute,
        final_stage_layers=args.final_stage_num_layers,
        **values,
    )
    _check(config, args)
    return config


def _values(record: type, args: Any) -> dict[str, Any]:
    """The values that flags set, by the fields of a record."""
    options, values = options_of(record), {}
    for flag in FLAGS:
        value = getattr(args, flag.attribute)
        if flag.field in options and value is not None:
            values[flag.field] = tuple(value) if isinstance(value, list) else value
    return values


def spell(name: str, value: Any) -> str:
    """How a launch line writes a field."""
    each = (options_of(VocabOptions) | options_of(FlagConfig))[name]
    if isinstance(value, tuple):
        return f"{_flag(name, each)} {' '.join(value)}"
    return _flag(name, each) if isinstance(value, bool) else f"{_flag(name, each)} {value}"


def _methods(args: Any) -> dict[str, str]:
    """The methods that flags name, by flag."""
    named = [
        ("--vocab-parallel-method", args.vocab_parallel_method),
        ("--use-interlaced-schedule", INTERLACED if args.use_interlaced_schedule else None),
        ("--disable-backward-fusion", VOCAB_1 if args.disable_backward_fusion else None),
    ]
    methods = {flag: method for flag, method in named if method is not None}
    if args.enable_vocab_parallel and len(set(methods.values())) > 1:
        raise ValueError(f"{' and '.join(methods)} ask for different methods; keep one of them")
    return methods


def _open_methods(family: str, options: VocabOptions, named: dict[str, str]) -> tuple[str, ...]:
    """The method that is named; else those that take the options, in a search the default or none of ours."""
    if family not in (AUTO, SEARCH):
        return ()
    if named:
        return tuple(set(named.values()))
    names = [name for name in METHODS if name != REDIS] if family == AUTO else [DEFAULT, BASELINE]
    return tuple(name for name in names if not conflicts(options, method_named(name)))


def _check_enabled(args: Any, options: VocabOptions, flags: list[str]) -> None:
    """Refuse flags that have no effect without ``--enable-vocab-parallel``."""
    flags += [spell(name, getattr(options, name)) for name in asked_for(options, options_of(options))]
    if flags:
        raise ValueError(f"{' and '.join(flags)}: needs {ENABLE}; add it")
    family = args.vocab_parallel_family
    if family in FAMILIES and family != "1f1b":
        raise ValueError(
            f"--vocab-parallel-family {family}: needs {ENABLE}; add it, with "
            "--vocab-parallel-method baseline to leave the vocabulary layers whole"
        )


def _check(config: FlagConfig, args: Any) -> None:
    if config.family not in FAMILIES:
        raise ValueError(
            f"--vocab-parallel-family {config.family}: unknown family; use one of {', '.join(FAMILIES)}"
        )
    problems = conflicts(config.options, method_named(config.method), spell=spell)
    problems += [f"{found.asked}: {found.against}" for found in wrong_values(config, spell)]
    names = ("costs", "profile_iterations", "max_activations", "timeline", "layout")
    plans = [spell(name, value) for name, value in _values(FlagConfig, args).items() if name in names]
    if plans and not config.runs_our_schedule:
        problems.append(
            f"{' and '.join(plans)}: method {config.method} runs Megatron's own schedule; use {ENABLE} with "
            "another method"
        )
    if problems:
        raise ValueError("\n".join(problems))
